"""Every method's step in one table."""

import pytest
from transformers import BertConfig

from grade.errors import InputError
from grade.gradients.methods import METHODS, RELAXED
from grade.memory.compare import compare_methods, every_method
from grade.memory.decoding import quick_trace
from grade.memory.report import methods_json, methods_text

TINY = {"model": "tiny", "prompt_tokens": "4", "max_new_tokens": "2"}


def test_settings_go_to_the_methods_that_have_them():
    options = TINY | {"hops": "1", "num_generations": "3", "engine": "replay", "gradient_checkpointing": "false"}
    steps = {s.method: s for s in every_method((), ["num_iterations=2", "lora.r=4"], options, batch=4)}
    assert tuple(steps) == METHODS
    assert steps["ste"].hops == 1 and steps["ste_legacy"].engine_name == "replay"
    assert [steps[m].batch_size for m in ("ste", "rloo", "grpo", "ppo")] == [4, 6, 6, 6]  # whole groups of three
    assert steps["grpo"].num_iterations == 2 and steps["rloo"].num_iterations is None
    assert all(s.lora.r == 4 for s in steps.values())
    assert {s.method: s.batch_size for s in every_method((), [], TINY)}["ste"] == 1
    with pytest.raises(InputError, match="hops"):
        every_method((), [], TINY | {"hops": "-1"})


def test_a_method_that_cannot_use_the_reward_says_so(tmp_path):
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
    BertConfig(vocab_size=600, **sizes).save_pretrained(tmp_path)
    rows = compare_methods(every_method((), [], TINY | {"reward": f"hf:{tmp_path}"}), quick_trace)
    assert {row.config.method for row in rows if row.trace is None} == set(RELAXED)
    text, data = methods_text(rows), {row["method"]: row for row in methods_json(rows)}
    assert text.count("needs its gradient") == len(RELAXED) and "ppo " in text
    assert data["ste"]["peak_bytes"] is None and "vocabulary of 512" in data["ste"]["reason"]
    ppo = next(row.trace for row in rows if row.config.method == "ppo")
    assert (data["ppo"]["peak_bytes"], data["ppo"]["step_bytes"]) == (ppo.peak, ppo.step_bytes)
    assert data["ppo"]["peak_phase"] == ppo.peak_phase and data["ppo"]["reason"] is None
    with pytest.raises(InputError, match="no-such-model"):
        compare_methods(every_method((), [], TINY | {"model": "no-such-model"}), quick_trace)
