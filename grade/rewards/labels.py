"""What a reward model learns from: 0 and 1, or any number; its loss and its held-out measure.

| labels | reward | loss | measure |
|---|---|---|---|
| ``binary`` | ``sigmoid(output)`` | log-loss | accuracy |
| ``number`` | ``mean + std * output`` | squared error of the standardised label | R2 |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from grade.errors import InputError
from grade.stats import jackknife_stderr

if TYPE_CHECKING:
    from grade.rewards.model import RewardModel


class LabelledText(Protocol):
    """A review as training needs it."""

    text: str
    label: float


def label_tensor(reviews: Sequence[LabelledText], model: RewardModel) -> Tensor:
    """Labels [n], of the kind that the model learns.

    Raises:
        InputError: For a label that is not 0 or 1, or with labels of any number one that is not a finite number.
    """
    fits, allowed = (_is_binary, "0 (negative) or 1 (positive)")
    if model.labels == "number":
        fits, allowed = (_is_number, "a finite number")
    for review in reviews:
        if not fits(review.label):
            raise InputError("label", review.label, allowed)
    return torch.tensor([float(r.label) for r in reviews], device=model.center.device, dtype=model.center.dtype)


def head_loss(model: RewardModel, outputs: Tensor, labels: Tensor) -> Tensor:
    """The loss of the head's outputs [...] for labels [...]."""
    if model.labels == "number":
        return F.mse_loss(outputs, (labels - model.label_mean) / model.label_std)
    return F.binary_cross_entropy_with_logits(outputs, labels)


def head_measure(model: RewardModel, outputs: Tensor, labels: Tensor) -> tuple[str, float]:
    """Accuracy or R2 of the head's outputs [n], with its name."""
    if model.labels == "number":
        return "r2", r2(model.rewards_of(outputs), labels)[0]
    return "accuracy", accuracy(outputs, labels)


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """Share of the log-odds [n] on the label's side."""
    return float(((logits > 0) == (labels > 0.5)).double().mean())


def r2(predicted: Tensor, labels: Tensor) -> tuple[float, float]:
    """``R2 = 1 - sum (y - f)^2 / sum (y - mean y)^2`` over n rows, and its jackknife standard error.

    Args:
        predicted: f [n].
        labels: y [n].

    Returns:
        R2 and its standard error.

    Raises:
        InputError: If it is not defined: fewer than three labels, or all equal (also without any one of them).

    >>> round(r2(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0]))[0], 6)  # 1 - 1 / 2
    0.5
    """
    predicted, labels = predicted.double(), labels.double()
    n, error, spread = len(labels), (labels - predicted).square(), (labels - labels.mean()).square()
    rest = spread.sum() - spread * (n / max(n - 1, 1))  # the sum of squares about the mean without each row
    if n < 3 or float(rest.min()) <= 1e-12 * float(spread.sum()):
        raise InputError("labels", f"{n} labels", "at least three for R2, of different values")
    without = 1 - (error.sum() - error) / rest
    return float(1 - error.sum() / spread.sum()), jackknife_stderr(without)


def calibration_error(score: Tensor, labels: Tensor, bins: int = 10) -> float:
    """Expected calibration error: ``sum_b (n_b / n) |mean score in b - share of positives in b|`` over equal bins.

    Args:
        score: Probabilities [n].
        labels: 0 or 1 [n].
        bins: Number of bins of equal width.

    Returns:
        A number in [0, 1]. Guo et al. 2017, arXiv:1706.04599, section 2, for a binary score.

    >>> calibration_error(torch.tensor([0.9, 0.9, 0.1, 0.1]), torch.tensor([1.0, 0.0, 0.0, 0.0]))  # (0.4 + 0.1) / 2
    0.25
    """
    which = (score * bins).long().clamp(0, bins - 1)
    gap = torch.zeros(bins, dtype=score.dtype, device=score.device).index_add(0, which, score - labels)
    return round(float(gap.abs().sum()) / len(score), 6)


def held_out_measures(model: RewardModel, outputs: Tensor, labels: Tensor) -> dict[str, float]:
    """Measures of the head's outputs [n] on held-out reviews.

    Returns:
        For binary labels ``accuracy`` with its standard error ``accuracy_stderr`` (binomial), ``log_loss`` in nats,
        ``mean_score`` and ``calibration_error``; for numbers ``r2``, ``r2_stderr`` (jackknife), ``rmse`` in units of
        the label and ``mean_score``.
    """
    score = model.rewards_of(outputs)
    if model.labels == "number":
        value, stderr = r2(score, labels)
        rmse = float(F.mse_loss(score, labels).sqrt())
        return {"r2": value, "r2_stderr": stderr, "rmse": rmse, "mean_score": float(score.mean())}
    share = accuracy(outputs, labels)
    return {
        "accuracy": share,
        "accuracy_stderr": math.sqrt(share * (1 - share) / len(labels)),
        "log_loss": float(head_loss(model, outputs, labels)),
        "mean_score": float(score.mean()),
        "calibration_error": calibration_error(score, labels),
    }


def _is_binary(label: object) -> bool:
    return label in (0, 1)


def _is_number(label: object) -> bool:
    return isinstance(label, (int, float)) and math.isfinite(label)
