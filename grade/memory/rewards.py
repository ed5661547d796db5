"""Rewards of a traced step: a head on the policy's base, or a Hugging Face sequence classifier.

A classifier is built from its configuration alone. Its own code runs (`grade.rewards.classifier`): on
embeddings where it has as many tokens as the policy (a configuration tells only the size), which relaxed methods need;
else on text, which is taken to be as many of its tokens as of the policy's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from grade.errors import InputError
from grade.gradients.methods import POLICY_GRADIENTS
from grade.memory.meta import NoData
from grade.memory.models import read_config
from grade.memory.settings import CLASSIFIER, classifier_source
from grade.models.backbone import Backbone, errors_only
from grade.models.head import EmbeddingTable
from grade.models.prompts import PromptBatch
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
            try:
                model = AutoModelForSequenceClassification.from_config(config, dtype=config.dtype or torch.float32)
            except ValueError as error:
                raise InputError("reward", spec, f"a sequence classifier ({str(error)[:100]})") from None
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
