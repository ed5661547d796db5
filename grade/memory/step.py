"""One optimizer step to trace or to measure: its settings, and the trainers' own code on a backbone without a task.

All code that allocates is the trainers': `grade.gradients`, the reward models, AdamW. Prompts and the reward head are
random, as memory does not depend on values. Policy-gradient steps are in `grade.memory.policy_step`.
"""

from __future__ import annotations

import contextlib
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from transformers import PretrainedConfig

from grade.config import Config
from grade.errors import InputError
from grade.gradients.estimators import RelaxationConfig, Support
from grade.gradients.methods import RELAXED, EngineName, RelaxedName
from grade.gradients.objective import Engine, Objective
from grade.gradients.unrolled import UNROLLED, stepwise
from grade.memory.live import Category, LiveTracker
from grade.memory.models import Adapter, build_backbone
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch
from grade.models.sampling import check_length
from grade.rewards.model import HeadSettings, RewardKind, RewardModel

Microbatch = Callable[[LiveTracker | None], None]
"""Adds one microbatch's gradient; a tracker, if there is one, is told which phase runs."""


@dataclass
class Step:
    """An optimizer step that can be run again and again.

    Attributes:
        backbone: Policy and reference.
        optimizer: AdamW with its state, as in every step of a run but the first.
        microbatch: Run ``microbatches`` times.
        microbatches: Gradient accumulation steps.
        others: Further modules that stay in memory: a reward model.
        copies: Further copies of the base, which only take up memory.
    """

    backbone: Backbone
    optimizer: torch.optim.AdamW
    microbatch: Microbatch
    microbatches: int
    others: list[nn.Module]
    copies: list[Tensor]

    def run(self, tracker: LiveTracker | None = None) -> None:
        """Gradients of every microbatch, clipping and the optimizer's step, as `grade.training.loop` does them.

        Args:
            tracker: Is told which phase runs and what tensors are for.
        """
        parameters = self.backbone.trainable_parameters()
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(self.microbatches):
            self.microbatch(tracker)
        with phase(tracker, "optimizer"):
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            self.optimizer.step()
        if tracker:
            tracker.tag((p.grad for p in parameters), "gradients")
        self.optimizer.zero_grad(set_to_none=True)

    def existing(self) -> dict[Category, list[Tensor]]:
        """Tensors that exist before the step, by category."""
        parameters = self.backbone.trainable_parameters()
        lora = parameters if self.backbone.peft is not None else []
        adapter = {id(p) for p in lora}
        tensors = [t for m in (self.backbone, *self.others) for t in (*m.parameters(), *m.buffers())]
        weights = [t for t in tensors if id(t) not in adapter]
        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        return {"weights": [*weights, *self.copies], "adapter": lora, "optimizer": states}


class TracedConfig(Config):
    """Settings that the memory of any training step depends on, named as in `TrainConfig`."""

    model: str = Field("qwen3-4b", description="shipped shape, Hugging Face id, or folder with config.json")
    batch_size: int = Field(1, ge=1, description="sequences in a microbatch, B")
    gradient_accumulation_steps: int = Field(1, ge=1, description="microbatches in an optimizer step")
    prompt_tokens: int = Field(32, ge=1, description="prompt length P in tokens")
    max_new_tokens: int = Field(64, ge=1, description="completion length T in tokens")
    gradient_checkpointing: bool = Field(False, description="recompute layers in backward")
    autocast: bool = Field(False, description="run under bfloat16 autocast")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="type of the base")
    adapter: Adapter = Field("lora", description="lora, or full: every weight of the layers is trained")
    lora: LoraSettings = Field(LoraSettings(), description="the adapter")
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="attention implementation")
    base_copies: int = Field(1, ge=1, description="copies of the base (3: policy, reference and reward of their own)")

    def build(self, model: PretrainedConfig, device: str = "meta") -> tuple[Backbone, list[nn.Module]]:
        """Backbone and further modules of the step, with random weights.

        Args:
            model: From `grade.memory.models.model_config`.
            device: Where to put them; meta has no data.

        Returns:
            Both, frozen except for what is trained.

        Raises:
            InputError: If the model is not supported or a size does not fit it.
        """
        backbone = build_backbone(model, self.dtype, self.adapter, self.lora, self.attention, device)
        check_length(backbone, self.prompt_tokens + self.max_new_tokens)
        return backbone, []

    @abstractmethod
    def microbatch(self, backbone: Backbone, others: list[nn.Module]) -> Microbatch:
        """The code that adds one microbatch's gradient."""

    def make_step(self, backbone: Backbone, others: list[nn.Module]) -> Step:
        """The step on real tensors or on tensors without data.

        Args:
            backbone: From `build`.
            others: From `build`.

        Returns:
            The step, its optimizer state filled.
        """
        parameters = backbone.trainable_parameters()
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0)
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        trained = {id(p) for p in parameters}
        base = [p for p in backbone.parameters() if self.adapter == "full" or id(p) not in trained]
        copies = [torch.empty_like(p, requires_grad=False) for _ in range(self.base_copies - 1) for p in base]
        run = self.microbatch(backbone, others)
        return Step(backbone, optimizer, run, self.gradient_accumulation_steps, others, copies)

    def prompts(self, backbone: Backbone) -> PromptBatch:
        """Random prompts, one of them padded: transformers drops the mask of a batch without padding."""
        shape = (self.batch_size, self.prompt_tokens)
        ids = torch.randint(backbone.vocab_size, shape, generator=generator_on(backbone), device=backbone.device)
        mask = torch.ones_like(ids)
        if self.prompt_tokens > 1:
            mask[0, 0] = 0
        return PromptBatch(ids, mask)

    @contextlib.contextmanager
    def casting(self, backbone: Backbone) -> Iterator[None]:
        """Autocast, if it is on."""
        with torch.autocast(backbone.device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext():
            yield


class StepConfig(TracedConfig):
    """A step of a relaxed method, with any engine."""

    method: RelaxedName = Field("ste", description="training method")
    engine: Literal["auto", "replay", "checkpointed", "unrolled"] = Field("auto", description="auto: the method's own")
    hops: int = Field(2, ge=0, description="feedback hops of the replay engine")
    support: Support = Field("perturbed_top_k", description="top_k or perturbed_top_k")
    gumbel_topk: int = Field(256, ge=0, description="size K of a token's support; 0 = the full vocabulary")
    explicit_freeing: bool = Field(False, description="drop each step's dense tensors at once (unrolled)")
    kl_coef: float = Field(0.1, ge=0, description="weight beta of KL")
    reward: RewardKind = Field("bag", description="bag: reward on the embedding table; trunk: on the transformer")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.gradient_checkpointing and self.engine_name == "checkpointed":
            raise InputError("gradient_checkpointing", True, "false for the engine checkpointed: it keeps a cache")
        if self.explicit_freeing and self.engine_name != "unrolled":
            allowed = f"false for the engine {self.engine_name}: it keeps nothing that it does not need"
            raise InputError("explicit_freeing", True, allowed)
        return self

    @property
    def engine_name(self) -> EngineName:
        """The engine that runs."""
        return RELAXED[self.method].engine if self.engine == "auto" else self.engine

    def make_engine(self) -> Engine:
        """The engine with its settings."""
        if self.explicit_freeing:
            return partial(stepwise, options=replace(UNROLLED, drop_lists=True))
        layers = self.gradient_checkpointing and self.engine_name == "replay"  # unrolled: see `microbatch`
        from grade.gradients.engines import make_engine  # here: settings are read without an engine

        return make_engine(self.engine_name, self.hops, gradient_checkpointing=layers)

    @property
    def headline(self) -> str:
        """The configuration in one line."""
        engine = self.engine_name + (f", {self.hops} hops" if self.engine_name == "replay" else "")
        parts = [
            f"{self.model}, {self.method} ({engine}): B={self.batch_size} P={self.prompt_tokens} "
            f"T={self.max_new_tokens}, {self.dtype}, {self.adapter}, {self.attention}"
        ]
        if self.gradient_accumulation_steps > 1:
            parts.append(f"{self.gradient_accumulation_steps} microbatches")
        if self.gradient_checkpointing:
            parts.append("layers checkpointed")
        for name in ("explicit_freeing", "autocast"):
            if getattr(self, name):
                parts.append(name.replace("_", " "))
        if self.base_copies > 1:
            parts.append(f"{self.base_copies} copies of the base")
        return ", ".join(parts)

    def relaxation(self) -> RelaxationConfig:
        """The relaxation."""
        return RelaxationConfig(
            estimator=RELAXED[self.method].estimator, support=self.support, gumbel_topk=self.gumbel_topk, tau=1.0,
            max_new_tokens=self.max_new_tokens,
        )  # fmt: skip

    def build(self, model: PretrainedConfig, device: str = "meta") -> tuple[Backbone, list[nn.Module]]:  # noqa: D102
        backbone, _ = super().build(model, device)
        self.relaxation().check(backbone.vocab_size)
        settings = HeadSettings(hidden=64 if self.reward == "trunk" else 0)
        return backbone, [RewardModel(self.reward, backbone, settings).requires_grad_(False)]

    def microbatch(self, backbone: Backbone, others: list[nn.Module]) -> Microbatch:  # noqa: D102
        engine, relaxation, scale = self.make_engine(), self.relaxation(), 1 / self.gradient_accumulation_steps
        reward_model, prompts = others[0], self.prompts(backbone)
        layers = self.gradient_checkpointing and self.engine_name == "unrolled"  # replay has a switch of its own

        def reward(embeds: Tensor, mask: Tensor) -> Tensor:
            with backbone.phase("reward"), _plain_layers(backbone):
                return reward_model(embeds, mask)

        objective = Objective(reward, self.kl_coef)

        def run(tracker: LiveTracker | None) -> None:
            with backbone.watched_by(tracker), self.casting(backbone), backbone.checkpointed_layers(layers):
                engine(backbone, prompts, objective, relaxation, generator_on(backbone), scale)

        return run


def generator_on(backbone: Backbone) -> torch.Generator:
    """A generator on a backbone's device; for meta, which has none, on the CPU."""
    device = backbone.device
    return torch.Generator("cpu" if device.type == "meta" else device).manual_seed(0)


def phase(tracker: LiveTracker | None, name: str) -> contextlib.AbstractContextManager[None]:
    """A context that names a phase to the tracker, if there is one."""
    return tracker.during(name) if tracker else contextlib.nullcontext()


@contextlib.contextmanager
def _plain_layers(backbone: Backbone) -> Iterator[None]:
    """Layers without checkpointing: a reward's pass has the adapter off but would be recomputed with it on."""
    layers = [m for m in backbone.model.modules() if getattr(m, "gradient_checkpointing", False)]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True
