"""The tracer against the same step on real tensors, against hand arithmetic, and against itself without shortcuts."""

from dataclasses import replace

import pytest
import torch
from conftest import saved_bytes
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3_5TextConfig, Qwen3MoeConfig

from grade.memory import meta
from grade.memory.compare import measure
from grade.memory.compat import kernels_of
from grade.memory.models import TINY, build_backbone, model_config, with_layers
from grade.memory.records import LiveTracker
from grade.memory.settings import StepConfig
from grade.memory.step import build, make_step, states_of
from grade.memory.trace import run_tracked, trace, trace_callable, trace_layers

SMALL = dict(batch_size=2, prompt_tokens=4, max_new_tokens=2, gumbel_topk=8, dtype="float32")


@pytest.fixture(scope="module")
def five_layers(tmp_path_factory):
    """A folder with nothing but config.json: enough for a trace, and deep enough to be extrapolated."""
    folder = tmp_path_factory.mktemp("five_layers")
    config = LlamaConfig(**TINY | {"num_hidden_layers": 5}, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    return str(folder)


CASES = [
    {},
    {"method": "gumbel", "reward": "trunk"},
    {"gradient_checkpointing": True, "attention": "eager"},
    {"engine": "checkpointed"},
    {"method": "ste_legacy", "gumbel_topk": 0},
    {"method": "gumbel_legacy", "reward": "trunk", "explicit_freeing": True},
    {"adapter": "full", "base_copies": 3},
    {"train_bias": True},
]
METHODS = [
    dict(method="rloo", num_generations=3, reward="trunk", autocast=True),
    dict(method="remax", batch_size=4, num_generations=2, attention="eager"),
    dict(method="grpo", gradient_checkpointing=True),
    dict(method="ppo", batch_size=4, reward="trunk"),
    dict(method="ppo", batch_size=2, dtype="bfloat16", gradient_checkpointing=True),
    dict(method="st", batch_size=3),
]
STEP = dict(prompt_tokens=4, max_new_tokens=6, dtype="float32")


@pytest.mark.parametrize("case", [*(SMALL | case for case in CASES), *(STEP | case for case in METHODS)], ids=str)
def test_the_predicted_peak_is_that_of_the_real_step_and_extrapolation_changes_nothing(five_layers, case):
    config = StepConfig(model=five_layers, **case)
    full, short = (trace(config, device="cpu", all_layers=every) for every in (True, False))
    assert (full.traced_layers, short.traced_layers) == (5, 3)
    assert full.peak == pytest.approx(measure(config)["measured_peak_bytes"], rel=0.01)
    assert short.peak == pytest.approx(full.peak, rel=0.005)
    assert (short.peak_phase, short.flops) == (full.peak_phase, full.flops)


def test_a_trained_token_bias_is_counted_with_its_gradient_and_adamws_two_moments(five_layers):
    with_bias, without = (
        trace(StepConfig(model=five_layers, train_bias=trained, **SMALL), device="cpu") for trained in (True, False)
    )
    bytes_of_bias = TINY["vocab_size"] * 4
    for category, times in (("adapter", 1), ("optimizer", 2), ("gradients", 1)):
        more = with_bias.phases["optimizer"][category] - without.phases["optimizer"][category]
        assert more == pytest.approx(times * bytes_of_bias, abs=512), category  # a step count is rounded to 512


UNLIKE = [  # two dense layers first; attention in every fourth layer
    (Qwen3MoeConfig, dict(num_hidden_layers=9, mlp_only_layers=[0, 1], num_experts=8, moe_intermediate_size=32), 5),
    (Qwen3_5TextConfig, dict(num_hidden_layers=20, linear_num_key_heads=2, linear_num_value_heads=4), 12),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "sizes", "traced"), UNLIKE, ids=lambda value: getattr(value, "__name__", None))
def test_layers_that_are_not_alike_are_extrapolated_by_what_repeats(tmp_path, kind, sizes, traced):
    kind(**TINY | sizes).save_pretrained(tmp_path)
    config = StepConfig(model=str(tmp_path), method="rloo", prompt_tokens=4, max_new_tokens=2)
    full, short = (trace(config, all_layers=every) for every in (True, False))
    assert (full.traced_layers, short.traced_layers) == (sizes["num_hidden_layers"], traced)
    assert short.categories == full.categories
    assert (short.peak, short.flops) == (pytest.approx(full.peak, rel=0.005), full.flops)


def test_categories_sum_to_the_peak_and_name_what_is_there():
    config = StepConfig(model="tiny", **SMALL)
    found = trace(config, all_layers=True)
    assert found.peak == trace_layers(config, model_config("tiny"), "cuda").peak
    for parts in found.phases.values():
        assert sum(parts.values()) <= found.peak
    backbone = build_backbone(model_config("tiny"), "float32")
    lora = sum(p.numel() for p in backbone.trainable_parameters()) * 4
    # 512-byte blocks: the adapter's tensors are multiples of it, so these are exact.
    assert found.categories["adapter"] == lora
    assert found.categories["optimizer"] == pytest.approx(2 * lora, rel=0.1)  # two moments, and a step count each
    assert {"rollout", "backward", "optimizer"} <= set(found.phases)


def test_the_key_value_cache_is_what_the_formula_says():
    config = StepConfig(model="tiny", **SMALL | {"max_new_tokens": 12})
    peak = trace(config, all_layers=True).phases["rollout"]["kv cache"]
    keys_and_values, layers, heads, width, itemsize = 2, 2, 2, 16, 4
    # P + T - 1 positions at the end; a growing cache holds the old and the new tensor of one layer at once.
    exact = 2 * (4 + 11) * keys_and_values * layers * heads * width * itemsize
    assert exact <= peak <= exact * 1.3


def test_saved_bytes_of_the_trace_are_autograds():
    config = StepConfig(model="tiny", **SMALL)
    real = make_step(config, *build(config, device="cpu"))
    tracker = run_tracked(real, round_to=1)
    # The same hooks on the same step without a tracker: storages packed by autograd, those from before left out.
    existing = [t for tensors in real.existing().values() for t in tensors]
    counted = saved_bytes(lambda: real.run(), exclude=existing)
    assert sum(r.nbytes for r in tracker.records if r.saved and r.op != "existing") == counted


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_s_attention_keeps_no_scores(masked, dtype):
    q = torch.empty(2, 4, 40, 16, dtype=dtype, device="meta", requires_grad=True)
    mask = torch.empty(2, 1, 40, 40, dtype=torch.bool, device="meta") if masked else None

    def attention():
        """The output, and the bytes of the largest storage that is saved for backward."""
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            out = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return out, max(t.untyped_storage().nbytes() for t in saved)

    with kernels_of("cuda"):
        out, fused = attention()
    scores = 2 * 4 * 40 * 40 * dtype.itemsize
    # The mask's storage, padded, is [2, 1, 40, 48]: smaller than scores of four heads.
    assert fused < scores <= attention()[1]
    out.sum().backward()
    assert q.grad.shape == q.shape


def test_operations_are_those_of_torchs_own_counter():
    config = StepConfig(model="tiny", **SMALL)
    step = make_step(config, *build(config, device="cpu"))
    with FlopCounterMode(display=False) as counter:
        step.run()
    assert trace(config, device="cpu", all_layers=True).flops == counter.get_total_flops() > 0


def test_a_shipped_shape_has_its_published_parameters_and_fewer_layers_keep_the_rest():
    for name, count in (("qwen3-4b", 4_022_468_096), ("Qwen/Qwen2.5-Coder-7B-Instruct", 7_615_616_512),
                        ("HuggingFaceTB/SmolLM2-135M", 134_515_008)):  # fmt: skip
        assert (
            sum(p.numel() for p in build_backbone(model_config(name), "bfloat16", "full").model.parameters()) == count
        )
    config = model_config("qwen3-4b")
    short = with_layers(config, 2)
    assert (short.num_hidden_layers, len(short.layer_types), config.num_hidden_layers) == (2, 2, 36)


SAMPLED = dict(model="tiny", prompt_tokens=4, max_new_tokens=9)
FEW_PASSES = [
    dict(batch_size=2, gumbel_topk=8),
    dict(method="gumbel", reward="trunk", gumbel_topk=0, attention="eager", dtype="float32"),
    dict(method="remax", batch_size=2),
    dict(method="ppo", batch_size=2),
    dict(method="ste_legacy", max_new_tokens=3, gumbel_topk=8),
    *(dict(max_new_tokens=tokens, gumbel_topk=8) for tokens in (1, 6, 60)),
]


@pytest.mark.parametrize("case", FEW_PASSES, ids=str)
def test_passes_that_are_left_out_change_neither_peaks_nor_operations(case):
    config = StepConfig(**SAMPLED | case)
    full, few = (trace(config, all_layers=every) for every in (True, False))
    assert replace(few, seconds=0, timeline=[]) == replace(full, seconds=0, timeline=[])
    assert (len(few.timeline) < len(full.timeline)) == (config.max_new_tokens > 5)


OPERATORS = [
    dict(method="gumbel_legacy", reward="trunk"),
    dict(method="ste", dtype="bfloat16"),
    dict(method="gumbel_legacy", reward="trunk", autocast=True, gradient_checkpointing=True),  # on fake tensors
]


@pytest.mark.parametrize("values", OPERATORS, ids=str)
def test_a_trace_is_the_same_with_and_without_cached_operators(values, monkeypatch):
    config = StepConfig(model="tiny", batch_size=2, prompt_tokens=4, max_new_tokens=3, **values)
    found = [trace_layers(config, model_config("tiny"), "cuda") for _ in range(2)]
    monkeypatch.setattr(meta, "call_on_meta", lambda func, args, kwargs: func(*args, **kwargs))
    found.append(trace_layers(config, model_config("tiny"), "cuda"))
    first, *others = ([(r.nbytes, r.shape, r.dtype, r.op, r.birth, r.live, r.death) for r in t.records] for t in found)
    assert all(other == first for other in others)
    assert found[0].flops == found[2].flops


def test_the_lean_step_of_qwen3_4b_needs_a_fifth_of_a_gib_over_its_weights():
    step = StepConfig(model="qwen3-4b", batch_size=2, prompt_tokens=32, max_new_tokens=32, gradient_checkpointing=True)
    found = trace(step)
    weights = found.categories["weights"]
    assert found.peak - weights <= 0.2 * 2**30 and found.phases["rollout"]["weights"] == weights
    # Parameters of 2 bytes in blocks of 512, and the rotary table.
    assert 8_044_936_192 <= weights <= 8_044_936_192 * 1.0001


@pytest.mark.parametrize("foreach", [True, False])
def test_any_training_step_is_traced_as_it_runs(foreach):
    def made(device):
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
            ids, mask = torch.ones(2, 16, dtype=torch.long), torch.ones(2, 16, dtype=torch.long)
            mask[0, 0] = 0  # transformers drops the mask of a batch without padding
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach)

        def step():
            loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
            if loss.isfinite():
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step, model, optimizer

    found, (step, model, optimizer) = trace_callable(*made("meta"), device="cpu"), made("cpu")
    step()
    tracker, size = LiveTracker(), sum(p.numel() * 4 for p in model.parameters())
    tracker.track_existing([*model.parameters(), *model.buffers(), *states_of(optimizer)])
    with tracker:
        step()
    assert found.peak == pytest.approx(tracker.peak, rel=0.01) and found.flops == tracker.flops > 0
    assert [found.categories[name] / size for name in ("weights", "gradients", "optimizer")] == pytest.approx(
        [1, 1, 2], rel=0.02
    )
    assert set(found.phases) == {"forward", "backward", "optimizer"}
    assert found.phases["forward"]["logits"] >= 2 * 16 * TINY["vocab_size"] * 4
