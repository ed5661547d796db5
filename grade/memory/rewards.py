"""What a traced step learns from: a reward, or a teacher.

A reward is a head on the policy's base, or a Hugging Face sequence classifier. A teacher is that of
`grade.models.teacher`, without files of weights and without text.

A classifier is built from its configuration alone. Its own code runs (`grade.rewards.classifier`): on
embeddings where it has as many tokens as the policy (a configuration tells only the size), which relaxed methods need;
else on text, which is taken to be as many of its tokens as of the policy's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from grade.errors import InputError, reading
from grade.gradients.methods import POLICY_GRADIENTS
from grade.memory.meta import NoData
from grade.memory.models import build_backbone, model_config, read_config
from grade.memory.settings import CLASSIFIER, StepConfig, classifier_source
from grade.models.adapter import ADAPTER_FILES
from grade.models.backbone import Backbone, errors_only
from grade.models.base import FrozenBase
from grade.models.head import EmbeddingTable
from grade.models.prompts import PromptBatch
from grade.models.teacher import BASE, Teacher
from grade.rewards.classifier import EmbeddedClassifier, TextClassifier
from grade.rewards.model import HeadSettings, RewardModel


def make_reward(spec: str, backbone: Backbone, relaxed: str | None) -> nn.Module:
    """The reward of a step, frozen, with random weights; its pass is a phase of its own.

    ``relaxed``: the relaxed method that needs its gradient.
    """
    if not spec.startswith(CLASSIFIER):
        return _HeadInPhase(spec, backbone, HeadSettings(hidden=64 if spec == "trunk" else 0)).requires_grad_(False)
    reward = _ClassifierInPhase(spec, backbone)
    if relaxed and not reward.shares_vocabulary:
        rows = len(reward.reads.weight)
        allowed = f"a classifier with the policy's vocabulary of {backbone.vocab_size} tokens, not {rows}: {relaxed}"
        raise InputError("reward", spec, f"{allowed} needs its gradient ({', '.join(POLICY_GRADIENTS)} take any)")
    return reward


def reward_context(spec: str) -> int | None:
    """Tokens that a reward of its own can read; None if there is no limit but the policy's."""
    if not spec.startswith(CLASSIFIER):
        return None
    return getattr(_classifier_config(spec).get_text_config(), "max_position_embeddings", None)


def _classifier_config(spec: str) -> PretrainedConfig:
    """The configuration of a sequence classifier ``hf:<folder or id>``, with or without ``@LABEL``."""
    allowed = f"{CLASSIFIER}<Hugging Face id, or folder with config.json>"
    config = read_config("reward", spec, classifier_source(spec), allowed)
    if config.is_encoder_decoder:
        raise InputError("reward", spec, "a sequence classifier that is not an encoder-decoder")
    return config


class _HeadInPhase(RewardModel):
    def forward(self, embeds: Tensor, mask: Tensor) -> Tensor:
        with self.backbone.phase("reward"), _layers_not_checkpointed(self.backbone):
            return super().forward(embeds, mask)


@contextlib.contextmanager
def _layers_not_checkpointed(backbone: Backbone) -> Iterator[None]:
    """A reward's pass has the adapter off, but checkpointed layers would be recomputed with it on."""
    layers = [m for m in backbone.model.modules() if getattr(m, "gradient_checkpointing", False)]
    for layer in layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in layers:
            layer.gradient_checkpointing = True


class _ClassifierInPhase(nn.Module, EmbeddedClassifier):
    """The classifier without tokenizers and without the trial of a way of padding, which reads values."""

    def __init__(self, spec: str, backbone: Backbone) -> None:
        nn.Module.__init__(self)
        device, config = backbone.device, _classifier_config(spec)
        with torch.device(device), NoData() if device.type == "meta" else contextlib.nullcontext():
            with reading("reward", spec, "a sequence classifier", ValueError):
                model = AutoModelForSequenceClassification.from_config(config, dtype=config.dtype or torch.float32)
        TextClassifier.__init__(self, model, None, model.config.id2label[0] if model.config.num_labels > 1 else None)
        self.left = hasattr(model, "score")  # decoders
        self._backbone = (backbone,)  # in a tuple: its weights are not this model's

    @property
    def reads(self) -> EmbeddingTable:
        return EmbeddingTable.of(self.model.get_input_embeddings())

    @property
    def prefix(self) -> Tensor:
        return torch.empty(0, dtype=torch.long, device=self.model.device)

    suffix = prefix

    @property
    def shares_vocabulary(self) -> bool:
        return len(self.reads.weight) == self._backbone[0].vocab_size

    @torch.no_grad()
    def score(self, policy: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        with policy.phase("reward"), errors_only():  # no padding is seen among embeddings, it warns
            if self.shares_vocabulary:
                return super().score(policy, prompts, ids, mask)
            count, tokens = len(ids), prompts.ids.shape[1] + ids.shape[1]
            return self.value(self.logits([[0] * max(tokens - 1, 1), *[[0] * tokens] * (count - 1)]))

    def differentiable(self, embeds: Tensor, mask: Tensor) -> Tensor:
        with self._backbone[0].phase("reward"), errors_only():
            return super().differentiable(embeds, mask)


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
