"""Rewards of a traced step: a head on the policy's base, or a Hugging Face sequence classifier.

A classifier is built from its configuration alone, and all its layers are traced. Policy gradients score text with it,
without gradient; the text is taken to be as many of its tokens as of the policy's. Relaxed methods differentiate it
through its own embedding table, for which its vocabulary must be the policy's; a configuration tells only the size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, get_args

import torch
from pydantic import AfterValidator
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig
from transformers.utils import logging

from grade.config import allowed_names
from grade.errors import InputError
from grade.gradients.methods import POLICY_GRADIENTS
from grade.memory.nodata import NoData
from grade.models.backbone import Backbone
from grade.models.embedding import EmbeddingTable
from grade.models.head import wide
from grade.models.prompts import PromptBatch
from grade.rewards.model import HeadSettings, RewardKind, RewardModel

PREFIX = "hf:"
BATCH_ROWS = 64
"""Texts that a classifier reads at once, as in `grade.rewards.classifier`."""


def known_reward(spec: str) -> str:
    """The name of a reward, if it has the form of one.

    Raises:
        InputError: Otherwise.
    """
    if spec in get_args(RewardKind) or (spec.startswith(PREFIX) and _source(spec)):
        return spec
    allowed = allowed_names(spec, get_args(RewardKind))
    raise InputError("reward", spec, f"{allowed}, or {PREFIX}<Hugging Face id, or folder with config.json>")


RewardSpec = Annotated[str, AfterValidator(known_reward)]


def make_reward(spec: str, backbone: Backbone, length: int, relaxed: str | None) -> nn.Module:
    """The reward of a step, frozen, with random weights; its pass is a phase of its own.

    Args:
        spec: As in `known_reward`.
        backbone: The policy.
        length: Tokens that are scored.
        relaxed: The relaxed method that needs its gradient; None for a policy gradient.

    Returns:
        A reward of `grade.gradients.objective`.

    Raises:
        InputError: If there is no such reward, or it cannot read the policy's completions.
    """
    if not spec.startswith(PREFIX):
        return Head(spec, backbone, HeadSettings(hidden=64 if spec == "trunk" else 0)).requires_grad_(False)
    reward, context = Classifier(spec, backbone), reward_context(spec)
    rows = len(reward.reads.weight)
    if relaxed and not reward.shares_vocabulary:
        allowed = f"for {relaxed} one with the policy's {backbone.vocab_size}, as it needs the reward's gradient"
        value = f"{spec}, whose vocabulary has {rows} tokens"
        raise InputError("reward", value, f"{allowed} ({', '.join(POLICY_GRADIENTS)} take any)")
    if context and length > context:
        raise InputError("prompt_tokens + max_new_tokens", length, f"at most {context} (the reward's context)")
    return reward


def reward_context(spec: str) -> int | None:
    """Tokens that a reward of its own can read; None if there is no limit but the policy's."""
    if not spec.startswith(PREFIX):
        return None
    return getattr(classifier_config(spec), "max_position_embeddings", None)


def classifier_config(spec: str) -> PretrainedConfig:
    """The configuration of a sequence classifier.

    Args:
        spec: ``hf:<folder or id>``, with or without ``@LABEL``, which costs no memory.

    Returns:
        A transformers configuration.

    Raises:
        InputError: If it cannot be found or read, or is an encoder-decoder's.
    """
    try:
        config = AutoConfig.from_pretrained(_source(spec), trust_remote_code=False)
    except Exception as error:  # transformers raises a dozen types, which mean the same to the user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else error.__class__.__name__
        allowed = f"{PREFIX}<Hugging Face id, or folder with config.json> ({reason})"
        raise InputError("reward", spec, allowed) from None
    if config.is_encoder_decoder:
        raise InputError("reward", spec, "a sequence classifier that is not an encoder-decoder")
    return config


def _source(spec: str) -> str:
    """``org/model`` of ``hf:org/model@POSITIVE``."""
    name = spec.removeprefix(PREFIX)
    source, _, label = name.rpartition("@")
    return source if source and "/" not in label else name


class Head(RewardModel):
    """A reward model on the policy's own base."""

    def forward(self, embeds: Tensor, mask: Tensor) -> Tensor:  # noqa: D102
        with self.backbone.phase("reward"), _plain_layers(self.backbone):
            return super().forward(embeds, mask)


class Classifier(nn.Module):
    """A frozen sequence classifier on tokens that are the policy's: what `grade.rewards` does with a real one.

    With the policy's vocabulary it reads embeddings in its own table, whatever the method, otherwise ids of text.

    Args:
        spec: As in `classifier_config`.
        backbone: The policy, whose watcher is told of the reward's phase.

    Raises:
        InputError: If there is no such configuration, or none of a sequence classifier.
    """

    def __init__(self, spec: str, backbone: Backbone) -> None:
        super().__init__()
        config, device = classifier_config(spec), backbone.device
        with torch.device(device), NoData() if device.type == "meta" else contextlib.nullcontext():
            try:
                model = AutoModelForSequenceClassification.from_config(config, dtype=config.dtype or torch.float32)
            except ValueError as error:
                raise InputError("reward", spec, f"a sequence classifier ({str(error)[:100]})") from None
        self.model = model.requires_grad_(False).eval()
        self.batch_rows = 1 if config.get_text_config().pad_token_id is None else BATCH_ROWS
        config.get_text_config().pad_token_id = -1  # no id: decoders refuse batches without one, of embeddings too
        self._backbone = (backbone,)  # in a tuple: its weights are not this model's

    @property
    def reads(self) -> EmbeddingTable:
        """Its own embedding table."""
        layer = self.model.get_input_embeddings()
        return EmbeddingTable(layer.weight, float(getattr(layer, "scalar_embed_scale", 1.0)))

    @property
    def shares_vocabulary(self) -> bool:
        """Whether its table has as many rows as the policy's."""
        return len(self.reads.weight) == self._backbone[0].vocab_size

    @torch.no_grad()
    def score(self, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B] of hard completions [B, T] with their prompts."""
        ids, mask = torch.cat([prompts.ids, ids], 1), torch.cat([prompts.mask, mask], 1)
        if self.shares_vocabulary:
            return self(self.reads.embed(ids), mask)
        with self._backbone[0].phase("reward"):
            parts = [
                self.model(input_ids=i.remainder(len(self.reads.weight)), attention_mask=m).logits
                for i, m in zip(ids.split(self.batch_rows), mask.split(self.batch_rows), strict=True)
            ]
            return self._value(torch.cat(parts))

    def forward(self, embeds: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B] of embeddings in its own table [B, L, D_R], padding moved to one side."""
        with self._backbone[0].phase("reward"), _quiet():
            order = mask.argsort(dim=1, stable=True)
            embeds = embeds.gather(1, order.unsqueeze(-1).expand_as(embeds))
            return self._value(self.model(inputs_embeds=embeds, attention_mask=mask.gather(1, order)).logits)

    def _value(self, logits: Tensor) -> Tensor:
        logits = logits.to(wide(logits.dtype))
        return logits[:, 0] if logits.shape[1] == 1 else logits.softmax(-1)[:, 0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' warning that a decoder sees no padding among embeddings: here it is all on the left."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


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
