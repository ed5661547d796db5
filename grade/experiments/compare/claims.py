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

from __future__ import annotations

import math
from collections.abc import Mapping

from grade.errors import InputError
from grade.experiments.claims import NO_DIFFERENCE, SURE, Claim
from grade.experiments.compare import paper
from grade.gradients.estimators import tau_at

MIN_SEEDS = 5
"""A comparison of methods from fewer seeds is not testable."""
STDERRS, STDERRS_FEW_SEEDS = 3, 10
"""Standard errors from which a gain counts, with `MIN_SEEDS` seeds and with fewer."""

NEEDED = ("defects/kl_aligned_max", "defects/kl_late", "defects/scope_difference", "defects/spread_ste",
          "defects/spread_reinforce", "defects/relative_variance_ste", "defects/relative_variance_reinforce",
          "defects/loss_plus_reward", "untrained/reward")  # fmt: skip
"""Metrics that every run of the comparison has."""

_CONCLUSIONS = (
    ("ste", "ppo", "GRADE-STE beats PPO, 0.763 to 0.510"),
    ("ste", "reinforce", "GRADE-STE beats REINFORCE, 0.763 to 0.617"),
    ("ste", "gumbel", "GRADE-STE beats GRADE, 0.763 to 0.590"),
    ("gumbel", "ppo", "GRADE beats PPO, 0.590 to 0.510"),
    ("reinforce", "gumbel", "REINFORCE beats GRADE, 0.617 to 0.590"),
)


def compare_claims(m: Mapping[str, float], level: float) -> list[Claim]:
    """A verdict on each conclusion of the paper that can be computed.

    Args:
        m: Figures of ``outputs/compare/metrics.json``. Comparisons of methods that were not run are not testable.
        level: KL in nats a completion at which methods are compared.

    Returns:
        The claims.

    Raises:
        InputError: If a figure is missing.
    """
    missing = [key for key in NEEDED if key not in m]
    if missing:
        raise InputError("metrics", f"without {', '.join(missing)}", "all of grade.experiments.compare.claims.NEEDED")
    return [*_headline(m, level), *_measured_defects(m), *_arithmetic_defects(), *_reporting_defects()]


def difference_verdict(difference: float, seeds: int, p: float | None) -> tuple[str, str]:
    """Verdict on "a is better than b" from a paired t-test over seeds; the module's head says the rule.

    Args:
        difference: Mean of a minus b.
        seeds: How many.
        p: Two-sided p; None where the differences do not vary.

    Returns:
        The verdict and its reason, empty where the figures say it all.

    >>> difference_verdict(0.1, 5, 0.001), difference_verdict(-0.1, 5, 0.001)
    (('confirmed', ''), ('refuted', ''))
    >>> difference_verdict(0.1, 2, 0.001)
    ('not testable', '2 seeds, and a verdict needs 5')
    >>> difference_verdict(0.1, 5, 0.04)
    ('not testable', 'p between 0.01 and 0.1: another run may decide otherwise')
    >>> difference_verdict(0.1, 5, 0.4)
    ('partly', 'these seeds show no difference')
    """
    if seeds < MIN_SEEDS:
        return "not testable", f"{seeds} seeds, and a verdict needs {MIN_SEEDS}"
    if p is None or p >= NO_DIFFERENCE:
        return "partly", "these seeds show no difference"
    if p > SURE:
        return "not testable", f"p between {SURE:g} and {NO_DIFFERENCE:g}: another run may decide otherwise"
    return ("confirmed" if difference > 0 else "refuted"), ""


def gain_verdict(gain: float, stderr: float, seeds: int) -> str:
    """Verdict on "the reward rises" from its mean over seeds; the module's head says the rule.

    >>> gain_verdict(0.1, 0.03, 5), gain_verdict(0.1, 0.03, 2), gain_verdict(-0.1, 0.001, 2)
    ('confirmed', 'partly', 'refuted')
    """
    reach = (STDERRS if seeds >= MIN_SEEDS else STDERRS_FEW_SEEDS) * stderr
    if abs(gain) <= reach:
        return "partly"
    return "confirmed" if gain > 0 else "refuted"


def _headline(m: Mapping[str, float], level: float) -> list[Claim]:
    names = {"gain": "at equal samples and beta", f"kl{level:g}": f"at a KL of {level:g} nats"}
    return [
        *(_comparison(m, a, b, name, f"{words}: {where}") for a, b, words in _CONCLUSIONS
          for name, where in names.items()),
        _gain(m, "ppo", "PPO ends below its start, 0.510 after 0.573", sign=-1),
        _gain(m, "ste", "GRADE-STE learns the task", sign=1),
    ]  # fmt: skip


def _comparison(m: Mapping[str, float], a: str, b: str, name: str, words: str) -> Claim:
    key, sign = f"paired/{a}_minus_{b}/{name}", 1.0
    if key not in m:
        key, sign = f"paired/{b}_minus_{a}/{name}", -1.0
    common = dict(seed="paper", claim=words, stated=f"{a} > {b}", how="measured")
    if key not in m:
        note = "not both methods were run, or not both reached this KL with every seed"
        return Claim(**common, found="no figure", unit="", verdict="not testable", note=note)
    difference, n, p = sign * m[key], int(m[f"{key}_n"]), m.get(f"{key}_p")
    verdict, reason = difference_verdict(difference, n, p)
    note = f"± {m.get(f'{key}_stderr', 0.0):.2g} over n={n} seeds, paired, p = {1.0 if p is None else p:.3g}"
    note += f"; {reason}" if reason else ""
    return Claim(**common, found=difference, unit="reward, difference of means", verdict=verdict, note=note)


def _gain(m: Mapping[str, float], method: str, words: str, sign: int) -> Claim:
    key = f"gain/{method}"
    common = dict(seed="paper", claim=words, how="measured")
    if key not in m:
        return Claim(**common, stated="", found="no figure", unit="", verdict="not testable",
                     note=f"{method} was not run")  # fmt: skip
    stderr, n = m.get(f"{key}_stderr", 0.0), int(m[f"{key}_n"])
    return Claim(
        **common, stated="rises" if sign > 0 else "falls", found=m[key], unit="reward, gain",
        verdict=gain_verdict(sign * m[key], stderr, n),
        note=f"± {stderr:.2g} over n={n} seeds; untrained {m['untrained/reward']:.3f}",
    )  # fmt: skip


def _variance_verdict(ratio: float) -> str:
    """On "14 times lower": within a factor of two or more, lower, or not lower."""
    if ratio > 7:
        return "confirmed"
    return "partly" if ratio > 1 else "refuted"


def _measured_defects(m: Mapping[str, float]) -> list[Claim]:
    spread = m["defects/spread_reinforce"] / m["defects/spread_ste"]
    ratio = m["defects/relative_variance_reinforce"] / m["defects/relative_variance_ste"]
    late, aligned, scope = m["defects/kl_late"], m["defects/kl_aligned_max"], m["defects/scope_difference"]
    return [
        Claim(
            seed="paper", claim="the objective contains beta KL, beta = 0.1 (eq. 16)", stated="in the loss",
            found=m["defects/loss_plus_reward"], unit="loss + reward, one step with beta = 0", how="measured",
            verdict="refuted",
            note="its logged loss is minus the reward at every step (read in its results), which here is what beta = 0 "
            "gives",
        ),
        Claim(
            seed="paper", claim="GRADE-STE's KL of 11 shows substantial updates", stated="4.9 to 11.1 nats",
            found=late, unit="nats a token, untrained policy, reference one position late", how="measured",
            verdict="refuted" if late > 100 * aligned else "partly",
            note=f"aligned it is {aligned:.1g} at most; its code logs 9.1 and 3.2 at step 0 (read)",
        ),
        Claim(
            seed="paper", claim="GRADE-STE's gradient variance is 14 times lower than REINFORCE's", stated="14.6",
            found=ratio, unit="ratio of noise over signal, repeated gradients", how="measured",
            verdict=_variance_verdict(ratio),
            note=f"the paper's figure, the spread of one gradient's norms over parameters, gives {spread:.2g} here: it "
            "scales with the gradient and says nothing about noise",
        ),
        Claim(
            seed="paper", claim="all methods are trained on the same reward", stated="same", found=scope,
            unit="reward with the prompt minus without, same completions", how="measured",
            verdict="refuted" if abs(scope) > 1e-3 else "partly",
            note="GRADE is scored without the prompt, PPO and REINFORCE with it, evaluation with it (read)",
        ),
    ]  # fmt: skip


def _arithmetic_defects() -> list[Claim]:
    coded, meant = (paper.gae_example(over_batch) for over_batch in (True, False))
    close, far = paper.whitened([0.51, 0.50])[0], paper.whitened([0.9, 0.1])[0]
    return [
        Claim(
            seed="paper", claim="PPO uses generalised advantage estimation", stated="over time",
            found=float(coded[0]), unit="advantage of the first token, reward 1, V = 0.5, T = 8", how="derived",
            verdict="refuted",
            note=f"its loop runs over the batch: {float(coded[0]):.3f} at every token but the last, "
            f"{float(coded[-1]):.3f} there; over time {float(meant[0]):.3f} to {float(meant[-1]):.3f}",
        ),
        Claim(
            seed="paper", claim="REINFORCE has a moving-average baseline", stated="0.9", found=close,
            unit="advantage of the better of rewards 0.51 and 0.50", how="derived", verdict="refuted",
            note=f"whitening over a batch of two gives the same {far:.4f} for 0.9 and 0.1, and cancels any baseline; "
            "over a batch of one it is NaN",
        ),
        Claim(
            seed="paper", claim="tau is annealed from 2.0 to 0.5", stated="0.5",
            found=tau_at(paper.STEPS, 2.0, 0.5, 2000), unit="tau at the last step", how="derived", verdict="refuted",
            note="a ramp of 2000 steps, of which 250 were run; with straight-through tokens tau shapes the backward "
            "pass only",
        ),
    ]  # fmt: skip


def _reporting_defects() -> list[Claim]:
    first = paper.FIRST_VALIDATION
    base = math.fsum(first) / len(first)
    gains = {method: mean - base for method, (mean, _) in paper.TEST_MEANS.items()}
    z = {pair: paper.z_of_difference(*pair) for pair in (("ste", "reinforce"), ("reinforce", "gumbel"),
                                                         ("gumbel", "ppo"))}  # fmt: skip
    return [
        Claim(
            seed="paper", claim="the batch is 16 prompts", stated=str(paper.STATED_BATCH), found=paper.BATCH,
            unit="prompts a step", how="derived", verdict="refuted",
            note=f"accumulation is a field that nothing reads: {paper.STEPS * paper.BATCH} prompts in all",
        ),
        Claim(
            seed="paper", claim="results are over a test set of 25,000", stated="25,000", found=paper.TEST_N,
            unit="samples", how="derived", verdict="refuted",
            note=f"read in its code; z of STE over REINFORCE {z['ste', 'reinforce']:.1f}, of REINFORCE over GRADE "
            f"{z['reinforce', 'gumbel']:.1f}, of GRADE over PPO {z['gumbel', 'ppo']:.1f}, one seed each",
        ),
        Claim(
            seed="paper", claim="all methods improve on the base model", stated="not shown", found=base,
            unit="validation reward after one update", how="derived", verdict="refuted",
            note=f"no untrained policy was evaluated; against this STE gains {gains['ste']:+.2f}, REINFORCE "
            f"{gains['reinforce']:+.2f}, GRADE {gains['gumbel']:+.2f}, PPO {gains['ppo']:+.2f}",
        ),
        Claim(
            seed="paper", claim="PPO reaches 0.8 after 0 steps", stated="0",
            found=str(paper.first_above([0.888, 0.5, 0.5], 0.8, window=10)), unit="", how="derived", verdict="refuted",
            note="a moving average over one value: the first batch of two had 0.888 by chance",
        ),
    ]  # fmt: skip
