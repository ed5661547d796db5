"""Rewards of a traced step: a head on the policy's base, or a Hugging Face sequence classifier.

A classifier is known by its configuration alone. Relaxed methods differentiate it through its own embedding table, for
which its vocabulary must be the policy's; a configuration tells only the size.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, get_args

from pydantic import AfterValidator
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

from grade.config import allowed_names
from grade.errors import InputError
from grade.gradients.methods import POLICY_GRADIENTS
from grade.models.backbone import Backbone
from grade.rewards.model import HeadSettings, RewardKind, RewardModel

PREFIX = "hf:"


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
    from grade.memory.classifier import Classifier  # here: few steps have one

    reward, context = Classifier(spec, classifier_config(spec), backbone), reward_context(spec)
    rows = len(reward.reads.weight)
    if relaxed and not reward.shares_vocabulary:
        allowed = f"a classifier with the policy's vocabulary of {backbone.vocab_size} tokens, not {rows}: {relaxed}"
        raise InputError("reward", spec, f"{allowed} needs its gradient ({', '.join(POLICY_GRADIENTS)} take any)")
    if context and length > context:
        raise InputError("prompt_tokens + max_new_tokens", length, f"at most {context} (the reward's context)")
    return reward


def reward_context(spec: str) -> int | None:
    """Tokens that a reward of its own can read; None if there is no limit but the policy's."""
    if not spec.startswith(PREFIX):
        return None
    return getattr(classifier_config(spec).get_text_config(), "max_position_embeddings", None)


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
