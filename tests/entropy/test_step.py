"""The probe's gradient path in three ways: one gradient, and a peak that only streaming keeps small."""

import pytest
import torch
from conftest import make_backbone, make_prompts, tiny_gpt2

from grade.entropy.samples import draw, entropy_coefficients, prompt_gradients, sequence_logps
from grade.entropy.step import ProbeStepConfig, held_gradient
from grade.memory.compare import measure
from grade.memory.trace import trace

TINY = dict(model="tiny", prompt_tokens=4, max_new_tokens=6, dtype="float32", microbatch_size=1)


def step_bytes(batch, group, way):
    return trace(ProbeStepConfig(**TINY, batch_size=batch, num_generations=group, way=way)).step_bytes


def test_three_ways_give_one_gradient():
    backbone = make_backbone(tiny_gpt2(), target_modules=["c_attn"])  # norms exact in float64
    samples = draw(backbone, make_prompts(), 3, 4, torch.Generator().manual_seed(0))
    streamed = prompt_gradients(backbone, samples, entropy_coefficients(sequence_logps(backbone, samples)))
    for chunk in (None, 1, 2):
        torch.testing.assert_close(held_gradient(backbone, samples, chunk), streamed.mean(0))


def test_only_streaming_makes_the_peak_independent_of_the_number_of_completions():
    small, large = (step_bytes(n, n, "streamed") for n in (2, 4))
    assert large <= 1.05 * small
    # 16 completions' graphs at once against one's; what does not grow with them is a few in a hundred of the whole.
    assert step_bytes(4, 4, "chunked") > 0.98 * step_bytes(4, 4, "whole") > 4 * large


def test_the_traced_peak_is_the_real_one():
    for way in ("whole", "streamed"):
        config = ProbeStepConfig(**TINY, batch_size=2, num_generations=3, way=way)
        # 2 %: samples move from the CPU to the device, which on a CPU copies nothing.
        assert trace(config, device="cpu").peak == pytest.approx(measure(config)["measured_peak_bytes"], rel=0.02)
