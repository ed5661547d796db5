"""Traces of TRL's trainers against their own steps, which run on a CPU or on CUDA."""

import gc
import tempfile
from collections.abc import Mapping
from typing import Any

import pandas as pd
import torch

from grade.memory.models import model_config, with_layers
from grade.memory.settings import Device
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
    settings: Mapping[str, Mapping[str, Any]] = SETTINGS, model: str = "smollm2-135m", layers: int | None = 6,
    device: Device = "cpu",
) -> pd.DataFrame:  # fmt: skip
    """Peak bytes of each setting, traced, and of the second step of ``trainer.train()`` with random weights.

    Traced as ``grade memory --trl`` does: two layers and three, and the rest extrapolated if there are five or more.
    On a CPU the step is tracked, storages rounded up to 512 bytes; on CUDA it is the allocator that counts.
    """
    rows, shape = [], model_config(model)
    with tempfile.TemporaryDirectory() as folder:
        (shape if layers is None else with_layers(shape, layers)).save_pretrained(folder)
        for name, given in settings.items():
            values = {"model_name_or_path": folder, "per_device_train_batch_size": 2} | given
            step = TrlStep(trainer=values.pop("trainer"), values=values, prompt_tokens=16)
            traced, tracked = trace_trl(step, device=device).peak, _second_step(step, device)
            rows.append((name, traced, tracked, traced / tracked - 1))
    return pd.DataFrame(rows, columns=["setting", "traced", "tracked", "rel_error"])


class _Allocated(Watch):
    """What CUDA's allocator holds at most in the step."""

    peak = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count from here on."""
        gc.collect()
        torch.cuda.reset_peak_memory_stats()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Nothing: there are no phases."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The last step's counts."""
        self.peak = torch.cuda.max_memory_allocated()


def _second_step(step: TrlStep, device: Device) -> int:
    watch = _Allocated(1) if device == "cuda" else Watch(1)
    with tempfile.TemporaryDirectory() as folder:
        build_trainer(step, model_config(step.model), folder, device, watch).train()
    peak = watch.peak if isinstance(watch, _Allocated) else watch.tracker.peak
    watch.modules.clear()
    gc.collect()  # a trainer refers to itself
    return peak
