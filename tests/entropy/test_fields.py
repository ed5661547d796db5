"""Defaults and bounds of a probe's settings."""

import pytest
from field_table import table

from grade.entropy.run import ProbeRunConfig
from grade.entropy.settings import (
    BatchConfig,
    EstimateConfig,
    GenerationConfig,
    ImportanceConfig,
    MemoryConfig,
    ProbeConfig,
    StatsConfig,
)

FIELDS = {
    BatchConfig: {"B": (8, ">= 2"), "G": (8, ">= 2"), "rollout_batch_size": (64, ">= 1")},
    GenerationConfig: {"max_new_tokens": (24, ">= 1"), "temperature": (1.0, "> 0")},
    EstimateConfig: {
        "mode": "exact", "block_size": (2, ">= 1"), "one_batch": False, "update": "dr_grpo", "multiples": [],
    },
    MemoryConfig: {
        "teacher_force_microbatch_size": (2, ">= 1"), "importance_microbatch_size": (16, ">= 1"),
        "profile_memory": False,
    },
    StatsConfig: {"compute_plugin_se": True, "compute_jackknife_se": True},
    ImportanceConfig: {
        "step": "functional", "clip": (0.0, ">= 0"), "ess_threshold": (0.5, ">= 0, <= 1"), "resample_on_low_ess": True,
    },
    ProbeConfig: {"max_grad_norm": (1.0, ">= 0"), "seed": (0, ">= 0, < 4.29497e+09")},
    ProbeRunConfig: {
        "backbone": "models/backbone", "dtype": "float32", "device": "cpu", "task": "reviews",
        "reward": "models/reward/backbone/bag", "reward_scope": "prompt_and_completion", "reviews": "data/reviews",
        "max_prompt_tokens": (12, ">= 1"), "learning_rate": (2e-3, "> 0"), "weight_decay": (0.0, ">= 0"), "follow": [],
    },
}  # fmt: skip


@pytest.mark.parametrize("settings", FIELDS, ids=lambda settings: settings.__name__)
def test_defaults_and_bounds(settings):
    found = table(settings)
    assert {name: found[name] for name in FIELDS[settings]} == FIELDS[settings]
