"""Reward models on the frozen base: embeddings in, P(positive) or a number out, differentiable in the embeddings.

Two kinds behind one interface:

- ``trunk``, the source documents' own: frozen transformer (adapter off), masked mean of the last hidden state, then
  Linear-Tanh-Linear;
- ``bag``: no transformer, only the frozen embedding table: masked mean of the standardised embeddings, then linear
  (or Linear-Tanh-Linear). Nearly free to run, and linear in each embedding up to the sigmoid, so the gradient at one
  token says what another token would score.

The documents' head has two outputs and a softmax; one output and a sigmoid is the same function. Pooled vectors are
standardised with constants of the training set, kept as buffers. A base in float64 is pooled and scored in float64,
any other in float32.

Left out: training (`grade.rewards.fit`), and reward models with a base of their own (`grade.rewards.classifier`).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from grade.config import Config
from grade.errors import InputError
from grade.files import atomic, read_json, write_json
from grade.models.parameters import fingerprint, same_base

if TYPE_CHECKING:
    from grade.models.backbone import Backbone

RewardKind = Literal["bag", "trunk"]
Labels = Literal["binary", "number"]
_WEIGHTS, _CONFIG = "reward.safetensors", "reward.json"


class HeadSettings(Config):
    """Sizes of the head that is trained on top of the frozen base."""

    hidden: int = Field(0, ge=0, description="width of the MLP's Tanh layer; 0 = a linear head")
    dropout: float = Field(0.3, ge=0, lt=1, description="dropout on the pooled vector, in training only")


class RewardModel(nn.Module):
    """``R = sigmoid(head(pool(embeds)))``, the probability of a positive review.

    With labels of any number ``R = mean + std * head(pool(embeds))``, mean and deviation of the training labels.

    The backbone is neither trained nor copied: its parameters are not among this module's, and no gradient reaches
    them. Embeddings are those that the base's layers receive (`Backbone.embed`), with any embedding scale applied.

    Args:
        kind: ``bag`` or ``trunk``.
        backbone: The frozen base.
        settings: Sizes of the head.
        labels: ``binary`` or ``number``: what it learns, and so what it gives.

    Raises:
        InputError: For an unknown kind or unknown labels.
    """

    def __init__(self, kind: RewardKind, backbone: Backbone, settings: HeadSettings, labels: Labels = "binary") -> None:
        super().__init__()
        for name, value, known in (("kind", kind, RewardKind), ("labels", labels, Labels)):
            if value not in get_args(known):
                raise InputError(name, value, " or ".join(get_args(known)))
        self.kind, self.settings, self.labels = kind, settings, labels
        # In a tuple, so that the backbone does not become a submodule: its weights are not this model's.
        self._backbone = (backbone,)
        size = backbone.hidden_size
        self.register_buffer("center", torch.zeros(size))
        self.register_buffer("spread", torch.ones(size))
        if labels == "number":
            self.register_buffer("label_mean", torch.zeros(()))
            self.register_buffer("label_std", torch.ones(()))
        layers: list[nn.Module] = [nn.Dropout(settings.dropout)]
        if settings.hidden:
            layers += [nn.Linear(size, settings.hidden), nn.Tanh(), nn.Dropout(settings.dropout)]
            size = settings.hidden
        self.head = nn.Sequential(*layers, nn.Linear(size, 1))
        self.to(device=backbone.device, dtype=torch.promote_types(backbone.dtype, torch.float32))
        self.eval()

    @property
    def backbone(self) -> Backbone:
        """The frozen base."""
        return self._backbone[0]

    def forward(self, embeds: Tensor, mask: Tensor) -> Tensor:
        """Rewards of sequences of embeddings.

        Args:
            embeds: [B, L, D], of token ids or soft tokens.
            mask: [B, L], 0 at padding, anywhere; padding does not change the reward.

        Returns:
            [B], in (0, 1) for binary labels, float32 (float64 for a float64 base); NaN for a sequence without any
            token.
        """
        return self.rewards_of(self.logits(embeds, mask))

    def rewards_of(self, outputs: Tensor) -> Tensor:
        """Rewards of the head's outputs [...]."""
        return self.label_mean + self.label_std * outputs if self.labels == "number" else outputs.sigmoid()

    def logits(self, embeds: Tensor, mask: Tensor) -> Tensor:
        """The head's outputs [B], for binary labels log-odds of a positive review; arguments as in `forward`."""
        return self.pooled_logits(self.mean_pool(self.token_features(embeds, mask), mask))

    def pooled_logits(self, pooled: Tensor) -> Tensor:
        """The head's outputs [B] for pooled vectors [B, D] from `mean_pool`."""
        return self.head((pooled.to(self.center.dtype) - self.center) / self.spread).squeeze(-1)

    @torch.no_grad()
    def score_ids(self, ids: Tensor, mask: Tensor, batch_size: int = 64) -> Tensor:
        """Rewards [B] of token ids [B, L], without gradient, ``batch_size`` sequences at a time."""
        parts = zip(ids.split(batch_size), mask.split(batch_size), strict=True)
        return torch.cat([self(self.backbone.embed(i), m) for i, m in parts])

    def token_features(self, embeds: Tensor, mask: Tensor) -> Tensor:
        """Features to average [B, L, D]: the embeddings (bag) or the frozen base's last hidden states (trunk).

        The adapter is always off here. Checkpointed layers would be recomputed in backward with the adapter on: call
        this outside `Backbone.checkpointed_layers`.
        """
        if self.kind == "bag":
            return embeds
        with self.backbone.bare():
            return self.backbone.hidden(embeds.to(self.backbone.dtype), mask)

    def mean_pool(self, features: Tensor, mask: Tensor) -> Tensor:
        """Masked mean [B, D] of features [B, L, D].

        Features where the mask is 0 may be NaN. A row whose mask is all 0 gives NaN: to check that here would make
        every step wait for the data.
        """
        kept = mask.bool()
        count = kept.sum(1, keepdim=True)
        # In float32 or wider: a mean over many positions loses digits in bfloat16.
        return features.to(self.center.dtype).masked_fill(~kept.unsqueeze(-1), 0).sum(1) / count

    def standardise(self, mean: Tensor, std: Tensor) -> None:
        """Set the constants [D] by which pooled vectors are standardised."""
        self.center.copy_(mean)
        self.spread.copy_(std.clamp_min(1e-6 * float(std.mean()) + torch.finfo(std.dtype).tiny))

    def standardise_labels(self, labels: Tensor) -> None:
        """Set mean and deviation of labels [n] of any number; binary ones have none."""
        if self.labels == "number":
            self.label_mean.copy_(labels.mean())
            self.label_std.copy_(labels.std())

    def save(self, folder: str | Path) -> None:
        """Write ``reward.safetensors`` and ``reward.json`` (kind, sizes, and a fingerprint of the weights it reads)."""
        folder = Path(folder)
        sizes = self.settings.model_dump(include=set(HeadSettings.model_fields))
        about = {"kind": self.kind, "settings": sizes, "base": _identity(self.backbone, self.kind)}
        if self.labels != "binary":
            about["labels"] = self.labels
        with atomic(folder / _WEIGHTS) as staging:
            save_file({k: v.detach().cpu().contiguous() for k, v in self.state_dict().items()}, staging)
        write_json(folder / _CONFIG, about, 2, sort_keys=True)


def load_reward(folder: str | Path, backbone: Backbone) -> RewardModel:
    """Load a saved reward model onto the base that it was trained on.

    Args:
        folder: Written by `RewardModel.save`.
        backbone: The base in use.

    Returns:
        The model, frozen.

    Raises:
        InputError: If the base has another vocabulary, width, tokenizer or weights.
    """
    folder = Path(folder)
    about = read_json(folder / _CONFIG)
    settings = HeadSettings.parse(about["settings"], _CONFIG)
    model = RewardModel(about["kind"], backbone, settings, about.get("labels", "binary"))
    _check_same_base(about["base"], _identity(backbone, model.kind))
    model.load_state_dict(load_file(folder / _WEIGHTS))
    return model.requires_grad_(False)


def _identity(backbone: Backbone, kind: RewardKind) -> dict[str, Any]:
    """What tells bases apart: sizes, the tokenizer's (token, id) pairs, and the weights that the kind reads."""
    tokenizer = None
    if backbone.tokenizer is not None:
        pairs = json.dumps(sorted(backbone.tokenizer.get_vocab().items()), ensure_ascii=True)
        tokenizer = hashlib.sha256(pairs.encode("ascii")).hexdigest()
    return {
        "vocab_size": backbone.vocab_size,
        "hidden_size": backbone.hidden_size,
        "tokenizer": tokenizer,
        "fingerprint": fingerprint(backbone.embedding if kind == "bag" else backbone.decoder),
    }


def _check_same_base(trained_on: dict[str, Any], here: dict[str, Any]) -> None:
    why = "a reward model reads the policy's own embeddings, so tokenizer and base must be the ones it was trained on"
    for key in ("hidden_size", "vocab_size", "tokenizer"):
        if trained_on[key] != here[key]:
            raise InputError(f"reward model: {key} of the base", here[key], f"{trained_on[key]!r} ({why})")
    if not same_base(trained_on["fingerprint"], here["fingerprint"]):
        allowed = "that of the base that the reward model was trained on: same sizes, but other weights"
        shown = {name: digest[:8] for name, digest in here["fingerprint"].items()}
        raise InputError("reward model: fingerprint of the base", shown, allowed)
