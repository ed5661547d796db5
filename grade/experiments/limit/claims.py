"""Verdicts on the GRADE paper (arXiv 2601.11574): its headline table point by point, and its defects.

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

from grade.experiments.claims import Claim
from grade.experiments.findings import as_claim
from grade.experiments.limit import paper
from grade.gradients.estimators import tau_at

MIN_SEEDS = 5
"""A comparison of methods from fewer seeds is not testable."""
SURE, NO_DIFFERENCE = 0.01, 0.1
"""Two methods differ for p up to the first, of a paired test over seeds, and show no difference from the second."""
STDERRS, STDERRS_FEW_SEEDS = 3, 10
"""Standard errors from which a gain counts, with `MIN_SEEDS` seeds and with fewer."""
_COMPARED = {
    ("ste", "ppo"): "GRADE-STE beats PPO, 0.763 to 0.510",
    ("ste", "reinforce"): "GRADE-STE beats REINFORCE, 0.763 to 0.617",
    ("ste", "gumbel"): "GRADE-STE beats GRADE, 0.763 to 0.590",
    ("gumbel", "ppo"): "GRADE beats PPO, 0.590 to 0.510",
    ("reinforce", "gumbel"): "REINFORCE beats GRADE, 0.617 to 0.590",
}


def paper_claims(m: Mapping[str, float], level: float) -> list[Claim]:
    """A verdict on each conclusion of the paper; methods are compared at a KL of ``level`` nats per completion."""
    rows: list[tuple[Any, ...]] = []
    for (a, b), words in _COMPARED.items():
        for where, column in (("equal samples and beta", "gain"), (f"a KL of {level:g} nats", f"kl{level:g}")):
            difference, verdict, note = _comparison(m, a, b, column)
            unit = "" if isinstance(difference, str) else "reward, difference of means"
            rows.append((f"{words}: at {where}", f"{a} > {b}", difference, unit, "measured", verdict, note))
    for words, stated, method, sign in (
        ("PPO ends below its start, 0.510 after 0.573", "falls", "ppo", -1),
        ("GRADE-STE learns the task", "rises", "ste", 1),
    ):
        gain, verdict, note = _gain(m, method, sign)
        unit = "" if isinstance(gain, str) else "reward, gain"
        rows.append((words, stated, gain, unit, "measured", verdict, note))
    return [as_claim("paper", *row) for row in (*rows, *_defects(m), *_arithmetic())]


def _defects(m: Mapping[str, float]) -> list[tuple[Any, ...]]:
    """What its code leaves out or does otherwise, measured on the untrained policy."""
    late, aligned = m["defects/kl_late"], m["defects/kl_aligned_max"]
    spread, noise = (
        m[f"defects/{name}_reinforce"] / m[f"defects/{name}_ste"] for name in ("spread", "relative_variance")
    )
    difference = m["defects/scope_difference"]
    return [
        ("the objective contains beta KL, beta = 0.1 (eq. 16)", "in the loss", m["defects/loss_plus_reward"],
         "loss + reward, one step with beta = 0", "measured", "refuted", "its logged loss is minus the reward at every "
         "step (read in its results), which here is what beta = 0 gives"),
        ("GRADE-STE's KL of 11 shows substantial updates", "4.9 to 11.1 nats", late,
         "nats per token, untrained policy, reference one position late", "measured",
         "refuted" if late > 100 * aligned else "partly",
         f"aligned it is {aligned:.1g} at most; its code logs 9.1 and 3.2 at step 0 (read)"),
        ("GRADE-STE's gradient variance is 14 times lower than REINFORCE's", "14.6", noise,
         "ratio of noise over signal, repeated gradients", "measured",
         "confirmed" if noise > 7 else "partly" if noise > 1 else "refuted",  # 7: within a factor of two, or more
         f"the paper's figure, the spread of one gradient's norms over parameters, gives {spread:.2g} here: it scales "
         "with the gradient and says nothing about noise"),
        ("all methods are trained on the same reward", "same", difference,
         "reward with the prompt minus without, same completions", "measured",
         "refuted" if abs(difference) > 1e-3 else "partly",
         "GRADE is scored without the prompt, PPO and REINFORCE with it, evaluation with it (read)"),
    ]  # fmt: skip


def _arithmetic() -> list[tuple[Any, ...]]:
    """Arithmetic of the paper's own figures and code."""
    coded, meant = (paper.gae_example(over_batch).tolist() for over_batch in (True, False))
    base = statistics.fmean(paper.FIRST_VALIDATION)
    gains = {method: f"{mean - base:+.2f}" for method, (mean, _) in paper.TEST_MEANS.items()}
    first = int(pd.Series([0.888, 0.5, 0.5]).rolling(10, min_periods=1).mean().ge(0.8).idxmax())
    z = [
        f"{paper.z_of_difference(*pair):.1f}"
        for pair in (("ste", "reinforce"), ("reinforce", "gumbel"), ("gumbel", "ppo"))
    ]
    rows = [
        ("PPO uses generalised advantage estimation", "over time", coded[0],
         "advantage of the first token, reward 1, V = 0.5, T = 8", f"its loop runs over the batch: {coded[0]:.3f} at "
         f"every token but the last, {coded[-1]:.3f} there; over time {meant[0]:.3f} to {meant[-1]:.3f}"),
        ("REINFORCE has a moving-average baseline", "0.9", paper.whitened([0.51, 0.50]),
         "advantage of the better of rewards 0.51 and 0.50", "whitening over a batch of two gives the same "
         f"{paper.whitened([0.9, 0.1]):.4f} for 0.9 and 0.1, and cancels any baseline; over a batch of one it is NaN"),
        ("tau is annealed from 2.0 to 0.5", "0.5", tau_at(paper.STEPS, 2.0, 0.5, 2000), "tau at the last step",
         "a ramp of 2000 steps, of which 250 were run; with straight-through tokens tau shapes the backward pass only"),
        ("the batch is 16 prompts", "16", paper.BATCH, "prompts a step",
         f"accumulation is a field that nothing reads: {paper.STEPS * paper.BATCH} prompts in all"),
        ("results are over a test set of 25,000", "25,000", paper.TEST_N, "samples", "read in its code; z of STE over "
         f"REINFORCE {z[0]}, of REINFORCE over GRADE {z[1]}, of GRADE over PPO {z[2]}, one seed each"),
        ("all methods improve on the base model", "not shown", base, "validation reward after one update",
         f"no untrained policy was evaluated; against this STE gains {gains['ste']}, REINFORCE {gains['reinforce']}, "
         f"GRADE {gains['gumbel']}, PPO {gains['ppo']}"),
        ("PPO reaches 0.8 after 0 steps", "0", str(first), "",
         "a moving average over one value: the first batch of two had 0.888 by chance"),
    ]  # fmt: skip
    return [(*row[:4], "derived", "refuted", row[4]) for row in rows]


def _difference_verdict(difference: float, seeds: int, p: float | None) -> tuple[str, str]:
    """Verdict on "a is better than b" by a paired t-test over seeds, and its reason; the module's head has the rule."""
    if seeds < MIN_SEEDS:
        return "not testable", f"{seeds} seeds, and a verdict needs {MIN_SEEDS}"
    if p is None or p >= NO_DIFFERENCE:
        return "partly", "these seeds show no difference"
    if p > SURE:
        return "not testable", f"p between {SURE:g} and {NO_DIFFERENCE:g}: another run may decide otherwise"
    return ("confirmed" if difference > 0 else "refuted"), ""


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
