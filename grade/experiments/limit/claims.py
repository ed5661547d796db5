"""Figures behind the verdicts on the GRADE paper (arXiv 2601.11574), whose claims are in ``claims.yaml``.

Its models and prompts are not ours, so figures are not compared, only what it concludes from them: who is better than
whom at equal samples, and at equal KL, which it does not report. Its code was read, not run, where a note says so.

**When a comparison of methods is decided.** From `MIN_SEEDS` seeds, by a paired t-test: confirmed or refuted for
p <= 0.01, no difference ("partly") for p >= 0.1. In between, or with fewer seeds, the verdict is "not testable", with
the figures in the note. A verdict must be the same when the comparison is run again. With two seeds the test has one
degree of freedom, and p depends on the accident of how near two differences are to each other: rounding that differs
between machines has moved it across 0.05 in both directions. With five seeds p still varies by a factor of several from
one choice of seeds to another, so a threshold needs a margin on both sides.

**When a gain is decided.** It is a mean over seeds against 0: from three of its standard errors with `MIN_SEEDS` seeds,
from ten with fewer, since a standard error from two runs is itself uncertain (one-sided p of 0.02 with five seeds, 0.03
with two).
"""

import statistics
from collections.abc import Mapping
from typing import Any

import pandas as pd

from grade.experiments.claims import Claim, judge
from grade.experiments.limit import paper
from grade.gradients.estimators import tau_at

MIN_SEEDS = 5
"""A comparison of methods from fewer seeds is not testable."""
SURE, NO_DIFFERENCE = 0.01, 0.1
"""Two methods differ for p up to the first, of a paired test over seeds, and show no difference from the second."""
STDERRS, STDERRS_FEW_SEEDS = 3, 10
"""Standard errors from which a gain counts, with `MIN_SEEDS` seeds and with fewer."""
_COMPARED = (("ste", "ppo"), ("ste", "reinforce"), ("ste", "gumbel"), ("gumbel", "ppo"), ("reinforce", "gumbel"))


def paper_claims(m: Mapping[str, float], level: float) -> list[Claim]:
    """A verdict on each conclusion of the paper; methods are compared at a KL of ``level`` nats per completion."""
    figures: dict[str, Any] = {**m, "level": level} | _paper()
    for a, b in _COMPARED:
        for name, column in (("samples", "gain"), ("kl", f"kl{level:g}")):
            figures |= _judged(f"{a} over {b}/{name}", *_comparison(m, a, b, column))
    figures |= _judged("ppo falls", *_gain(m, "ppo", -1)) | _judged("ste rises", *_gain(m, "ste", 1))
    for name in ("spread", "relative_variance"):
        figures[name.replace("_", " ")] = m[f"defects/{name}_reinforce"] / m[f"defects/{name}_ste"]
    late = m["defects/kl_late"] > 100 * m["defects/kl_aligned_max"]
    figures["late KL/verdict"] = "refuted" if late else "partly"
    figures["same reward/verdict"] = "refuted" if abs(m["defects/scope_difference"]) > 1e-3 else "partly"
    return judge("limit", figures)


def _difference_verdict(difference: float, seeds: int, p: float | None) -> tuple[str, str]:
    """Verdict on "a is better than b" by a paired t-test over seeds, and its reason; the module's head has the rule."""
    if seeds < MIN_SEEDS:
        return "not testable", f"{seeds} seeds, and a verdict needs {MIN_SEEDS}"
    if p is None or p >= NO_DIFFERENCE:
        return "partly", "these seeds show no difference"
    if p > SURE:
        return "not testable", f"p between {SURE:g} and {NO_DIFFERENCE:g}: another run may decide otherwise"
    return ("confirmed" if difference > 0 else "refuted"), ""


def _judged(name: str, figure: float | str, verdict: str, note: str) -> dict[str, float | str]:
    return {name: figure, f"{name}/verdict": verdict, f"{name}/note": note}


def _comparison(m: Mapping[str, float], a: str, b: str, column: str) -> tuple[float | str, str, str]:
    key, sign = f"paired/{a}_minus_{b}/{column}", 1.0
    if key not in m:
        key, sign = f"paired/{b}_minus_{a}/{column}", -1.0
    if key not in m:
        return "no figure", "not testable", "not both methods were run, or not both reached this KL with every seed"
    difference, n, p = sign * m[key], int(m[f"{key}_n"]), m.get(f"{key}_p")
    verdict, reason = _difference_verdict(difference, n, p)
    note = f"± {m.get(f'{key}_stderr', 0.0):.2g} over n={n} seeds, paired, p = {1.0 if p is None else p:.3g}"
    return difference, verdict, note + (f"; {reason}" if reason else "")


def _gain(m: Mapping[str, float], method: str, sign: int) -> tuple[float | str, str, str]:
    key = f"gain/{method}"
    if key not in m:
        return "no figure", "not testable", f"{method} was not run"
    stderr, n = m.get(f"{key}_stderr", 0.0), int(m[f"{key}_n"])
    if abs(m[key]) <= (STDERRS if n >= MIN_SEEDS else STDERRS_FEW_SEEDS) * stderr:
        verdict = "partly"
    else:
        verdict = "confirmed" if sign * m[key] > 0 else "refuted"
    return m[key], verdict, f"± {stderr:.2g} over n={n} seeds; untrained {m['untrained/reward']:.3f}"


def _paper() -> dict[str, Any]:
    """Arithmetic of the paper's own figures and code."""
    base, rewards = statistics.fmean(paper.FIRST_VALIDATION), pd.Series([0.888, 0.5, 0.5])
    coded, meant = (paper.gae_example(over_batch).tolist() for over_batch in (True, False))
    return {
        "gae over batch/first": coded[0], "gae over batch/last": coded[-1], "gae over time/first": meant[0],
        "gae over time/last": meant[-1], "whitened/close": paper.whitened([0.51, 0.50]),
        "whitened/far": paper.whitened([0.9, 0.1]), "last tau": tau_at(paper.STEPS, 2.0, 0.5, 2000),
        "batch": paper.BATCH, "prompts": paper.STEPS * paper.BATCH, "test samples": paper.TEST_N, "base": base,
        "first step": int(rewards.rolling(10, min_periods=1).mean().ge(0.8).idxmax()),
    } | {f"published gain/{method}": mean - base for method, (mean, _) in paper.TEST_MEANS.items()} | {
        f"z/{a} over {b}": paper.z_of_difference(a, b)
        for a, b in (("ste", "reinforce"), ("reinforce", "gumbel"), ("gumbel", "ppo"))
    }  # fmt: skip
