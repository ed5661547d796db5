"""Traces of TRL's trainers against their own steps, run and tracked on the CPU."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Mapping
from typing import Any

import pandas as pd

from grade.memory.models import model_config, with_layers
from grade.memory.trl import TrlStep, Watch, build_trainer, trace_trl

_GRPO = {"trainer": "grpo", "per_device_train_batch_size": 4, "num_generations": 4}
_LONG = {"max_completion_length": 48, "per_device_train_batch_size": 8}
SETTINGS: dict[str, dict[str, Any]] = {
    "GRPO, LoRA, recomputed": _GRPO | {"max_completion_length": 24, "use_peft": True},
    "GRPO, LoRA, kept, reference is the base": _GRPO
    | {"max_completion_length": 24, "use_peft": True, "gradient_checkpointing": False, "beta": 0.1},
    "GRPO, full, recomputed, reference model, long": _GRPO | _LONG | {"beta": 0.1},
    "GRPO, full, kept, 2 microbatches, float32": _GRPO
    | {"max_completion_length": 24, "gradient_checkpointing": False, "gradient_accumulation_steps": 2, "bf16": False},
    "SFT, LoRA, kept": {"trainer": "sft", "max_length": 128, "use_peft": True, "gradient_checkpointing": False},
    "SFT, full, recomputed, long": {"trainer": "sft", "max_length": 512},
    "SFT, full, kept, bfloat16 base": {
        "trainer": "sft", "max_length": 128, "gradient_checkpointing": False, "dtype": "bfloat16",
    },
    "DPO, LoRA, recomputed": {"trainer": "dpo", "max_length": 128, "use_peft": True},
    "DPO, full, kept, reference model": {"trainer": "dpo", "max_length": 96, "gradient_checkpointing": False},
    "DPO, full, recomputed, reference model, long": {"trainer": "dpo", "max_length": 256},
}  # fmt: skip
"""By name, a trainer and TRL's settings; what is not given is TRL's default."""


def trl_traces(
    settings: Mapping[str, Mapping[str, Any]] = SETTINGS, model: str = "smollm2-135m", layers: int = 6
) -> pd.DataFrame:
    """Peak bytes of each setting, traced, and tracked in the second step of ``trainer.train()`` with random weights.

    Traced as ``grade memory --trl --device cpu`` does: two layers and three, and the rest extrapolated if there are
    five or more.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        with_layers(model_config(model), layers).save_pretrained(folder)
        for name, given in settings.items():
            values = {"model_name_or_path": folder, "per_device_train_batch_size": 2} | given
            step = TrlStep(trainer=values.pop("trainer"), values=values, prompt_tokens=16)
            traced, tracked = trace_trl(step, device="cpu").peak, tracked_peak(step)
            rows.append((name, traced, tracked, traced / tracked - 1))
    return pd.DataFrame(rows, columns=["setting", "traced", "tracked", "rel_error"])


def tracked_peak(step: TrlStep) -> int:
    """Peak bytes of the second step of a run on the CPU, storages rounded up to 512 bytes."""
    watch = Watch(1)
    with tempfile.TemporaryDirectory() as folder:
        build_trainer(step, model_config(step.model), folder, "cpu", watch).train()
    gc.collect()  # a trainer refers to itself
    return watch.tracker.peak
