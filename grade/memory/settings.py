"""Settings of a step to trace or to measure. `grade.memory.step` makes the step of them.

No model is imported here, so that ``grade memory --help`` starts quickly.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_args

import torch
from pydantic import AfterValidator, Field, PositiveInt, model_validator

from grade.config import Config, allowed_names
from grade.errors import InputError
from grade.gradients.estimators import Support
from grade.gradients.methods import (
    AUTO,
    HINTED,
    METHODS,
    MOST_MICROBATCHES,
    OFFLINE,
    OPTIONS,
    RELAXED,
    TEACHER,
    EngineName,
    MethodConfig,
    MethodName,
    check_teacher,
    reads,
)
from grade.models.parameters import LoraSettings
from grade.models.prompts import PromptBatch
from grade.rewards.model import RewardKind

if TYPE_CHECKING:
    from grade.models.backbone import Backbone

Device = Literal["cpu", "cuda"]


def require_device(device: Device) -> None:
    """Refuse a device that this machine lacks."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device", device, "cpu: this machine has no CUDA device")


Sharding = Literal["fsdp2", "ddp"]
"""How processes share a base: each has a part, or each has a copy."""
CLASSIFIER = "hf:"
"""What the name of a reward that is a Hugging Face classifier begins with."""

Microbatch = Callable[[], None]
"""Adds one microbatch's gradient. What watches the backbone is told which phase runs."""


class TracedConfig(Config):
    """Settings that the memory of any training step depends on, named as in `TrainConfig`."""

    model: str = Field("qwen3-4b", description="shipped shape, Hugging Face id, or folder with config.json")
    batch_size: int = Field(1, ge=1, description="sequences in a microbatch, B")
    gradient_accumulation_steps: int = Field(
        1, ge=1, le=MOST_MICROBATCHES, description="microbatches in an optimizer step"
    )
    prompt_tokens: int = Field(32, ge=1, description="prompt length P in tokens")
    max_new_tokens: int = Field(64, ge=1, description="completion length T in tokens")
    gradient_checkpointing: bool = Field(False, description="recompute layers in backward")
    autocast: bool = Field(False, description="run under bfloat16 autocast")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="type of the base")
    adapter: Literal["lora", "full"] = Field("lora", description="lora, or full: every weight of the layers is trained")
    lora: LoraSettings = Field(LoraSettings(), description="the adapter")
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="attention implementation")
    base_copies: int = Field(
        1, ge=1, le=64, description="copies of the base (3: policy, reference and reward of their own)"
    )

    @property
    def batch_unit(self) -> int:
        """What ``batch_size`` is a multiple of."""
        return 1

    def changed(self, **values: Any) -> Self:
        """A copy with other values, checked like any configuration."""
        return type(self).parse(self.model_dump() | values)

    def microbatch(self, backbone: Backbone) -> Microbatch:
        """The code that adds one microbatch's gradient; that of a `StepConfig` is in `grade.memory.step`."""
        raise NotImplementedError

    def prompts(self, backbone: Backbone, count: int | None = None) -> PromptBatch:
        """Random prompts of P tokens, one of them padded: transformers drops the mask of a batch without padding."""
        shape = (count or self.batch_size, self.prompt_tokens)
        ids = torch.randint(backbone.vocab_size, shape, generator=generator_on(backbone), device=backbone.device)
        mask = torch.ones_like(ids)
        if self.prompt_tokens > 1:
            mask[0, 0] = 0
        return PromptBatch(ids, mask)

    def casting(self, backbone: Backbone) -> contextlib.AbstractContextManager[Any]:
        """Autocast, if it is on."""
        return torch.autocast(backbone.device.type, torch.bfloat16) if self.autocast else contextlib.nullcontext()


def generator_on(backbone: Backbone) -> torch.Generator:
    """A generator on a backbone's device; for meta within `grade.memory.compat.kernels_of` only."""
    return torch.Generator(backbone.device).manual_seed(0)


def _reward_name(spec: str) -> str:
    if spec in get_args(RewardKind) or (spec.startswith(CLASSIFIER) and classifier_source(spec)):
        return spec
    allowed = allowed_names(spec, get_args(RewardKind))
    raise InputError("reward", spec, f"{allowed}, or {CLASSIFIER}<Hugging Face id, or folder with config.json>")


def classifier_source(spec: str) -> str:
    """``org/model`` of ``hf:org/model@POSITIVE``: a label costs no memory."""
    name = spec.removeprefix(CLASSIFIER)
    source, _, label = name.rpartition("@")
    return source if source and "/" not in label else name


def _as_in_training(name: str, default: Any = ...) -> Any:
    """A field of `MethodConfig`, perhaps with another default."""
    field = MethodConfig.schema().model_fields[name]
    return Field(field.default if default is ... else default, description=field.description)


class StepConfig(TracedConfig):
    """A step of any training method: relaxed ones with any engine, and policy gradients."""

    method: MethodName = Field("ste", description="training method")
    engine: Literal["auto", "replay", "checkpointed", "unrolled"] = Field("auto", description="auto: the method's own")
    hops: int = Field(2, ge=0, description="feedback hops of the replay engine")
    support: Support = _as_in_training("support")
    gumbel_topk: int = Field(256, ge=0, description="size K of a token's support; 0 = the full vocabulary")
    explicit_freeing: bool = Field(False, description="drop each step's dense tensors at once (unrolled)")
    num_generations: PositiveInt | None = _as_in_training("num_generations")
    kl_estimator: Literal["exact", "k3"] = _as_in_training("kl_estimator")
    passes_per_step: PositiveInt | None = _as_in_training("passes_per_step")
    minibatches: PositiveInt = _as_in_training("minibatches")
    self_certainty_reward: bool = _as_in_training("self_certainty_reward")
    distil_window: PositiveInt = _as_in_training("distil_window")
    distil_families: Annotated[list[str], Field(min_length=1)] | None = _as_in_training("distil_families")
    kl_coef: float = Field(0.1, ge=0, description="weight beta of KL")
    reward: Annotated[str, AfterValidator(_reward_name)] = Field(
        "bag", description="bag: on the embedding table; trunk: on the transformer; "
        f"{CLASSIFIER}<id or folder>: a sequence classifier",
    )  # fmt: skip
    teacher: str | None = Field(
        None, description="alone (method teacher) or beside a reward: named as a model, an adapter's folder, or base"
    )
    teacher_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="type of another model as teacher; null: the base's"
    )
    teacher_beta: float = _as_in_training("teacher_beta")
    teacher_context_tokens: int = Field(0, ge=0, description="tokens that the teacher alone reads before the prompt")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.method == AUTO:
            allowed = f"the method itself, as auto depends on the reward: {', '.join((*METHODS, OFFLINE, TEACHER))}"
            raise InputError("method", AUTO, allowed)
        names, fields = ("teacher_dtype", "teacher_beta", "teacher_context_tokens"), type(self).model_fields
        changed = {name: getattr(self, name) for name in names if getattr(self, name) != fields[name].default}
        check_teacher(self.method, self.teacher, changed)
        if self.trainer.hinted and self.teacher is None:
            raise InputError("teacher", None, f"base, or another model, with family {HINTED}")
        if self.method == TEACHER and self.reward != fields["reward"].default:
            raise InputError("reward", self.reward, f"none with method {TEACHER}, which has no reward")
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
            allowed = f"a multiple of {self.batch_unit} ({self.trainer.group} completions of a prompt"
            allowed += f", {self.minibatches} minibatches)" if self.minibatches > 1 else ")"
            raise InputError("batch_size", self.batch_size, allowed)
        for length in ("prompt_tokens", "max_new_tokens"):
            self.trainer.check_sizes({"batch_size": self.batch_size, length: getattr(self, length)})
        return self

    @property
    def policy_gradient(self) -> bool:
        """Whether the method takes any reward, or none; otherwise it is relaxed and has an engine."""
        return self.method not in RELAXED

    @property
    def engine_name(self) -> EngineName | None:
        """The engine that runs; None for a policy gradient."""
        if self.policy_gradient:
            return None
        return RELAXED[self.method].engine if self.engine == "auto" else self.engine

    @property
    def trainer(self) -> MethodConfig:
        """The trainers' settings of this step, which refuse those that the method does not read."""
        own, by_engine = {}, ("gradient_checkpointing", "hops")  # here *_legacy may have another engine
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            changed = value != field.default and (self.policy_gradient or name not in by_engine)
            if name in OPTIONS and (changed or reads(self.method, name)):
                own[name] = value
        return MethodConfig(method=self.method, max_completion_length=self.max_new_tokens, **own)

    @property
    def batch_unit(self) -> int:
        """What ``batch_size`` is a multiple of: whole groups, and an equal share for every minibatch."""
        return math.lcm(self.trainer.group, self.minibatches)

    def options(self) -> dict[str, dict[str, Any]]:
        """Single changes that may save memory, by what they are."""
        engine, lean = self.engine_name, dict(gradient_checkpointing=False, explicit_freeing=False)
        share = 2 * self.minibatches
        return {
            "one base in three roles": dict(base_copies=1),
            "engine replay": lean | dict(engine="replay") if engine != "replay" else {},
            "engine checkpointed": lean | dict(engine="checkpointed") if engine == "unrolled" else {},
            "gradient checkpointing": dict(gradient_checkpointing=True),
            "bfloat16 base": dict(dtype="bfloat16"),
            "bfloat16 teacher": dict(teacher_dtype="bfloat16"),
            "LoRA instead of all weights": dict(adapter="lora"),
            "fused attention (sdpa)": dict(attention="sdpa"),
            "reward on the embedding table": dict(reward="bag"),
            "a support of 256 tokens": dict(gumbel_topk=min(self.gumbel_topk or 256, 256)),
            "KL from the sampled tokens (k3)": dict(kl_estimator="k3"),
            f"{share} minibatches": dict(minibatches=share),
            "half the batch": dict(batch_size=self.batch_size // 2),
            "half the completion": dict(max_new_tokens=self.max_new_tokens // 2),
        }

    @property
    def headline(self) -> str:
        """The configuration in one line."""
        how, updates = self.engine_name, self.trainer.updates
        if how is None:
            how = f"G={self.trainer.group}, {updates} update{'s' if updates > 1 else ''}"
        elif how == "replay":
            how = f"replay, {self.hops} hops"
        learned = "hints" if self.trainer.hinted else f"beta {self.teacher_beta:g}"
        taught = f"teacher {self.teacher} ({self.teacher_dtype or self.dtype}, {learned}"
        taught += f", context of {self.teacher_context_tokens})" if self.teacher_context_tokens else ")"
        parts = [
            f"{self.model}, {self.method} ({how}): B={self.batch_size} P={self.prompt_tokens} "
            f"T={self.max_new_tokens}, {self.dtype}, {self.adapter}, {self.attention}",
            f"{self.gradient_accumulation_steps} microbatches" if self.gradient_accumulation_steps > 1 else "",
            "layers checkpointed" if self.gradient_checkpointing else "",
            "explicit freeing" if self.explicit_freeing else "",
            "autocast" if self.autocast else "",
            f"{self.base_copies} copies of the base" if self.base_copies > 1 else "",
            f"reward {self.reward}" if self.reward.startswith(CLASSIFIER) else "",
            taught if self.teacher else "",
        ]
        return ", ".join(part for part in parts if part)
