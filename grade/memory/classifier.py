"""A Hugging Face sequence classifier as the reward of a traced step, built from its configuration alone.

All its layers are traced, with the code of `grade.rewards.differentiable` where it has as many tokens as the policy,
otherwise with that of `grade.rewards.classifier`. Text is taken to be as many of its tokens as of the policy's.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from grade.errors import InputError
from grade.memory.nodata import NoData
from grade.models.backbone import Backbone, errors_only
from grade.models.head import EmbeddingTable
from grade.models.prompts import PromptBatch
from grade.rewards.base import Reward
from grade.rewards.classifier import TextClassifier
from grade.rewards.differentiable import EmbeddedClassifier, on_the_left, on_the_right


class Classifier(nn.Module, Reward):
    """A frozen classifier with random weights as a reward.

    Args:
        spec: What the user calls it.
        config: Its configuration.
        backbone: The policy, whose watcher is told of the reward's phase.

    Raises:
        InputError: If there is no sequence classifier of that configuration.
    """

    def __init__(self, spec: str, config: PretrainedConfig, backbone: Backbone) -> None:
        super().__init__()
        device = backbone.device
        with torch.device(device), NoData() if device.type == "meta" else contextlib.nullcontext():
            try:
                model = AutoModelForSequenceClassification.from_config(config, dtype=config.dtype or torch.float32)
            except ValueError as error:
                raise InputError("reward", spec, f"a sequence classifier ({str(error)[:100]})") from None
        self.model, self._reader = model, _Reader(model)
        self._backbone = (backbone,)  # in a tuple: its weights are not this model's

    scope = "prompt_and_completion"

    @property
    def reads(self) -> EmbeddingTable:
        """Its own embedding table."""
        return self._reader.reads

    @property
    def shares_vocabulary(self) -> bool:
        """Whether its table has as many rows as the policy's."""
        return len(self.reads.weight) == self._backbone[0].vocab_size

    def score(self, policy: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B] of hard completions [B, T]."""
        with self._backbone[0].phase("reward"), errors_only():  # no padding is seen among embeddings, it warns
            if self.shares_vocabulary:
                return self._reader.score(policy, prompts, ids, mask)
            return self._reader.score_texts(len(ids), prompts.ids.shape[1] + ids.shape[1])

    def differentiable(self, embeds: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B] of embeddings in its own table [B, L, D_R]."""
        with self._backbone[0].phase("reward"), errors_only():
            return self._reader.differentiable(embeds, mask)


class _Reader(EmbeddedClassifier):
    """The class without tokenizers and without the trial of a way of padding, which reads values."""

    def __init__(self, model: PreTrainedModel) -> None:
        label = model.config.id2label[0] if model.config.num_labels > 1 else None
        TextClassifier.__init__(self, model, None, label)
        self.padding = on_the_left if hasattr(model, "score") else on_the_right  # decoders, encoders

    @property
    def reads(self) -> EmbeddingTable:
        layer = self.model.get_input_embeddings()
        scale = float(getattr(layer, "scalar_embed_scale", getattr(layer, "embed_scale", 1.0)))
        return EmbeddingTable(layer.weight.detach(), scale)

    @property
    def prefix(self) -> Tensor:
        return torch.empty(0, dtype=torch.long, device=self.model.device)

    suffix = prefix

    @torch.no_grad()
    def score_texts(self, count: int, tokens: int) -> Tensor:
        """Rewards of texts of that many tokens, one of them shorter."""
        rows = [[0] * max(tokens - 1, 1), *[[0] * tokens] * (count - 1)]
        return self.value(self.logits(rows))
