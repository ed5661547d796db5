"""Settings of a training run: `TrainConfig`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from grade.errors import InputError
from grade.gradients.estimators import RelaxationConfig, Support
from grade.gradients.methods import GROUPED, OPTIONS, RELAXED, PolicyGradientConfig
from grade.gradients.objective import RewardScope
from grade.models.adapter import LoraSettings

Tracker = Literal["tensorboard", "wandb", "dvclive"]


class TrainConfig(PolicyGradientConfig):
    """Settings of one training run. Names follow the source documents where those have one."""

    seed: int = Field(0, ge=0, description="seed of adapter, prompt order and noise")

    backbone: str = Field("models/backbone", description="folder or Hugging Face id of the base model")
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = Field("float32", description="type of the base")
    attention: Literal["auto", "sdpa", "eager"] = Field(
        "auto", description="attention implementation; auto: the model's default"
    )
    device: Literal["auto", "cpu", "cuda"] = Field("cpu", description="where to run; auto takes a GPU if there is one")
    lora: LoraSettings = Field(LoraSettings(), description="the adapter")
    reward: str = Field("models/reward/backbone/bag", description="folder of a trained reward model")
    gold: str = Field("models/gold/judge.npz", description="the gold judge; empty for none")
    reviews: str = Field("data/reviews", description="folder of the review splits")
    reward_scope: RewardScope = Field("prompt_and_completion", description="what the reward scores")

    max_prompt_tokens: int = Field(12, ge=1, description="prompts are cut to this many tokens, P")
    gumbel_topk: int = Field(64, ge=0, description="size K of a token's support; 0 = the full vocabulary")
    support: Support = Field("perturbed_top_k", description="top_k, or perturbed_top_k: exact samples for any K")
    rao_draws: int = Field(8, ge=1, description="gumbel_rao: draws M of the noise given the token")
    tau_start: float = Field(2.0, gt=0, description="Gumbel temperature at the first step")
    tau_end: float = Field(2.0, gt=0, description="Gumbel temperature after annealing")
    tau_anneal_steps: int = Field(0, ge=0, description="steps of the linear ramp from tau_start to tau_end")

    kl_coef: float = Field(0.25, ge=0, description="weight beta of KL, in reward per nat and token")
    hops: int = Field(1, ge=0, description="feedback hops of the replay engine; max_new_tokens - 1 is exact")
    hop_tolerance: float = Field(0.0, ge=0, description="stop hopping at this relative residual; 0 = take all hops")
    learning_rate: float = Field(2e-3, gt=0, description="AdamW learning rate")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    warmup_steps: int = Field(0, ge=0, description="linear warm-up of the learning rate")
    max_grad_norm: float = Field(1.0, gt=0, description="the gradient is clipped to this norm")
    max_steps: int = Field(20, ge=1, description="optimizer steps")
    gradient_accumulation_steps: int = Field(1, ge=1, description="microbatches in an optimizer step")

    eval_every: int = Field(5, ge=0, description="steps between evaluations; 0 = only before and after training")
    eval_prompts: int = Field(64, ge=2, description="held-out prompts of an evaluation during training")
    final_eval_prompts: int = Field(256, ge=2, description="held-out prompts before and after training")
    kl_eval_prompts: int = Field(64, ge=2, description="how many of those prompts KL is computed on")
    eval_batch_size: int = Field(64, ge=1, description="prompts sampled at once in an evaluation")
    checkpoint_every: int = Field(0, ge=0, description="steps between checkpoints of adapter and optimizer; 0 = none")
    samples: int = Field(8, ge=0, description="completions before and after training that are kept as text")
    trackers: list[Tracker] = Field([], description="experiment trackers to log to, besides the files")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_new_tokens > self.max_new_tokens:
            allowed = f"at most max_new_tokens = {self.max_new_tokens}"
            raise InputError("min_new_tokens", self.min_new_tokens, allowed)
        if self.max_steps <= self.warmup_steps:
            raise InputError("warmup_steps", self.warmup_steps, f"less than max_steps = {self.max_steps}")
        for option, methods in OPTIONS.items():
            value = getattr(self, option)
            if self.method not in methods and value != type(self).model_fields[option].default:
                raise InputError(option, value, f"only with {', '.join(methods)}, not with {self.method}")
        if self.method in GROUPED and self.group == 1:
            raise InputError("num_generations", 1, f"at least 2 for {self.method}: the baseline comes from the group")
        for name, value in (("num_generations", self.group), ("minibatches", self.minibatches)):
            if self.batch_size % value:
                raise InputError(name, value, f"a divisor of batch_size = {self.batch_size}")
        return self

    @staticmethod
    def values_for(method: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values that apply to a method, with ``method`` set: one file can serve several methods."""
        return {k: v for k, v in values.items() if method in OPTIONS.get(k, (method,))} | {"method": method}

    @property
    def relaxed(self) -> bool:
        """Whether the method differentiates through relaxed tokens; otherwise it is a policy gradient."""
        return self.method in RELAXED

    def relaxation(self, tau: float) -> RelaxationConfig:
        """The relaxation at a Gumbel temperature."""
        return RelaxationConfig(
            estimator=RELAXED[self.method].estimator, support=self.support, gumbel_topk=self.gumbel_topk, tau=tau,
            rao_draws=self.rao_draws, max_new_tokens=self.max_new_tokens, min_new_tokens=self.min_new_tokens,
        )  # fmt: skip
