"""One optimizer step to trace or to measure: its settings, and the trainers' own code on a backbone without a task.

Everything that allocates is the library's: `grade.engines`, `grade.rollout`, the reward models, AdamW. Prompts are
random ids and the reward head is random: memory does not depend on values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from transformers import PretrainedConfig

from grade.adapter import LoraSettings
from grade.backbone import Backbone
from grade.config import Config
from grade.engines import Engine, Objective
from grade.engines.stepwise import UNROLLED, stepwise
from grade.errors import InputError
from grade.memory.live import Category, LiveTracker
from grade.memory.models import Adapter, build_backbone
from grade.methods import METHODS, EngineName, MethodName, make_engine
from grade.prompts import PromptBatch
from grade.relaxation import RelaxationConfig, Support
from grade.reward import HeadSettings, RewardKind, RewardModel
from grade.rollout import check_length


class StepConfig(Config):
    """What a training step's memory depends on. Names are those of `TrainConfig`."""

    model: str = Field("qwen3-4b", description="shipped shape, Hugging Face id, or folder with config.json")
    method: MethodName = Field("ste", description="training method")
    engine: Literal["auto", "replay", "checkpointed", "unrolled"] = Field("auto", description="auto: the method's own")
    batch_size: int = Field(1, ge=1, description="prompts in a microbatch, B")
    gradient_accumulation_steps: int = Field(1, ge=1, description="microbatches in an optimizer step")
    prompt_tokens: int = Field(32, ge=1, description="prompt length P in tokens")
    max_new_tokens: int = Field(64, ge=1, description="completion length T in tokens")
    hops: int = Field(2, ge=0, description="feedback hops of the replay engine")
    support: Support = Field("perturbed_top_k", description="top_k or perturbed_top_k")
    gumbel_topk: int = Field(256, ge=0, description="size K of a token's support; 0 = the full vocabulary")
    gradient_checkpointing: bool = Field(False, description="recompute layers in backward (replay, unrolled)")
    explicit_freeing: bool = Field(False, description="drop each step's dense tensors at once (unrolled)")
    autocast: bool = Field(False, description="run under bfloat16 autocast")
    kl_coef: float = Field(0.1, ge=0, description="weight beta of KL")
    reward: RewardKind = Field("bag", description="bag: reward on the embedding table; trunk: on the transformer")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="type of the base")
    adapter: Adapter = Field("lora", description="lora, or full: every weight of the layers is trained")
    lora: LoraSettings = Field(LoraSettings(), description="the adapter")
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="attention implementation")
    base_copies: int = Field(1, ge=1, description="copies of the base (3: policy, reference and reward of their own)")

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
        return METHODS[self.method].engine if self.engine == "auto" else self.engine

    def make_engine(self) -> Engine:
        """The engine with its settings."""
        if self.explicit_freeing:
            return partial(stepwise, options=replace(UNROLLED, drop_lists=True))
        layers = self.gradient_checkpointing and self.engine_name == "replay"  # for the others see `Step.run`
        return make_engine(self.engine_name, self.hops, gradient_checkpointing=layers)

    def relaxation(self) -> RelaxationConfig:
        """The relaxation."""
        return RelaxationConfig(
            estimator=METHODS[self.method].estimator, support=self.support, gumbel_topk=self.gumbel_topk, tau=1.0,
            max_new_tokens=self.max_new_tokens,
        )  # fmt: skip


@dataclass
class Step:
    """An optimizer step that can be run again and again.

    Attributes:
        config: Its settings.
        backbone: Policy and reference.
        objective: Reward and KL.
        optimizer: AdamW, its state already there: a run's first step has none, every later one has.
        prompts: One microbatch, the same each time.
        copies: Further copies of the base, which do nothing but take memory.
    """

    config: StepConfig
    backbone: Backbone
    objective: Objective
    optimizer: torch.optim.AdamW
    prompts: PromptBatch
    copies: list[Tensor]

    def run(self, tracker: LiveTracker | None = None) -> None:
        """Rollout, gradients of every microbatch, clipping and the optimizer's step, as `grade.loop` does them.

        Args:
            tracker: Told which phase runs and what tensors are for.
        """
        config, engine, relaxation = self.config, self.config.make_engine(), self.config.relaxation()
        generator = _generator(self.backbone.device)
        parameters = self.backbone.trainable_parameters()
        scale = 1 / config.gradient_accumulation_steps
        with _observed(self, tracker) as objective:
            self.optimizer.zero_grad(set_to_none=True)
            for _ in range(config.gradient_accumulation_steps):
                with self._options():
                    engine(self.backbone, self.prompts, objective, relaxation, generator, scale)
            with tracker.during("optimizer") if tracker else contextlib.nullcontext():
                torch.nn.utils.clip_grad_norm_(parameters, 1.0)
                self.optimizer.step()
        if tracker:
            tracker.tag((p.grad for p in parameters), "gradients")
        self.optimizer.zero_grad(set_to_none=True)

    @contextlib.contextmanager
    def _options(self) -> Iterator[None]:
        """Autocast, and layer checkpointing for the engine that has no switch of its own."""
        config, device = self.config, self.backbone.device.type
        layers = config.gradient_checkpointing and config.engine_name == "unrolled"
        cast = torch.autocast(device, torch.bfloat16) if config.autocast else contextlib.nullcontext()
        with cast, self.backbone.checkpointed_layers(layers):
            yield

    def existing(self) -> dict[Category, list[Tensor]]:
        """Tensors that are there before a step begins, by category."""
        parameters = self.backbone.trainable_parameters()
        trained = {id(p) for p in parameters}
        frozen = [t for t in (*self.backbone.parameters(), *self.backbone.buffers()) if id(t) not in trained]
        head = self.objective.reward_model
        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        lora = self.config.adapter == "lora"
        weights = [*frozen, *self.copies, *head.parameters(), *head.buffers(), *([] if lora else parameters)]
        return {"weights": weights, "adapter": parameters if lora else [], "optimizer": states}


def build_models(config: StepConfig, model: PretrainedConfig, device: str = "meta") -> tuple[Backbone, RewardModel]:
    """Backbone and reward model of a step, with random weights.

    Args:
        config: The settings.
        model: From `grade.memory.models.model_config`.
        device: Where to put them; meta has no data.

    Returns:
        Both, frozen but for what is trained.

    Raises:
        InputError: If the model is not supported or a size does not fit it.
    """
    backbone = build_backbone(model, config.dtype, config.adapter, config.lora, config.attention, device)
    check_length(backbone, config.prompt_tokens + config.max_new_tokens)
    config.relaxation().check(backbone.vocab_size)
    reward = RewardModel(config.reward, backbone, HeadSettings(hidden=64 if config.reward == "trunk" else 0))
    return backbone, reward.requires_grad_(False)


def make_step(config: StepConfig, backbone: Backbone, reward: RewardModel) -> Step:
    """The step of a configuration, on real or fake tensors.

    Args:
        config: The settings.
        backbone: Policy and reference.
        reward: The reward model.

    Returns:
        The step, its optimizer state filled.
    """
    device = backbone.device
    parameters = backbone.trainable_parameters()
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.0)
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    shape = (config.batch_size, config.prompt_tokens)
    ids = torch.randint(backbone.vocab_size, shape, generator=_generator(device), device=device)
    trained = {id(p) for p in parameters}
    base = [p for p in backbone.parameters() if id(p) not in trained] if config.adapter == "lora" else parameters
    copies = [torch.empty_like(p, requires_grad=False) for _ in range(config.base_copies - 1) for p in base]
    mask = torch.ones_like(ids)
    if config.prompt_tokens > 1:
        mask[0, 0] = 0  # padding, as in a batch of real prompts: without any, transformers leaves the mask out
    prompts = PromptBatch(ids, mask)
    return Step(config, backbone, Objective(reward, config.kl_coef), optimizer, prompts, copies)


def _generator(device: torch.device) -> torch.Generator:
    """Meta has no generators; there any will do."""
    return torch.Generator("cpu" if device.type == "meta" else device).manual_seed(0)


@contextlib.contextmanager
def _observed(step: Step, tracker: LiveTracker | None) -> Iterator[Objective]:
    """The step's objective, with the tracker told of rollout, reference and reward, and of key-value caches."""
    backbone, objective = step.backbone, step.objective

    def reward(*args):
        with tracker.during("reward") if tracker else contextlib.nullcontext(), _plain_layers(backbone):
            return objective.reward_model(*args)

    watched = Objective(reward, objective.beta, objective.scope)
    if tracker is None:
        yield watched
        return
    merged, reference, new_cache = backbone.merged, backbone.reference, backbone.new_cache

    def phase(name: str, enter):
        @contextlib.contextmanager
        def run():
            with tracker.during(name), enter():
                tracker.tag(backbone.model.parameters(), "weights")  # copies that the adapter is folded into
                yield

        return run

    def cache():
        made = new_cache()

        class Tagged(type(made)):  # a wrapper held by the cache itself would be a cycle, freed late
            def update(self, *args, **kwargs):
                result = super().update(*args, **kwargs)
                tracker.tag(result, "kv cache")
                return result

        made.__class__ = Tagged
        return made

    # Attributes of this one object, which hide the methods of its class until they are deleted.
    backbone.merged, backbone.reference = phase("rollout", merged), phase("reference", reference)
    backbone.new_cache = cache
    try:
        yield watched
    finally:
        del backbone.merged, backbone.reference, backbone.new_cache


@contextlib.contextmanager
def _plain_layers(backbone: Backbone) -> Iterator[None]:
    """Layers not checkpointed: a reward's pass has the adapter off, and would be recomputed with it on."""
    layers = [m for m in backbone.model.modules() if getattr(m, "gradient_checkpointing", False)]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True
