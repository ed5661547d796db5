"""The teacher of a traced step: `grade.models.teacher` without files of weights and without text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.nn.functional as F
from torch import nn
from transformers import PretrainedConfig

from grade.errors import InputError
from grade.memory.models import build_backbone, model_config
from grade.memory.settings import StepConfig
from grade.models.adapter import ADAPTER_FILES
from grade.models.backbone import Backbone
from grade.models.base import FrozenBase
from grade.models.prompts import PromptBatch
from grade.models.teacher import BASE, Teacher


def teacher_config(config: StepConfig) -> PretrainedConfig:
    """The configuration of the model that the teacher of a step runs, which may be the policy's."""
    if config.teacher == BASE or _is_adapter(config.teacher):
        return model_config(config.model)
    return model_config(config.teacher, "teacher")


def teacher_weights(config: StepConfig, backbone: Backbone) -> nn.Module:
    """What the teacher holds of its own, frozen: a model; an adapter like the policy's; nothing if it is the base."""
    if config.teacher == BASE:
        return nn.Module()
    if not _is_adapter(config.teacher):
        dtype = config.teacher_dtype or config.dtype
        return FrozenBase(build_backbone(teacher_config(config), dtype, "full", device=backbone.device).model)
    if backbone.peft is None:
        raise InputError("teacher", config.teacher, "a model, or base: an adapter is one of a base that has one")
    return nn.ParameterList(p.detach().clone() for p in backbone.trainable_parameters()).requires_grad_(False)


def make_teacher(config: StepConfig, backbone: Backbone, weights: nn.Module) -> Teacher:
    """The teacher with its `teacher_weights`."""
    own, adapter = (weights if isinstance(weights, kind) else None for kind in (FrozenBase, nn.ParameterList))
    return _Teacher(backbone, config.teacher, beta=config.teacher_beta, own=own, adapter=adapter,
                    more=config.teacher_context_tokens)  # fmt: skip


def _is_adapter(name: str) -> bool:
    return (Path(name) / ADAPTER_FILES[0]).is_file()


@dataclass(frozen=True)
class _Teacher(Teacher):
    more: int = 0  # tokens of the context

    def prompts(self, prompts: PromptBatch) -> PromptBatch:
        if not self.more:
            return prompts
        return PromptBatch(F.pad(prompts.ids, (self.more, 0)), F.pad(prompts.mask, (self.more, 0), value=1))
