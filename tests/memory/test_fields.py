"""Defaults and bounds of a traced step's settings: what `grade memory` computes when it is told no more."""

import pytest
import torch
from field_table import table

from grade.errors import InputError
from grade.gradients.unrolled import UNROLLED
from grade.memory.models import model_config
from grade.memory.step import _MOMENTS, StepConfig, _total, generator_on

FIELDS = {
    "model": "qwen3-4b", "batch_size": (1, ">= 1"), "gradient_accumulation_steps": (1, ">= 1"),
    "prompt_tokens": (32, ">= 1"), "max_new_tokens": (64, ">= 1"), "gradient_checkpointing": False, "autocast": False,
    "dtype": "bfloat16", "adapter": "lora", "attention": "sdpa", "base_copies": (1, ">= 1"), "method": "ste",
    "engine": "auto", "hops": (2, ">= 0"), "support": "perturbed_top_k", "gumbel_topk": (256, ">= 0"),
    "explicit_freeing": False, "num_generations": (None, ">= 1"), "kl_estimator": "exact",
    "num_iterations": (None, ">= 1"), "minibatches": (1, ">= 1"), "self_certainty_reward": False,
    "distil_window": (2048, ">= 1"), "kl_coef": (0.1, ">= 0"), "reward": "bag",
}  # fmt: skip


def test_defaults_and_bounds():
    found = table(StepConfig)
    assert {name: found[name] for name in FIELDS} == FIELDS


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"distil_window": 5}, "distil_window: got 5; allowed: only with distilled, not with ste"),
        ({"minibatches": 2}, "minibatches"),
        ({"num_iterations": 1}, "num_iterations"),
        ({"self_certainty_reward": True}, "self_certainty_reward"),
        ({"method": "grpo", "hops": 1}, "hops"),
        ({"method": "grpo", "explicit_freeing": True}, "explicit_freeing: .* method grpo"),
        ({"explicit_freeing": True}, "explicit_freeing: .* engine replay"),
        ({"method": "grpo", "minibatches": 2, "batch_size": 4}, "batch_size: .* a multiple of 8 .*, 2 minibatches"),
        ({"method": "grpo", "batch_size": 4}, r"batch_size: .* a multiple of 8 \(8 completions of a prompt\)"),
    ],
)
def test_what_a_method_does_not_have_is_refused(values, field):
    with pytest.raises(InputError, match=field):
        StepConfig.parse({"model": "tiny"} | values)


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({}, "tiny, ste (replay, 2 hops): B=1 P=32 T=64, bfloat16, lora, sdpa"),
        (
            {"gradient_accumulation_steps": 2, "autocast": True, "base_copies": 3, "gradient_checkpointing": True},
            "tiny, ste (replay, 2 hops): B=1 P=32 T=64, bfloat16, lora, sdpa, 2 microbatches, layers checkpointed, "
            "autocast, 3 copies of the base",
        ),
        (
            {"engine": "unrolled", "explicit_freeing": True},
            "tiny, ste (unrolled): B=1 P=32 T=64, bfloat16, lora, sdpa, explicit freeing",
        ),
        ({"method": "rloo"}, "tiny, rloo (G=8, 1 update): B=8 P=32 T=64, bfloat16, lora, sdpa"),
        ({"method": "ppo"}, "tiny, ppo (G=1, 4 updates): B=1 P=32 T=64, bfloat16, lora, sdpa"),
    ],
)
def test_the_headline_says_what_is_not_the_default(values, line):
    assert StepConfig.parse({"model": "tiny"} | values).headline == line


def test_a_step_passes_its_settings_on():
    plain, recomputed = (
        StepConfig.parse({"model": "tiny", "method": "rloo", "gradient_checkpointing": value})
        for value in (False, True)
    )
    assert plain._settings.gradient_checkpointing is False and recomputed._settings.gradient_checkpointing is True
    # A relaxed method's layers are the engine's to recompute.
    relaxed = StepConfig.parse({"model": "tiny", "gradient_checkpointing": True})
    assert relaxed._settings.gradient_checkpointing is False
    assert relaxed.make_engine().keywords["gradient_checkpointing"] is True
    freeing = StepConfig.parse({"model": "tiny", "engine": "unrolled", "explicit_freeing": True})
    assert freeing.make_engine().keywords["options"].drop_lists is True
    assert UNROLLED.drop_lists is False


def test_sums_over_one_process_are_the_values_or_stand_ins_without_data():
    values, scalar = torch.tensor([1.0, 2.0]), torch.empty((), device="meta")
    assert _total(values) is values and _total(scalar) is scalar
    assert _total(torch.empty(3, device="meta")) is _MOMENTS


def test_prompts_and_noise_of_a_step_are_seeded():
    backbone = StepConfig.parse({"model": "tiny", "dtype": "float32"}).build(model_config("tiny"), "cpu")[0]
    assert generator_on(backbone).initial_seed() == 0
