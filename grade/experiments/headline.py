"""The headline figures of a profile: published, made again, and how far apart the two may be.

`FIGURES` names them once. `headline` is the small file that ``dvc exp show`` lists, `check` holds the figures in the
working folder against those of a git revision. Runs that train on another processor follow another course after the
first rounding, so trained figures have tolerances from their own standard errors; traced and counted ones none to
speak of.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from grade.errors import InputError
from grade.results import read_metrics

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Relative:
    """Within a share of the published figure."""

    share: float
    reason: str

    def allowed(self, published: float, metrics: Metrics) -> tuple[float, float]:
        """Least and largest value that passes."""
        return published - self.share * abs(published), published + self.share * abs(published)


@dataclass(frozen=True)
class StandardErrors:
    """Within some standard errors of the difference of two independent runs, ``factor * sqrt(2) * stderr``."""

    factor: float
    key: str
    reason: str

    def allowed(self, published: float, metrics: Metrics) -> tuple[float, float]:
        """Least and largest value that passes."""
        width = self.factor * math.sqrt(2) * metrics[self.key]
        return published - width, published + width


@dataclass(frozen=True)
class AtMost:
    """Below a bound, whatever was published."""

    bound: float
    reason: str

    def allowed(self, published: float, metrics: Metrics) -> tuple[float, float]:
        """Least and largest value that passes."""
        return -math.inf, self.bound


@dataclass(frozen=True)
class Figure:
    """A headline figure.

    Attributes:
        name: Short name, a column of ``dvc exp show``; empty for a figure that is only checked.
        label: What it is, for a reader.
        file: Metrics file below the profile's folder of results.
        key: Its name there.
        tolerance: How far a figure that is made again may be from the published one.
    """

    name: str
    label: str
    file: str
    key: str
    tolerance: Relative | StandardErrors | AtMost


_PROMPTS = "3 standard errors over prompts: rounding changes the course of training"
_SEEDS = "3 standard errors over seeds: rounding changes the course of training"
_TRACED = Relative(1e-3, "traced: the same operators give the same bytes")


def _gain(name: str, label: str, run: str, of: str = "reward") -> Figure:
    tolerance = StandardErrors(3, f"gain/{of}_stderr", _PROMPTS)
    return Figure(name, label, f"train/{run}-0/metrics.json", f"gain/{of}", tolerance)


FIGURES = (
    _gain("ste_gain", "ste, reward on the embeddings: gain in held-out reward", "ste"),
    _gain("ste_gold", "... gain by the gold judge", "ste", "gold"),
    Figure("ste_kl", "... KL to the reference, nats a token", "train/ste-0/metrics.json", "after/val/kl",
           StandardErrors(3, "after/val/kl_stderr", _PROMPTS)),
    _gain("gumbel_gain", "gumbel: gain in held-out reward", "gumbel"),
    _gain("trunk_gain", "ste through a deep transformer: gain in held-out reward", "ste_trunk"),
    Figure("replay_error", "replay, 2 hops: relative error of the gradient", "exp6/metrics.json",
           "parity/replay_rel_error_ste", AtMost(0.01, "the claim: within 1 % of the unrolled graph")),
    Figure("", "KL of the untrained policy, largest at any position", "exp6/metrics.json", "parity/kl_at_init_max",
           AtMost(1e-6, "exactly 0 but for float32 rounding")),
    Figure("exp4_gib", "Experiment 4's start: traced peak, GiB", "exp4/metrics.json", "exp4/legacy_fp32_peak_gib",
           _TRACED),
    Figure("replay_gib", "the same by replay, GiB", "exp4/metrics.json", "exp4/replay_peak_gib", _TRACED),
    Figure("", "traced against tracked peak, largest relative error", "memory/metrics.json", "cpu/max_rel_error",
           AtMost(0.02, "the tracer's claim: within 2 %")),
    Figure("", "kept by a pass of Qwen2.5-Coder-3B, GB", "caching/metrics.json", "caching/forward_kept_gb", _TRACED),
    Figure("", "Intuitor, 6K tokens, dense logits: traced peak, GB", "intuitor/metrics.json",
           "intuitor/peak_gb_6144_intuitor_dense_logits", _TRACED),
    Figure("", "entropy probe, step 0: predicted change, nats", "probe/metrics.json",
           "study/step0/x0.1/delta_h1_forward",
           StandardErrors(3, "study/step0/x0.1/delta_h1_forward_stderr", "3 standard errors over prompts")),
    Figure("", "entropy probe against enumeration: slope", "validation/metrics.json", "validation/slope_forward",
           Relative(0.02, "exact but for the step's size")),
    Figure("", "unbiased estimators, enumerated: worst bias in standard errors", "estimators/metrics.json",
           "bias/unbiased_worst_in_stderr", AtMost(4.0, "the largest of many normal deviates")),
    Figure("", "tiny model, ste: held-out reward", "compare/metrics.json", "final/ste/reward",
           StandardErrors(3, "final/ste/reward_stderr", _SEEDS)),
    Figure("", "tiny model, rloo: held-out reward", "compare/metrics.json", "final/rloo/reward",
           StandardErrors(3, "final/rloo/reward_stderr", _SEEDS)),
    Figure("", "reward model on the embeddings: accuracy at 128 tokens", "reward/backbone/bag/metrics.json",
           "accuracy_128", StandardErrors(2, "accuracy_128_stderr", "2 standard errors over reviews")),
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One line of the check.

    Attributes:
        figure: The figure.
        published: Its value in git.
        found: Its value in the working folder.
        low: The least value that passes.
        high: The largest.
    """

    figure: Figure
    published: float
    found: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        """Whether the figure is within its tolerance."""
        return self.low <= self.found <= self.high


def headline(outputs: str | Path) -> dict[str, float]:
    """The named figures of a folder of results; one whose file or key is missing there is left out.

    Args:
        outputs: A profile's folder of results.

    Returns:
        Short names to values.
    """
    values = {}
    for figure in FIGURES:
        path = Path(outputs) / figure.file
        if figure.name and path.is_file():
            value = read_metrics(path).get(figure.key)
            if value is not None:
                values[figure.name] = value
    return values


def check(outputs: str | Path, revision: str = "HEAD") -> list[Line]:
    """Hold the figures of a folder of results against those that a git revision publishes.

    Args:
        outputs: A profile's folder of results, relative to the working folder.
        revision: The git revision.

    Returns:
        A line for each figure that the revision has.

    Raises:
        InputError: If the revision has none of them, or the working folder lacks one that it has.
    """
    lines = []
    for figure in FIGURES:
        published = _published(f"{Path(outputs).as_posix()}/{figure.file}", revision)
        if figure.key not in published:
            continue
        found = read_metrics(Path(outputs) / figure.file).get(figure.key)
        if found is None:
            raise InputError(f"{figure.file}: figure", figure.key, "a figure that the file has")
        low, high = figure.tolerance.allowed(published[figure.key], published)
        lines.append(Line(figure, published[figure.key], found, low, high))
    if not lines:
        raise InputError("revision", revision, f"a git revision that has results in {outputs}")
    return lines


def as_text(lines: list[Line]) -> str:
    """The check as a table for a terminal, at most 120 columns wide, with the tolerances' reasons below.

    Args:
        lines: From `check`.

    Returns:
        Text that ends in a count of what holds.
    """
    reasons = list(dict.fromkeys(line.figure.tolerance.reason for line in lines))
    rows = [f"{'figure':<66}{'published':>10}{'yours':>10}  {'allowed':<20} why"]
    for line in lines:
        allowed = f"at most {line.high:.4g}" if line.low == -math.inf else f"{line.low:.4g} to {line.high:.4g}"
        why = f"[{reasons.index(line.figure.tolerance.reason) + 1}] {'ok' if line.holds else 'OUT'}"
        rows.append(f"{line.figure.label:<66}{line.published:>10.4g}{line.found:>10.4g}  {allowed:<20} {why}")
    rows += [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]
    held = sum(line.holds for line in lines)
    return "\n".join([*rows, f"{held} of {len(lines)} figures are within their tolerance"])


def _published(path: str, revision: str, show: Callable[..., subprocess.CompletedProcess] = subprocess.run) -> Metrics:
    done = show(["git", "show", f"{revision}:{path}"], capture_output=True, text=True)
    return _flat(json.loads(done.stdout)) if done.returncode == 0 else {}


def _flat(nested: Mapping, prefix: str = "") -> dict[str, float]:
    flat = {}
    for name, value in nested.items():
        flat |= _flat(value, f"{prefix}{name}/") if isinstance(value, dict) else {prefix + name: value}
    return flat
