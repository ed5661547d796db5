"""Settings of a step to trace or to measure. `grade.memory.step` makes the step of them.

No model is imported here, so that ``grade memory --help`` starts quickly.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from pydantic import Field, PositiveInt, model_validator

from grade.config import Config
from grade.errors import InputError
from grade.gradients.methods import POLICY_GRADIENTS, RELAXED, EngineName, MethodConfig
from grade.models.lora import LoraSettings
from grade.models.prompts import PromptBatch
from grade.rewards.model import RewardKind

if TYPE_CHECKING:
    from grade.models.backbone import Backbone

Device = Literal["cpu", "cuda"]


def require_device(device: Device) -> None:
    """Refuse a device that this machine lacks."""
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device", device, "cpu: this machine has no CUDA device")


Microbatch = Callable[[], None]
"""Adds one microbatch's gradient. What watches the backbone is told which phase runs."""


class TracedConfig(Config):
    """Settings that the memory of any training step depends on."""

    model: str = Field("qwen3-4b", description="shipped shape, Hugging Face id, or folder with config.json")
    batch_size: int = Field(1, ge=1, description="sequences in a microbatch, B")
    prompt_tokens: int = Field(32, ge=1, description="prompt length P in tokens")
    max_new_tokens: int = Field(64, ge=1, description="completion length T in tokens")
    gradient_checkpointing: bool = Field(False, description="recompute layers in backward")
    autocast: bool = Field(False, description="run under bfloat16 autocast")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("bfloat16", description="type of the base")
    quantization_config: dict[str, Any] | None = Field(
        None, description="of bitsandbytes, such as {load_in_4bit: true}; null: the base is not quantised"
    )
    adapter: Literal["lora", "full"] = Field("lora", description="lora, or full: every weight of the layers is trained")
    lora: LoraSettings = Field(LoraSettings(), description="the adapter")
    train_bias: bool = Field(False, description="train a token bias too")
    attention: Literal["sdpa", "eager"] = Field("sdpa", description="attention implementation")
    base_copies: int = Field(1, ge=1, description="copies of the base (3: policy, reference and reward of their own)")

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


class StepConfig(TracedConfig):
    """A step of a relaxed method, with any engine, or of a policy gradient."""

    method: Literal[*RELAXED, *POLICY_GRADIENTS] = Field("ste", description="training method")
    engine: Literal["auto", "replay", "checkpointed", "unrolled"] = Field("auto", description="auto: the method's own")
    hops: int = Field(2, ge=0, description="feedback hops of the replay engine")
    gumbel_topk: int = Field(256, ge=0, description="size K of a token's support; 0 = the full vocabulary")
    explicit_freeing: bool = Field(False, description="drop each step's dense tensors at once (unrolled)")
    num_generations: PositiveInt | None = Field(None, description="completions of each prompt, G; null: the method's")
    reward: RewardKind = Field("bag", description="bag: on the embedding table; trunk: on the transformer")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.policy_gradient and self.engine != "auto":
            raise InputError("engine", self.engine, f"auto for {self.method}: a policy gradient has no engine")
        if self.gradient_checkpointing and self.engine_name == "checkpointed":
            raise InputError("gradient_checkpointing", True, "false for the engine checkpointed: it keeps a cache")
        if self.explicit_freeing and self.engine_name != "unrolled":
            raise InputError("explicit_freeing", True, "false for any engine but unrolled: none keeps dense tensors")
        if "batch_size" not in self.model_fields_set:
            self.__dict__["batch_size"] = self.batch_unit  # validated: a frozen config has no other way
        if self.batch_size % self.batch_unit:
            raise InputError("batch_size", self.batch_size, f"a multiple of {self.batch_unit} completions of a prompt")
        return self

    @property
    def policy_gradient(self) -> bool:
        """Whether the method is a policy gradient; otherwise it is relaxed and has an engine."""
        return self.method not in RELAXED

    @property
    def engine_name(self) -> EngineName | None:
        """The engine that runs; None for a policy gradient."""
        if self.policy_gradient:
            return None
        return RELAXED[self.method].engine if self.engine == "auto" else self.engine

    @property
    def trainer(self) -> MethodConfig:
        """The trainers' settings of this step, which refuse those that the method does not have."""
        values, known = {}, MethodConfig.kind({"method": self.method}).model_fields
        for name in ("hops", "gumbel_topk", "num_generations", "gradient_checkpointing"):
            value = getattr(self, name)
            # A legacy method may have another engine here.
            changed = self.policy_gradient and value != type(self).model_fields[name].default
            if value is not None and (name in known or changed):
                values[name] = value
        return MethodConfig(method=self.method, max_completion_length=self.max_new_tokens, **values)

    @property
    def batch_unit(self) -> int:
        """What ``batch_size`` is a multiple of: whole groups."""
        return self.trainer.group

    def options(self) -> dict[str, dict[str, Any]]:
        """Single changes that may save memory, by what they are."""
        engine, lean = self.engine_name, dict(gradient_checkpointing=False, explicit_freeing=False)
        return {
            "one base in three roles": dict(base_copies=1),
            "engine replay": lean | dict(engine="replay") if engine != "replay" else {},
            "engine checkpointed": lean | dict(engine="checkpointed") if engine == "unrolled" else {},
            "gradient checkpointing": dict(gradient_checkpointing=True),
            "bfloat16 base": dict(dtype="bfloat16"),
            "LoRA instead of all weights": dict(adapter="lora"),
            "fused attention (sdpa)": dict(attention="sdpa"),
            "reward on the embedding table": dict(reward="bag"),
            "a support of 256 tokens": dict(gumbel_topk=min(self.gumbel_topk or 256, 256)),
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
        parts = [
            f"{self.model}, {self.method} ({how}): B={self.batch_size} P={self.prompt_tokens} "
            f"T={self.max_new_tokens}, {self.dtype}, {self.adapter}, {self.attention}",
            str(self.quantization_config or ""),
            "layers checkpointed" if self.gradient_checkpointing else "",
            "explicit freeing" if self.explicit_freeing else "",
            "autocast" if self.autocast else "",
            f"{self.base_copies} copies of the base" if self.base_copies > 1 else "",
        ]
        return ", ".join(part for part in parts if part)
