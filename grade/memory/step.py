"""One optimizer step to trace or to measure: its settings, and the trainers' own code on a backbone without a task.

All code that allocates is the trainers': `grade.gradients`, the reward models, AdamW. Prompts and weights are random,
as memory does not depend on values. `StepConfig` is a step of any training method; other subclasses of `TracedConfig`
are steps that experiments compare with it.
"""

from __future__ import annotations

import contextlib
import math
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
from grade.gradients.methods import (
    AUTO,
    DISTILLED,
    METHODS,
    OPTIONS,
    POLICY_GRADIENTS,
    RELAXED,
    EngineName,
    MethodConfig,
    MethodName,
)
from grade.gradients.objective import Engine, Objective
from grade.gradients.policy_gradient import PolicyGradient, StepContext
from grade.gradients.replay import make_engine
from grade.gradients.unrolled import UNROLLED, stepwise
from grade.memory.live import Category, LiveTracker
from grade.memory.models import build_backbone
from grade.memory.nodata import has_data
from grade.memory.reward import PREFIX, RewardSpec, make_reward, reward_context
from grade.memory.sharded import sum_gradients
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch
from grade.models.sampling import check_length
from grade.models.sharding import local_part

Microbatch = Callable[[LiveTracker | None], None]
"""Adds one microbatch's gradient; a tracker, if there is one, is told which phase runs."""

Program = Callable[[LiveTracker | None, Callable[[], None]], None]
"""A whole step: adds gradients and calls the function it is given wherever an update of the parameters is due."""

_MOMENTS = torch.tensor([2.0, 0.0, 2.0], dtype=torch.float64)
"""Count, sum and sum of squares of two values that can be whitened."""


@dataclass
class Step:
    """An optimizer step that can be run again and again.

    Attributes:
        backbone: Policy and reference.
        optimizer: AdamW with its state, as in every step of a run but the first.
        program: The step's code.
        others: Further modules that stay in memory: a reward model, a value head.
        copies: Further copies of the base, which only take up memory.
    """

    backbone: Backbone
    optimizer: torch.optim.AdamW
    program: Program
    others: list[nn.Module]
    copies: list[Tensor]

    def run(self, tracker: LiveTracker | None = None) -> None:
        """Gradients, clipping and the optimizer's updates, as in training.

        Args:
            tracker: Is told which phase runs and what tensors are for.
        """

        def apply() -> None:
            with phase(tracker, "optimizer"):
                sum_gradients(self.optimizer)
                for group in self.optimizer.param_groups:
                    torch.nn.utils.clip_grad_norm_(group["params"], 1.0)
                self.optimizer.step()
            if tracker:
                tracker.tag((p.grad for group in self.optimizer.param_groups for p in group["params"]), "gradients")

        self.optimizer.zero_grad(set_to_none=True)
        self.program(tracker, apply)
        self.optimizer.zero_grad(set_to_none=True)

    def existing(self) -> dict[Category, list[Tensor]]:
        """Tensors that exist before the step, by category."""
        parameters = self.backbone.trainable_parameters()
        lora = parameters if self.backbone.peft is not None else []
        adapter = {id(p) for p in lora}
        tensors = [t for m in (self.backbone, *self.others) for t in (*m.parameters(), *m.buffers())]
        weights = [local_part(t) for t in tensors if id(t) not in adapter]
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
    adapter: Literal["lora", "full"] = Field("lora", description="lora, or full: every weight of the layers is trained")
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

    @property
    def batch_unit(self) -> int:
        """What ``batch_size`` is a multiple of."""
        return 1

    def longest(self, model: PretrainedConfig) -> int | None:
        """Prompt and completion, in tokens, that the models of the step can read; None if there is no limit."""
        return getattr(model, "max_position_embeddings", None)

    @abstractmethod
    def microbatch(self, backbone: Backbone, others: list[nn.Module]) -> Microbatch:
        """The code that adds one microbatch's gradient."""

    def program(self, backbone: Backbone, others: list[nn.Module]) -> tuple[Program, list[nn.Module]]:
        """The step's code, and modules beside the backbone that are trained."""
        microbatch = self.microbatch(backbone, others)

        def run(tracker: LiveTracker | None, apply: Callable[[], None]) -> None:
            for _ in range(self.gradient_accumulation_steps):
                microbatch(tracker)
            apply()

        return run, []

    def make_step(self, backbone: Backbone, others: list[nn.Module]) -> Step:
        """The step on real tensors or on tensors without data.

        Args:
            backbone: From `build`.
            others: From `build`.

        Returns:
            The step, its optimizer state filled.
        """
        program, trained_too = self.program(backbone, others)
        groups = [backbone.trainable_parameters(), *(list(module.parameters()) for module in trained_too)]
        optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-4, weight_decay=0.0)
        for parameter in (p for group in groups for p in group):
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        trained = {id(p) for p in groups[0]}
        base = [p for p in backbone.parameters() if self.adapter == "full" or id(p) not in trained]
        copies = [torch.empty_like(p, requires_grad=False) for _ in range(self.base_copies - 1) for p in base]
        return Step(backbone, optimizer, program, [*others, *trained_too], copies)

    def prompts(self, backbone: Backbone, count: int | None = None) -> PromptBatch:
        """Random prompts, one of them padded: transformers drops the mask of a batch without padding.

        Args:
            backbone: Its vocabulary and device.
            count: How many; ``batch_size`` by default.

        Returns:
            Prompts of P tokens.
        """
        shape = (count or self.batch_size, self.prompt_tokens)
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
    """A step of any training method: relaxed ones with any engine, and policy gradients."""

    method: MethodName = Field("ste", description=f"training method: {', '.join(METHODS)}")
    engine: Literal["auto", "replay", "checkpointed", "unrolled"] = Field("auto", description="auto: the method's own")
    hops: int = Field(2, ge=0, description="feedback hops of the replay engine")
    support: Support = Field("perturbed_top_k", description="top_k or perturbed_top_k")
    gumbel_topk: int = Field(256, ge=0, description="size K of a token's support; 0 = the full vocabulary")
    explicit_freeing: bool = Field(False, description="drop each step's dense tensors at once (unrolled)")
    num_generations: int | None = Field(
        None, ge=1, description="policy gradients: completions of a prompt, G; a batch that is not given is one group"
    )
    kl_estimator: Literal["exact", "k3"] = Field("exact", description="policy gradients: KL of the vocabulary, or k3")
    num_iterations: int | None = Field(None, ge=1, description="grpo, ppo: passes over a step's completions")
    minibatches: int = Field(1, ge=1, description="grpo, ppo: updates in a pass, each on a share of every microbatch")
    self_certainty_reward: bool = Field(False, description="grpo: the policy's self-certainty is the reward")
    distil_window: int = Field(2048, ge=1, description="distilled: completions that are kept for the fit")
    kl_coef: float = Field(0.1, ge=0, description="weight beta of KL")
    reward: RewardSpec = Field("bag", description="bag: on the embedding table; trunk: on the transformer; "
                               "hf:<id or folder>: a sequence classifier")  # fmt: skip

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.method == AUTO:
            raise InputError("method", AUTO, f"the method itself, as auto depends on the reward: {', '.join(METHODS)}")
        for option, methods in OPTIONS.items():
            field = type(self).model_fields.get(option)
            if option == "gradient_checkpointing" or field is None or self.method in methods:
                continue
            if getattr(self, option) != field.default:
                allowed = f"only with {', '.join(methods)}, not with {self.method}"
                raise InputError(option, getattr(self, option), allowed)
        if self.policy_gradient and self.engine != "auto":
            raise InputError("engine", self.engine, f"auto for {self.method}: a policy gradient has no engine")
        if self.gradient_checkpointing and self.engine_name == "checkpointed":
            raise InputError("gradient_checkpointing", True, "false for the engine checkpointed: it keeps a cache")
        if self.explicit_freeing and self.engine_name != "unrolled":
            name = f"engine {self.engine_name}" if self.engine_name else f"method {self.method}"
            raise InputError("explicit_freeing", True, f"false for the {name}: it keeps nothing that it does not need")
        if "batch_size" not in self.model_fields_set:
            self.__dict__["batch_size"] = self.batch_unit  # validated: a frozen config has no other way
        if self.batch_size % self.batch_unit:
            allowed = f"a multiple of {self.batch_unit} ({self._settings.group} completions of a prompt"
            allowed += f", {self.minibatches} minibatches)" if self.minibatches > 1 else ")"
            raise InputError("batch_size", self.batch_size, allowed)
        return self

    @property
    def policy_gradient(self) -> bool:
        """Whether the method takes any reward; otherwise it is relaxed and has an engine."""
        return self.method in (*POLICY_GRADIENTS, DISTILLED)

    @property
    def batch_unit(self) -> int:
        """What ``batch_size`` is a multiple of: whole groups, and an equal share for every minibatch."""
        return math.lcm(self._settings.group, self.minibatches)

    @property
    def engine_name(self) -> EngineName | None:
        """The engine that runs; None for a policy gradient."""
        if self.policy_gradient:
            return None
        return RELAXED[self.method].engine if self.engine == "auto" else self.engine

    @property
    def _settings(self) -> MethodConfig:
        """The trainers' settings of a policy gradient; a relaxed method has none of them here."""
        return MethodConfig(
            method=self.method, max_completion_length=self.max_new_tokens, num_generations=self.num_generations,
            kl_estimator=self.kl_estimator, num_iterations=self.num_iterations, minibatches=self.minibatches,
            self_certainty_reward=self.self_certainty_reward, distil_window=self.distil_window,
            gradient_checkpointing=self.gradient_checkpointing and self.policy_gradient,
        )  # fmt: skip

    def make_engine(self) -> Engine:
        """The engine with its settings."""
        if self.explicit_freeing:
            return partial(stepwise, options=replace(UNROLLED, drop_lists=True))
        layers = self.gradient_checkpointing and self.engine_name == "replay"  # unrolled: see `microbatch`
        return make_engine(self.engine_name, self.hops, gradient_checkpointing=layers)

    @property
    def headline(self) -> str:
        """The configuration in one line."""
        how, updates = self.engine_name, self._settings.updates
        if how is None:
            how = f"G={self._settings.group}, {updates} update{'s' if updates > 1 else ''}"
        elif how == "replay":
            how = f"replay, {self.hops} hops"
        parts = [
            f"{self.model}, {self.method} ({how}): B={self.batch_size} P={self.prompt_tokens} "
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
        if self.reward.startswith(PREFIX):
            parts.append(f"reward {self.reward}")
        return ", ".join(parts)

    def relaxation(self) -> RelaxationConfig:
        """The relaxation."""
        return RelaxationConfig(
            estimator=RELAXED[self.method].estimator, support=self.support, gumbel_topk=self.gumbel_topk, tau=1.0,
            max_new_tokens=self.max_new_tokens,
        )  # fmt: skip

    def build(self, model: PretrainedConfig, device: str = "meta") -> tuple[Backbone, list[nn.Module]]:  # noqa: D102
        backbone, _ = super().build(model, device)
        if not self.policy_gradient:
            self.relaxation().check(backbone.vocab_size)
        length = self.prompt_tokens + self.max_new_tokens
        return backbone, [make_reward(self.reward, backbone, length, None if self.policy_gradient else self.method)]

    def longest(self, model: PretrainedConfig) -> int | None:  # noqa: D102
        contexts = (super().longest(model), reward_context(self.reward))
        return min((n for n in contexts if n), default=None)

    def microbatch(self, backbone: Backbone, others: list[nn.Module]) -> Microbatch:  # noqa: D102
        engine, relaxation, scale = self.make_engine(), self.relaxation(), 1 / self.gradient_accumulation_steps
        objective, prompts = Objective(others[0], self.kl_coef), self.prompts(backbone)
        layers = self.gradient_checkpointing and self.engine_name == "unrolled"  # replay has a switch of its own

        def run(tracker: LiveTracker | None) -> None:
            with backbone.watched_by(tracker), self.casting(backbone), backbone.checkpointed_layers(layers):
                engine(backbone, prompts, objective, relaxation, generator_on(backbone), scale)

        return run

    def program(self, backbone: Backbone, others: list[nn.Module]) -> tuple[Program, list[nn.Module]]:  # noqa: D102
        if not self.policy_gradient:
            return super().program(backbone, others)
        objective = Objective(others[0], self.kl_coef)
        prompts = self.prompts(backbone, self.batch_size // self._settings.group)
        if self.method == DISTILLED:
            from grade.memory.distilled_step import TracedDistilled, total  # here: only this method needs it

            learner, context = TracedDistilled(self._settings, backbone, prompts), partial(StepContext, total=total)
            more = [learner.kept]
        else:
            learner, context = PolicyGradient(self._settings, backbone), partial(StepContext, total=_total)
            more = [learner.value_head] if learner.value_head is not None else []

        def run(tracker: LiveTracker | None, apply: Callable[[], None]) -> None:
            with backbone.watched_by(tracker), self.casting(backbone):
                microbatches = ((prompts, generator_on(backbone)) for _ in range(self.gradient_accumulation_steps))
                learner.step(microbatches, objective, context(self.gradient_accumulation_steps, apply))

        return run, more


def _total(values: Tensor) -> Tensor:
    """The sum over one process. Moments without data, which PPO reads, stand for values that can be whitened."""
    return values if has_data(values) or values.ndim == 0 else _MOMENTS


def generator_on(backbone: Backbone) -> torch.Generator:
    """A generator on a backbone's device; for meta within `grade.memory.kernels.kernels_of` only."""
    return torch.Generator(backbone.device).manual_seed(0)


def phase(tracker: LiveTracker | None, name: str) -> contextlib.AbstractContextManager[None]:
    """A context that names a phase to the tracker, if there is one."""
    return tracker.during(name) if tracker else contextlib.nullcontext()
