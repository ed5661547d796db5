"""Policy-gradient steps, closed forms and shards against traces, real runs and hand arithmetic."""

import contextlib

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from grade.errors import InputError
from grade.experiments.caching.measure.inventory import layer_inventory
from grade.experiments.caching.measure.options import OPTIONS, CachingConfig
from grade.memory import formulas
from grade.memory.bench import bench_figures, compare, measure
from grade.memory.kernels import kernels_of
from grade.memory.live import CATEGORIES
from grade.memory.models import model_config, shape_of, with_layers
from grade.memory.plan import changed, plan, shard
from grade.memory.policy_step import PolicyStepConfig
from grade.memory.shapes import SHAPES, parameter_count
from grade.memory.step import StepConfig
from grade.memory.trace import Trace, trace, trace_all, trace_layers

TINY = dict(model="tiny", batch_size=2, prompt_tokens=4, max_new_tokens=6, dtype="float32")
CODER = dict(model="qwen2.5-coder-3b", batch_size=2, prompt_tokens=32, max_new_tokens=32)
SHAPE = SHAPES["Qwen2.5-3B"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logits": "completion", "self_certainty": True},
        {"logits": "all", "gradient_checkpointing": True, "gradient_accumulation_steps": 2},
        {"adapter": "full", "base_copies": 2, "gradient_checkpointing": True, "self_certainty": True},
        {"dtype": "bfloat16", "attention": "eager", "reference": False},
    ],
    ids=str,
)
def test_a_traced_policy_step_has_the_peak_of_the_real_one(options):
    config = PolicyStepConfig(**TINY | options)
    assert trace(config, device="cpu").peak == pytest.approx(measure(config)["measured_peak_bytes"], rel=0.01)


@pytest.mark.parametrize("option", OPTIONS)
def test_a_traced_caching_option_has_the_peak_of_the_real_one(option):
    config = CachingConfig(**TINY, option=option)
    assert trace(config, device="cpu").peak == pytest.approx(measure(config)["measured_peak_bytes"], rel=0.01)


def test_dense_and_chunked_logits_give_one_gradient():
    grads = []
    for logits in ("chunked", "completion", "all"):
        config = PolicyStepConfig(**TINY, logits=logits)
        torch.manual_seed(0)
        backbone, others = config.build(model_config("tiny"), "cpu")
        with torch.no_grad():
            for p in backbone.trainable_parameters():
                p.add_(0.05)
        config.make_step(backbone, others).program(None, lambda: None)
        grads.append(torch.cat([p.grad.flatten() for p in backbone.trainable_parameters()]))
    for other in grads[1:]:
        torch.testing.assert_close(other, grads[0], rtol=1e-4, atol=1e-7)  # float32, sums in another order


def test_what_a_layer_keeps_is_the_closed_form_to_the_byte():
    config = PolicyStepConfig(**CODER, logits="all", reference=False)
    found = layer_inventory(config).groupby("group").bytes.sum().to_dict()
    assert found == formulas.layer_activation_bytes(SHAPE, 2, 64)


def test_closed_forms_against_a_trace():
    config = PolicyStepConfig(**CODER, gradient_checkpointing=True, reference=False)
    found = trace(config)
    adapter = formulas.lora_parameters(SHAPE)
    assert found.categories["adapter"] == 4 * adapter
    assert found.categories["optimizer"] == formulas.adamw_bytes(adapter)  # step counts are on the CPU
    weights = formulas.weights_bytes(SHAPE)
    assert weights <= found.categories["weights"] < weights * 1.0001  # small norms and biases are rounded up
    scores = layer_inventory(changed(config, attention="eager", gradient_checkpointing=False)).query("op == '_softmax'")
    exact = formulas.scores_bytes(SHAPE, 2, 63, itemsize=4)  # softmax is taken in float32
    assert scores.bytes.item() == -(-exact // 512) * 512


def test_dense_logits_are_the_largest_tensors_and_as_large_as_the_formula_says():
    found = trace(PolicyStepConfig(**CODER, logits="completion", reference=False))
    logits = [t for t in found.largest if t.category == "logits"]
    assert logits[0].nbytes == formulas.rows_bytes(2, 32, SHAPE.vocab) == found.largest[0].nbytes


def test_a_checkpointed_layer_keeps_its_input_alone():
    config, kept = PolicyStepConfig(**CODER, gradient_checkpointing=True, reference=False), []
    for layers in (2, 3):
        tracker = trace_layers(config, with_layers(model_config(config.model), layers), "cuda")
        last = max(i for i, phase in enumerate(tracker.phase_of) if phase == "forward")
        kept.append(sum(r.nbytes for r in tracker.alive_at(last) if tracker.category(r, SHAPE.vocab) == "activations"))
    # 63 inputs: the last token is not fed
    assert kept[1] - kept[0] == formulas.checkpoint_bytes(SHAPE, 2, 63) / SHAPE.layers


def test_a_shape_is_read_from_any_configuration():
    assert shape_of("qwen3-4b").__dict__ == SHAPES["Qwen3-4B"].__dict__ | {"name": "qwen3-4b"}
    assert parameter_count(shape_of("tiny")) == sum(
        p.numel() for p in CachingConfig(model="tiny", adapter="full").build(model_config("tiny"))[0].parameters()
    )


def hand_trace(**parts):
    phases = {
        "forward": dict.fromkeys(CATEGORIES, 0) | parts,
        "optimizer": dict.fromkeys(CATEGORIES, 0) | {"weights": 8},
    }
    return Trace(sum(parts.values()), phases["forward"], phases, "forward", [], [], 2, 2, 0, 0.0)


def test_a_shard_divides_what_can_be_divided_and_gathers_what_runs():
    found = hand_trace(weights=4000, adapter=100, optimizer=201, activations=50, logits=7)
    config = PolicyStepConfig(**TINY)
    assert shard(found, config, 1) is found
    four = shard(found, config, 4)
    layer = 64 * (64 + 32 + 32 + 64) * 4 + 3 * 64 * 96 * 4 + 2 * 64 * 4  # q, k, v, o; MLP; norms; float32
    table = (2 * 512 * 64 + 64) * 4  # embedding, untied head and the final norm
    assert four.categories["weights"] == 1000 + table + 2 * layer
    assert (four.categories["adapter"], four.categories["optimizer"]) == (25, 51)  # rounded up
    assert (four.categories["activations"], four.categories["logits"]) == (50, 7)
    assert four.peak == sum(four.categories.values()) and four.peak_phase == "forward"
    with pytest.raises(InputError, match="gpus"):
        shard(found, config, 0)


def test_a_policy_step_can_be_planned():
    config = PolicyStepConfig(**TINY)
    one, two, three = (trace(changed(config, batch_size=n)).peak for n in (1, 2, 3))
    assert one < two < three
    (fit,) = plan(config, two, quantities=("batch_size",))
    assert (fit.value, fit.peak) == (2, two)
    assert plan(config, two)[-1].quantity == "max_new_tokens"  # no hops in a policy gradient


def test_traces_in_two_processes_are_the_same():
    configs = {name: PolicyStepConfig(**TINY, logits=name) for name in ("chunked", "all")}
    one, two = trace_all(configs), trace_all(configs, processes=2)
    assert list(two) == list(configs)
    assert [t.peak for t in one.values()] == [t.peak for t in two.values()]


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_s_attention_keeps_no_scores(masked, dtype):
    q = torch.empty(2, 4, 40, 16, dtype=dtype, device="meta", requires_grad=True)
    mask = torch.empty(2, 1, 40, 40, dtype=torch.bool, device="meta") if masked else None
    sizes = {}
    for name, kernels in (("fused", kernels_of("cuda")), ("unfused", contextlib.nullcontext())):
        saved = sizes.setdefault(name, [])
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t, saved=saved: saved.append(t.untyped_storage().nbytes()) or t, lambda t: t
        )
        with kernels, hooks:
            out = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        assert out.shape == q.shape
    scores = 2 * 4 * 40 * 40 * dtype.itemsize
    # The mask's storage, padded, is [2, 1, 40, 48]: smaller than scores of four heads.
    assert max(sizes["fused"]) < scores <= max(sizes["unfused"])
    with kernels_of("cuda"):
        out = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    out.sum().backward()
    assert q.grad.shape == q.shape
    assert torch.nn.functional.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"


def test_a_comparison_says_how_far_a_prediction_is():
    step = StepConfig(**TINY | dict(max_new_tokens=2), gumbel_topk=8)
    lines = []
    (row,) = compare([step], "cpu", log=lines.append)
    assert row["traced_over_measured"] == row["traced_peak_bytes"] / row["measured_peak_bytes"]
    figures = bench_figures([row, row | {"traced_over_measured": 0.9}], "cpu", time_traces=False)
    assert figures == {"cpu/steps": 2, "cpu/max_rel_error": pytest.approx(0.1)}
    assert len(lines) == 1


def test_operations_are_those_of_torchs_own_counter():
    config = StepConfig(**TINY, gumbel_topk=8)
    step = config.make_step(*config.build(model_config("tiny"), "cpu"))
    with FlopCounterMode(display=False) as counter:
        step.run()
    assert trace(config, device="cpu", all_layers=True).flops == counter.get_total_flops() > 0


def test_checkpointing_recomputes_a_layer_up_to_the_last_tensor_that_backward_needs():
    plain, again = (trace(CachingConfig(**CODER, option=o)).flops for o in ("selected", "hybrid"))
    tokens = 2 * 63
    # One product each, 2 operations a weight and token; but for the frozen down projection, which comes last: nothing
    # that backward needs follows it, so torch stops before it.
    weights = parameter_count(SHAPE) - SHAPE.vocab * SHAPE.hidden - SHAPE.layers * SHAPE.intermediate * SHAPE.hidden
    assert again - plain == pytest.approx(2 * tokens * weights, rel=0.02)  # and a little for adapter and attention
