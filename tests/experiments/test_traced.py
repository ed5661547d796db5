"""What experiments on traced steps share: a GRPO update by hand arithmetic, closed forms, and real steps."""

from functools import partial

import pytest
import torch
from conftest import make_backbone, make_prompts

from grade.experiments.formulas import (
    layer_activation_bytes,
    lora_parameters,
    parameter_count,
    rows_bytes,
    token_forwards_uncached,
)
from grade.experiments.traced import (
    GivenStep,
    PolicyStepConfig,
    adapter_on_rows,
    layer_inventory,
    shape_of,
    zero3_share,
)
from grade.memory.compare import measure
from grade.memory.models import model_config, with_layers
from grade.memory.records import CATEGORIES
from grade.memory.shapes import QWEN25_1_5B, SHAPES
from grade.memory.step import build, make_step
from grade.memory.trace import Trace, trace, trace_layers
from grade.models.scoring import completion_logps

TINY = dict(model="tiny", batch_size=2, prompt_tokens=4, max_new_tokens=6, dtype="float32")
CODER = dict(model="qwen2.5-coder-3b", batch_size=2, prompt_tokens=32, max_new_tokens=32)
SHAPE = SHAPES["qwen2.5-3b"]


def test_parameters_of_a_published_model():
    assert parameter_count(QWEN25_1_5B) == 1_543_714_304


def test_the_re_running_loop_reads_every_prefix_again():
    assert token_forwards_uncached(32, 48) == 2664  # sum_{t<48} (32 + t) = 48 * 32 + 48 * 47 / 2
    assert token_forwards_uncached(32, 32) == 1520


STEPS = [
    {},
    {"logits": "all", "self_certainty": True},
    {"logits": "all", "gradient_checkpointing": True},
    {"adapter": "full", "base_copies": 2, "gradient_checkpointing": True, "self_certainty": True},
    {"dtype": "bfloat16", "attention": "eager"},
]


@pytest.mark.parametrize("options", STEPS, ids=str)
def test_a_traced_step_has_the_peak_of_the_real_one(options):
    config = PolicyStepConfig(**TINY | options)
    assert trace(config, device="cpu").peak == pytest.approx(measure(config)["measured_peak_bytes"], rel=0.01)


def test_a_given_step_is_traced_with_what_it_keeps():
    def update(size, backbone, prompts, ids, stored):
        kept = torch.empty(size, device=ids.device)  # noqa: F841 - until the gradient is added
        with adapter_on_rows(backbone, 1):
            (completion_logps(backbone, prompts, ids, torch.ones_like(ids)) - stored).sum().backward()

    peaks = []
    for size in (0, 300_000):
        config = GivenStep(**TINY, update=partial(update, size))
        peaks.append(trace(config, device="cpu").peak)
        assert peaks[-1] == pytest.approx(measure(config)["measured_peak_bytes"], rel=0.01)
    assert peaks[1] - peaks[0] == pytest.approx(1_200_000, rel=0.01)


def test_the_adapter_acts_on_the_rows_that_are_named():
    backbone, prompts = make_backbone(), make_prompts(batch=4)
    every = backbone.hidden(backbone.embed(prompts.ids), prompts.mask)
    with backbone.reference():
        base = backbone.hidden(backbone.embed(prompts.ids), prompts.mask)
    with adapter_on_rows(backbone, 1):
        mixed = backbone.hidden(backbone.embed(prompts.ids), prompts.mask)
    torch.testing.assert_close(mixed, torch.cat([every[:1], base[1:]]))
    assert not torch.allclose(every[1:], base[1:])


def test_dense_and_chunked_logits_give_one_gradient():
    grads = []
    for logits in ("chunked", "all"):
        config = PolicyStepConfig(**TINY, logits=logits)
        torch.manual_seed(0)
        backbone, others = build(config, device="cpu")
        with torch.no_grad():
            for p in backbone.trainable_parameters():
                p.add_(0.05)
        make_step(config, backbone, others).program(lambda: None)
        grads.append(torch.cat([p.grad.flatten() for p in backbone.trainable_parameters()]))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-7)  # float32, sums in another order


def test_what_a_layer_keeps_is_the_closed_form_to_the_byte():
    config = PolicyStepConfig(**CODER, logits="all")
    found = layer_inventory(config).groupby("group").bytes.sum().to_dict()
    assert found == layer_activation_bytes(SHAPE, 2, 64)


def test_closed_forms_against_a_trace():
    config = PolicyStepConfig(**CODER, gradient_checkpointing=True)
    found = trace(config)
    adapter = lora_parameters(SHAPE)
    assert found.categories["adapter"] == 4 * adapter
    assert found.categories["optimizer"] == 2 * 4 * adapter  # step counts are on the CPU
    weights = 2 * parameter_count(SHAPE)
    assert weights <= found.categories["weights"] < weights * 1.0001  # small norms and biases are rounded up
    scores = layer_inventory(config.changed(attention="eager", gradient_checkpointing=False)).query("op == '_softmax'")
    exact = rows_bytes(2 * SHAPE.heads, 63, 63)  # softmax is taken in float32
    assert scores.bytes.item() == -(-exact // 512) * 512


def test_dense_logits_are_the_largest_tensors_and_as_large_as_the_formula_says():
    found = trace(PolicyStepConfig(**CODER, logits="all"))
    logits = [t for t in found.largest if t.category == "logits"]
    assert logits[0].nbytes == rows_bytes(2, 64, SHAPE.vocab) == found.largest[0].nbytes


def test_a_checkpointed_layer_keeps_its_input_alone():
    config, kept = PolicyStepConfig(**CODER, gradient_checkpointing=True), []
    for layers in (2, 3):
        tracker = trace_layers(config, with_layers(model_config(config.model), layers), "cuda")
        last = max(record.birth for record in tracker.records if record.phase == "forward")
        kept.append(sum(r.nbytes for r in tracker.alive_at(last) if tracker.category(r, SHAPE.vocab) == "activations"))
    # 63 inputs: the last token is not fed
    assert kept[1] - kept[0] == rows_bytes(2, 63, SHAPE.hidden, itemsize=2)


def test_checkpointing_recomputes_a_layer_up_to_the_last_tensor_that_backward_needs():
    config = PolicyStepConfig(**CODER)
    plain, again = (trace(config.changed(gradient_checkpointing=on)).flops for on in (False, True))
    tokens = 2 * 63
    # One product each, 2 operations a weight and token; but for the frozen down projection, which comes last: nothing
    # that backward needs follows it, so torch stops before it.
    weights = parameter_count(SHAPE) - SHAPE.vocab * SHAPE.hidden - SHAPE.layers * SHAPE.intermediate * SHAPE.hidden
    assert again - plain == pytest.approx(2 * tokens * weights, rel=0.02)  # and a little for adapter and attention


def test_a_shape_is_read_from_any_configuration():
    assert shape_of("qwen3-4b").__dict__ == SHAPES["qwen3-4b"].__dict__ | {"name": "qwen3-4b"}
    assert parameter_count(shape_of("tiny")) == sum(
        p.numel() for p in build(PolicyStepConfig(model="tiny", adapter="full"))[0].parameters()
    )


def test_a_share_divides_what_can_be_divided_and_gathers_what_runs():
    parts = dict(weights=4000, adapter=100, optimizer=201, activations=50, logits=7)
    phases = {
        "forward": dict.fromkeys(CATEGORIES, 0) | parts,
        "optimizer": dict.fromkeys(CATEGORIES, 0) | {"weights": 8},
    }
    four = zero3_share(Trace(phases, [], [], 2, 2, 0, 0.0), PolicyStepConfig(**TINY), 4)
    layer = 64 * (64 + 32 + 32 + 64) * 4 + 3 * 64 * 96 * 4 + 2 * 64 * 4  # q, k, v, o; MLP; norms; float32
    table = (2 * 512 * 64 + 64) * 4  # embedding, untied head and the final norm
    assert four.categories["weights"] == 1000 + table + 2 * layer
    assert (four.categories["adapter"], four.categories["optimizer"]) == (25, 51)  # rounded up
    assert (four.categories["activations"], four.categories["logits"]) == (50, 7)
    assert four.peak_phase == "forward"
