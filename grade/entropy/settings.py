"""Settings of a probe: `ProbeConfig`. Groups and names follow document 003 where it has one."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from grade.config import SEEDS, Config
from grade.errors import InputError

PolicyGradientUpdate = Literal["dr_grpo", "rloo"]


class BatchConfig(Config):
    """Samples."""

    B: int = Field(8, ge=2, description="prompts of the evaluation batch, and as many of the update batch")
    G: int = Field(8, ge=2, description="completions of a prompt")
    rollout_batch_size: int = Field(64, ge=1, description="completions sampled at once")


class GenerationConfig(Config):
    """Sampling."""

    max_new_tokens: int = Field(24, ge=1, description="completion length T in tokens")
    temperature: float = Field(1.0, gt=0, description="sampling temperature, also of log-probabilities")


class EstimateConfig(Config):
    """What is estimated."""

    mode: Literal["exact", "blocks"] = Field(
        "exact", description="unit of the pair statistic: a prompt, or a block of prompts"
    )
    block_size: int = Field(2, ge=1, description="prompts of a block (mode blocks); divides B")
    one_batch: bool = Field(False, description="evaluate on the update's own prompts: only pairs of prompts count then")
    update: PolicyGradientUpdate = Field(
        "dr_grpo", description="policy gradient of the update, if no other gradient is given"
    )
    multiples: list[PositiveFloat] = Field(
        [], description="check steps of these multiples of the learning rate as well"
    )


class MemoryConfig(Config):
    """Microbatches."""

    teacher_force_microbatch_size: int = Field(2, ge=1, description="completions whose graph exists at once")
    importance_microbatch_size: int = Field(16, ge=1, description="completions scored at once without gradient")
    profile_memory: bool = Field(False, description="report the peak of live bytes of each phase")


class StatsConfig(Config):
    """Standard errors of the pair statistic."""

    compute_plugin_se: bool = Field(True, description="plug-in standard error")
    compute_jackknife_se: bool = Field(True, description="jackknife standard error: better with few prompts")


class ImportanceConfig(Config):
    """The true change."""

    step: Literal["functional", "optimizer"] = Field(
        "functional", description="reach theta + delta theta by replaced parameters, or by a real step that is undone"
    )
    clip: float = Field(0.0, ge=0, description="clip weights at this multiple of their mean; 0 = never")
    ess_threshold: float = Field(0.5, ge=0, le=1, description="effective sample size is low below this share")
    resample_on_low_ess: bool = Field(True, description="if so, sample again after the step; otherwise only warn")


class ProbeConfig(Config):
    """Settings of a probe."""

    batch_config: BatchConfig = Field(BatchConfig(), description="samples")
    generation: GenerationConfig = Field(GenerationConfig(), description="sampling")
    probe_config: EstimateConfig = Field(EstimateConfig(), description="what is estimated")
    stats_config: StatsConfig = Field(StatsConfig(), description="standard errors")
    memory_config: MemoryConfig = Field(MemoryConfig(), description="microbatches")
    importance_sampling: ImportanceConfig = Field(ImportanceConfig(), description="the true change")
    max_grad_norm: float = Field(1.0, ge=0, description="the update's gradient is clipped to this norm; 0 = never")
    seed: int = Field(0, ge=0, lt=SEEDS, description="seed of the samples")

    @model_validator(mode="after")
    def _check(self) -> Self:
        b, size = self.batch_config.B, self.probe_config.block_size
        if self.probe_config.mode == "blocks" and (b % size or b // size < 2):
            allowed = f"a divisor of B = {b} that leaves at least two blocks"
            raise InputError("probe_config.block_size", size, allowed)
        return self
