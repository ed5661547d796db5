"""What fits a budget, ways to run a step, single changes and methods in one table: straight lines, and real traces."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from transformers import BertConfig

from grade.errors import InputError
from grade.gradients.methods import METHODS, RELAXED
from grade.memory.plan import (
    ARITHMETIC,
    BANDWIDTH,
    compare_methods,
    every_method,
    plan,
    single_changes,
    ways_to_run,
)
from grade.memory.records import CATEGORIES
from grade.memory.report import methods_text
from grade.memory.settings import StepConfig
from grade.memory.trace import Trace, trace

SMALL = dict(model="tiny", batch_size=2, prompt_tokens=4, max_new_tokens=2, gumbel_topk=8, dtype="float32")
GROUP = StepConfig(model="tiny", prompt_tokens=4, max_new_tokens=6, dtype="float32", method="grpo", num_generations=4)
STEP = StepConfig(model="tiny", prompt_tokens=4, max_new_tokens=10, batch_size=2, gumbel_topk=8)
OPTIONS = {"model": "tiny", "prompt_tokens": 4, "max_new_tokens": 2}
ASKED = []


def by_hand(weights, **parts):
    """A trace with two phases."""
    high = dict.fromkeys(CATEGORIES, 0) | {"weights": weights} | parts
    low = dict.fromkeys(CATEGORIES, 0) | {"weights": weights}
    return Trace({"rollout": low, "forward": high}, [], [], 2, 2, 0, 0.0)


def fixed_tracer(step):
    """1,000 bytes of weights and 10 for each token of each sequence; hops cost nothing."""
    return by_hand(1000, temporary=10 * step.batch_size * step.max_new_tokens)


def straight(step, gpus, way):
    """Weights 1,000, of which fsdp2 divides 800 and adds 30; 100 (recomputed: 10) a sequence, and 1 for each token."""
    if way == "fsdp2" and step.adapter == "full":
        raise InputError("adapter", "full", "lora")
    ASKED.append((step.batch_size, step.max_new_tokens, step.gradient_checkpointing, gpus, way))
    kept = 10 if step.gradient_checkpointing else 100
    weights = 1000 if way != "fsdp2" else 200 + 800 // gpus
    kept = kept * step.batch_size + step.batch_size * step.max_new_tokens
    made = by_hand(weights, activations=kept, temporary={"none": 0, "ddp": 20, "fsdp2": 30}[way])
    received = {"none": 0, "ddp": 400 * (gpus - 1) // gpus, "fsdp2": int(8e12) * (gpus - 1) // gpus}[way]
    flops = int(1e12) * step.batch_size * (4 if step.gradient_checkpointing else 3)
    return replace(made, flops=flops, received=received)


def ways(room=2000):
    ASKED.clear()
    return {(w.gpus, w.sharding, w.gradient_checkpointing): w for w in ways_to_run(STEP, room, straight)}


def test_the_largest_batch_and_length_are_those_of_the_lines():
    rows = ways()
    assert rows[1, "none", False].batch_size == 9  # 1000 + 110 B <= 2000
    assert rows[1, "none", True].batch_size == 50  # 1000 + 20 B
    assert rows[4, "ddp", False].batch_size == 8  # 1020 + 110 B
    assert rows[2, "fsdp2", False].batch_size == 12  # 630 + 110 B
    assert rows[4, "fsdp2", False].batch_size == 14  # 430 + 110 B
    assert rows[8, "fsdp2", True].batch_size == 83  # 330 + 20 B
    assert rows[1, "none", False].max_new_tokens == 400  # 1000 + 200 + 2 T
    assert rows[8, "fsdp2", False].max_new_tokens == 735
    assert rows[8, "ddp", True].received == 350 and rows[4, "fsdp2", True].received == 6e12
    assert {(gpus, way) for *_, gpus, way in ASKED} == {(1, "none"), (2, "ddp"), (2, "fsdp2")}


def test_the_cheapest_comes_first_and_is_traced():
    rows = list(ways().values())
    assert all(a.gpu_seconds <= b.gpu_seconds for a, b in pairwise(rows))
    assert [row.traced for row in rows] == [True] + [False] * (len(rows) - 1)
    best = rows[0]
    assert (best.gpus, best.sharding, best.gradient_checkpointing, best.batch_size) == (1, "none", False, 9)
    assert best.gpu_seconds == pytest.approx(3e12 / ARITHMETIC + 10 * 1000 / BANDWIDTH / 9)
    assert (9, 10, False, 1, "none") in ASKED


def test_the_lines_are_near_real_traces():
    """Of four GPUs, where two were traced."""

    def tracer(step, gpus, way):
        return trace(step, **({} if gpus == 1 else dict(processes=gpus, sharding=way)))

    step = STEP.changed(batch_size=8, max_new_tokens=4)
    rows = ways_to_run(step, 1_500_000, tracer, counts=(2, 4))
    (row,) = [r for r in rows if (r.gpus, r.sharding, r.gradient_checkpointing) == (4, "fsdp2", False)]
    real = tracer(step.changed(batch_size=row.batch_size), 4, "fsdp2")
    assert real.peak == pytest.approx(row.peak, rel=0.02) and real.received == pytest.approx(row.received, rel=0.01)


@pytest.mark.parametrize("budget", [1030, 1059, 1060, 1234, 5000])
@pytest.mark.parametrize("own", [{}, {"method": "ste_legacy", "engine": "replay"}])
def test_what_a_budget_fits_is_the_largest_that_does(budget, own):
    config = StepConfig(**SMALL | {"max_new_tokens": 3} | own)
    fits = {f.quantity: f.value for f in plan(config, budget, tracer=fixed_tracer)}
    assert fits["batch_size"] == ((budget - 1000) // 30 or None)
    assert fits["max_new_tokens"] == (budget - 1000) // 20
    assert fits["hops"] == (None if budget < 1060 else 2)
    with_overhead = plan(config, budget + 7, overhead=7, quantities=("batch_size", "hops"), tracer=fixed_tracer)
    assert [fit.value for fit in with_overhead] == [fits["batch_size"], fits["hops"]]


def test_a_budget_below_the_weights_says_what_is_needed():
    with pytest.raises(InputError, match="at least 1000 bytes: weights"):
        plan(StepConfig(**SMALL | {"max_new_tokens": 3}), 999, tracer=fixed_tracer)


@pytest.mark.parametrize(("budget", "batch"), [(1200, None), (1239, None), (1240, 4), (1719, 8), (1720, 12)])
def test_a_batch_that_fits_is_made_of_whole_groups(budget, batch):
    (fit,) = plan(GROUP, budget, quantities=("batch_size",), tracer=fixed_tracer)
    assert (fit.value, fit.peak) == (batch, 1000 + 60 * (batch or 4))
    assert [f.quantity for f in plan(GROUP, 5000, tracer=fixed_tracer)] == ["batch_size", "max_new_tokens"]
    (most,) = plan(GROUP, 10**9, quantities=("batch_size",), tracer=fixed_tracer, most=11)
    assert most.value == 8


def test_single_changes_are_those_that_the_method_has():
    config = StepConfig(model="tiny", prompt_tokens=4, max_new_tokens=16, method="grpo", reward="trunk", batch_size=16)
    asked = []
    found = single_changes(config, trace(config), lambda step: asked.append(step) or trace(step))
    names = {"2 minibatches", "KL from the sampled tokens (k3)", "half the batch", "gradient checkpointing"}
    assert {c.name for c in found} >= names
    assert all(step.method == "grpo" and step.engine_name is None for step in asked)
    names = {c.name for c in single_changes(config.changed(batch_size=8), trace(config), fixed_tracer)}
    assert "2 minibatches" in names and "half the batch" not in names  # of one group
    relaxed = StepConfig(**SMALL)
    names = {c.name for c in single_changes(relaxed, fixed_tracer(relaxed.changed(batch_size=64)), fixed_tracer)}
    assert "half the batch" in names and not {"2 minibatches", "KL from the sampled tokens (k3)"} & names


def test_settings_go_to_the_methods_that_have_them():
    options = OPTIONS | {"hops": 1, "num_generations": 3, "engine": "replay", "gradient_checkpointing": False}
    options |= {"passes_per_step": 2, "lora": {"r": 4}, "batch_size": 4}
    steps = {s.method: s for s in every_method(options)}
    assert tuple(steps) == METHODS
    assert steps["ste"].hops == 1 and steps["ste_legacy"].engine_name == "replay"
    assert [steps[m].batch_size for m in ("ste", "rloo", "grpo", "ppo")] == [4, 6, 6, 6]  # whole groups of three
    assert steps["grpo"].passes_per_step == 2 and steps["rloo"].passes_per_step is None
    assert all(s.lora.r == 4 for s in steps.values())
    assert {s.method: s.batch_size for s in every_method(OPTIONS)}["ste"] == 1
    with pytest.raises(InputError, match="hops"):
        every_method(OPTIONS | {"hops": -1})


def test_a_method_that_cannot_use_the_reward_says_so(tmp_path):
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    BertConfig(vocab_size=600, **sizes).save_pretrained(tmp_path)
    rows = compare_methods(every_method(OPTIONS | {"reward": f"hf:{tmp_path}"}), trace)
    text, data = methods_text(rows), {row["method"]: row for row in rows}
    assert [row["method"] for row in rows] == list(METHODS) and json.loads(json.dumps(rows)) == rows
    assert {row["method"] for row in rows if row["reason"]} == set(RELAXED)
    assert text.count("needs its gradient") == len(RELAXED) and "ppo " in text
    assert data["ste"]["peak_bytes"] is None and "vocabulary of 512" in data["ste"]["reason"]
    ppo = trace(StepConfig.parse(data["ppo"]["config"]))
    assert (data["ppo"]["peak_bytes"], data["ppo"]["step_bytes"]) == (ppo.peak, ppo.step_bytes)
    assert data["ppo"]["peak_phase"] == ppo.peak_phase and data["ppo"]["reason"] is None
    with pytest.raises(InputError, match="no-such-model"):
        compare_methods(every_method(OPTIONS | {"model": "no-such-model"}), trace)
