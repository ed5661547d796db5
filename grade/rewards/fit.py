"""Training and evaluation of reward models on labelled reviews.

Training texts are beginnings of reviews of random length, so that one model is calibrated from a few words to
``max_tokens``. The base is causal, so one pass gives the masked mean at *every* prefix: the means at a few prefix
lengths are kept (n * lengths * D numbers), and training a head on them takes seconds.

A review's label is 0 or 1, or any number:

| labels | reward | loss | measure |
|---|---|---|---|
| ``binary`` | ``sigmoid(output)`` | log-loss | accuracy |
| ``number`` | ``mean + std * output`` | squared error of the standardised label | R2 |

Early stopping is on the validation loss averaged over `eval_tokens`; the best epoch's weights are kept.
`sklearn.metrics` gives neither the measures' standard errors nor a calibration error, so they are written here.

Left out: the bag-of-words baseline that the accuracies are compared with (`grade.rewards.gold`), and training of
the base.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor

from grade.config import SEEDS, Config
from grade.errors import InputError
from grade.models.prompts import padded
from grade.results import progress
from grade.rewards.model import HeadSettings, Labels, RewardKind, RewardModel
from grade.stats import jackknife_stderr

if TYPE_CHECKING:
    from grade.models.backbone import Backbone


FEATURE_BATCH = 32
"""Reviews in one pass through the base."""


class LabelledText(Protocol):
    """A review as training needs it."""

    text: str
    label: float


class FitSettings(HeadSettings):
    """Training settings of one kind of reward model."""

    lr: float = Field(1e-3, gt=0, le=1e30, description="AdamW learning rate")
    weight_decay: float = Field(0.1, ge=0, description="AdamW weight decay")
    batch_size: int = Field(64, ge=1, description="reviews per update")
    epochs: int = Field(60, ge=1, description="maximum number of passes over the reviews")
    patience: int = Field(10, ge=1, description="epochs without a better validation log-loss before stopping")
    train_size: int = Field(5000, ge=2, description="reviews to train on (the first ones)")
    validation_size: int = Field(2000, ge=2, description="reviews for early stopping (the first ones)")
    min_tokens: int = Field(16, ge=1, description="shortest training crop")
    max_tokens: int = Field(128, ge=1, description="longest training crop, and how much of a review is read")
    eval_size: int = Field(2000, ge=2, description="held-out reviews for the reported accuracy")


class BagSettings(FitSettings):
    """`FitSettings` with the defaults of `bag`."""

    batch_size: int = Field(256, ge=1, description="reviews per update")
    min_tokens: int = Field(24, ge=1, description="shortest training crop")
    max_tokens: int = Field(256, ge=1, description="longest training crop, and how much of a review is read")


class TrunkSettings(FitSettings):
    """`FitSettings` with the defaults of `trunk`."""

    hidden: int = Field(64, ge=0, description="width of the MLP's Tanh layer; 0 = a linear head")
    dropout: float = Field(0.7, ge=0, lt=1, description="dropout on the pooled vector, in training only")


class RewardConfig(Config):
    """Settings of both kinds of reward model."""

    bag: BagSettings = Field(BagSettings(), description="reward on the embedding table")
    trunk: TrunkSettings = Field(TrunkSettings(), description="reward on the frozen transformer")
    eval_tokens: list[PositiveInt] = Field(
        [32, 64, 128], min_length=1, description="prefix lengths to report accuracy at"
    )
    labels: Labels = Field("binary", description="binary: 0 and 1; number: any numbers (regression, squared error)")
    seed: int = Field(0, ge=0, lt=SEEDS, description="seed of initialisation, dropout, order and crops")


def train_reward(
    kind: RewardKind,
    config: RewardConfig,
    backbone: Backbone,
    train: Sequence[LabelledText],
    validation: Sequence[LabelledText],
) -> tuple[RewardModel, dict[str, float]]:
    """Train one reward model of a kind on reviews, and stop early by the loss on others.

    Returns the frozen model and a report of its training: sizes, epochs, loss and accuracy (or R2) on the validation
    reviews (optimistic: they chose the epoch), seconds for features and for the head.
    """
    settings: FitSettings = getattr(config, kind)
    if settings.min_tokens > settings.max_tokens:
        raise InputError(f"{kind}.min_tokens", settings.min_tokens, f"at most max_tokens ({settings.max_tokens})")
    train, validation = train[: settings.train_size], validation[: settings.validation_size]
    generator = torch.Generator().manual_seed(config.seed)
    # Initialisation and dropout draw from the global state, which belongs to the caller.
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        model = RewardModel(kind, backbone, settings, config.labels)
        start, most = time.perf_counter(), settings.max_tokens
        features = _prefix_means(model, encode(backbone, train, most), _prefix_lengths(settings.min_tokens, most))
        # Validation is cut like training: a longer prefix would cost a longer pass.
        held_lengths = sorted({min(n, most) for n in config.eval_tokens})
        held_features = _prefix_means(model, encode(backbone, validation, most), held_lengths)
        model.standardise(features.flatten(0, 1).mean(0), features.flatten(0, 1).std(0))
        featured = time.perf_counter()
        labels, held_labels = _label_tensor(train, model), _label_tensor(validation, model)
        model.standardise_labels(labels)
        report = _fit(model, settings, features, labels, held_features, held_labels, generator)
    report |= {
        "train_n": len(train),
        "validation_n": len(validation),
        "feature_seconds": featured - start,
        "fit_seconds": time.perf_counter() - featured,
    }
    return model.requires_grad_(False), report


def evaluate_reward(
    model: RewardModel, reviews: Sequence[LabelledText], lengths: Sequence[int] = (32, 64, 128)
) -> dict[str, float]:
    """``n`` held-out reviews, and the measures of `_measures` on their first tokens, for each number of ``lengths``.

    The length L is part of a measure's name, as in ``accuracy_L`` and ``accuracy_L_stderr``.
    """
    labels = _label_tensor(reviews, model)
    features = _prefix_means(model, encode(model.backbone, reviews, max(lengths)), lengths)
    logits = model.pooled_logits(features)
    report: dict[str, float] = {"n": len(reviews)}
    for column, length in zip(logits.T, lengths, strict=True):
        for name, value in _measures(model, column, labels).items():
            measure, error, _ = name.partition("_stderr")
            report[f"{measure}_{length}{error}"] = value
    return report


def encode(backbone: Backbone, reviews: Sequence[LabelledText], max_tokens: int) -> list[list[int]]:
    """Token ids of each review, cut to ``max_tokens``."""
    return backbone.tokenizer([r.text for r in reviews], truncation=True, max_length=max_tokens)["input_ids"]


@torch.no_grad()
def _prefix_means(model: RewardModel, sequences: Sequence[Sequence[int]], lengths: Sequence[int]) -> Tensor:
    """Pooled features [n, lengths, D] of the first tokens of each sequence."""
    parts = []
    for start in progress(range(0, len(sequences), FEATURE_BATCH), "texts read"):
        batch = [s[: max(lengths)] for s in sequences[start : start + FEATURE_BATCH]]
        ids, mask = padded(batch, device=model.backbone.device)
        tokens = model.token_features(model.backbone.embed(ids), mask)
        parts.append(torch.stack([model.mean_pool(tokens[:, :n], mask[:, :n]) for n in lengths], 1))
    features = torch.cat(parts)
    if not torch.isfinite(features).all():
        allowed = "texts with tokens, and a base with finite values (try float32)"
        raise InputError(f"{model.kind} reward features", "NaN or infinity", allowed)
    return features


def _prefix_lengths(shortest: int, longest: int) -> list[int]:
    """Prefix lengths from ``shortest`` to ``longest``, each about 1.4 times the one before.

    >>> _prefix_lengths(16, 128)
    [16, 23, 32, 45, 64, 91, 128]
    """
    steps = max(1, round(2 * math.log2(longest / shortest))) if longest > shortest else 0
    return [round(shortest * (longest / shortest) ** (i / steps)) for i in range(steps)] + [longest]


def _fit(
    model: RewardModel, settings: FitSettings, features: Tensor, labels: Tensor, held_features: Tensor,
    held_labels: Tensor, generator: torch.Generator,
) -> dict[str, float]:  # fmt: skip
    """Minimise the loss at random prefixes with AdamW; leave the model with its best weights, in eval mode."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)
    held_out = "validation_mse" if model.labels == "number" else "validation_log_loss"
    best: dict[str, Any] = {held_out: math.inf}
    weights: dict[str, Tensor] = {}
    for epoch in range(1, settings.epochs + 1):
        model.train()
        for rows in torch.randperm(len(labels), generator=generator).split(settings.batch_size):
            prefix = torch.randint(features.shape[1], (len(rows),), generator=generator)
            loss = _loss(model, model.pooled_logits(features[rows, prefix]), labels[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            logits = model.pooled_logits(held_features)  # [n, lengths]
        loss = float(_loss(model, logits, held_labels[:, None].expand_as(logits)))
        if loss < best[held_out]:
            name, measure = next(iter(_measures(model, logits[:, -1], held_labels).items()))
            best = {"best_epoch": epoch, held_out: loss, f"validation_{name}": measure}
            weights = {k: v.clone() for k, v in model.state_dict().items()}
        elif epoch - best.get("best_epoch", 0) >= settings.patience:
            break
    if not weights:
        allowed = "a finite validation loss: labels that differ, a smaller lr"
        raise InputError(f"{model.kind} reward loss", loss, allowed)
    model.load_state_dict(weights)
    return best | {"epochs": epoch}


def _label_tensor(reviews: Sequence[LabelledText], model: RewardModel) -> Tensor:
    """Labels [n], of the kind that the model learns."""
    if model.labels == "binary" and (others := {r.label for r in reviews} - {0, 1}):
        raise InputError("label", others.pop(), "0 (negative) or 1 (positive)")
    return torch.tensor([float(r.label) for r in reviews], device=model.center.device, dtype=model.center.dtype)


def _loss(model: RewardModel, outputs: Tensor, labels: Tensor) -> Tensor:
    """The loss of the head's outputs [...] for labels [...]."""
    if model.labels == "number":
        return F.mse_loss(outputs, (labels - model.label_mean) / model.label_std)
    return F.binary_cross_entropy_with_logits(outputs, labels)


def _measures(model: RewardModel, outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Measures of the head's outputs [n].

    For binary labels ``accuracy`` with its binomial standard error, ``log_loss`` in nats, ``mean_score`` and
    ``calibration_error``; for numbers ``r2`` with its jackknife standard error, ``rmse`` in units of the label and
    ``mean_score``.
    """
    score = model.rewards_of(outputs)
    if model.labels == "number":
        value, stderr = r2(score, labels)
        rmse = float(F.mse_loss(score, labels).sqrt())
        return {"r2": value, "r2_stderr": stderr, "rmse": rmse, "mean_score": float(score.mean())}
    share = float(((outputs > 0) == (labels > 0.5)).double().mean())
    return {
        "accuracy": share,
        "accuracy_stderr": math.sqrt(share * (1 - share) / len(labels)),
        "log_loss": float(_loss(model, outputs, labels)),
        "mean_score": float(score.mean()),
        "calibration_error": _calibration_error(score, labels),
    }


def r2(predicted: Tensor, labels: Tensor) -> tuple[float, float]:
    """``R2 = 1 - sum (y - f)^2 / sum (y - mean y)^2`` over n rows, and its jackknife standard error.

    >>> round(r2(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0]))[0], 6)  # 1 - 1 / 2
    0.5
    """
    predicted, labels = predicted.double(), labels.double()
    n, error, spread = len(labels), (labels - predicted).square(), (labels - labels.mean()).square()
    rest = spread.sum() - spread * (n / (n - 1))  # the sum of squares about the mean without each row
    without = 1 - (error.sum() - error) / rest
    return float(1 - error.sum() / spread.sum()), jackknife_stderr(without)


def _calibration_error(score: Tensor, labels: Tensor, bins: int = 10) -> float:
    """Expected calibration error: ``sum_b (n_b / n) |mean score in b - share of positives in b|`` over equal bins.

    Scores are probabilities [n], labels 0 or 1 [n]. Guo et al. 2017, arXiv:1706.04599, section 2, for a binary score.

    >>> _calibration_error(torch.tensor([0.9, 0.9, 0.1, 0.1]), torch.tensor([1.0, 0.0, 0.0, 0.0]))  # (0.4 + 0.1) / 2
    0.25
    """
    which = (score * bins).long().clamp(0, bins - 1)
    gap = torch.zeros(bins, dtype=score.dtype, device=score.device).index_add(0, which, score - labels)
    return round(float(gap.abs().sum()) / len(score), 6)
