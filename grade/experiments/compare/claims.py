"""Verdicts on the GRADE paper (arXiv 2601.11574): its headline table point by point, and its defects.

Its models and prompts are not ours, so figures are not compared, only what it concludes from them: who is better than
whom at equal samples, and at equal KL, which it does not report. A difference of methods counts if a paired t-test over
seeds gives p < 0.05, a gain from three standard errors over seeds. Its code was read, not run, where a note says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from grade.errors import InputError
from grade.experiments.claims import Claim
from grade.experiments.compare import defects
from grade.gradients.estimators import tau_at

SURE = 0.05  # p of a difference

NEEDED = ("defects/kl_aligned_max", "defects/kl_late", "defects/scope_difference", "defects/spread_ste",
          "defects/spread_reinforce", "defects/relative_variance_ste", "defects/relative_variance_reinforce",
          "defects/loss_plus_reward", "untrained/reward")  # fmt: skip


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
        raise InputError("metrics", f"without {', '.join(missing)}", "all of claims_compare.NEEDED")
    return [*_headline(m, level), *_defects(m)]


def _headline(m: Mapping[str, float], level: float) -> list[Claim]:
    rows = []
    for a, b, words in (
        ("ste", "ppo", "GRADE-STE beats PPO, 0.763 to 0.510"),
        ("ste", "reinforce", "GRADE-STE beats REINFORCE, 0.763 to 0.617"),
        ("ste", "gumbel", "GRADE-STE beats GRADE, 0.763 to 0.590"),
        ("gumbel", "ppo", "GRADE beats PPO, 0.590 to 0.510"),
        ("reinforce", "gumbel", "REINFORCE beats GRADE, 0.617 to 0.590"),
    ):
        for name, where in (("gain", "at equal samples and beta"), (f"kl{level:g}", f"at a KL of {level:g} nats")):
            rows.append(_comparison(m, a, b, name, f"{words}: {where}"))
    rows.append(_gain(m, "ppo", "PPO ends below its start, 0.510 after 0.573", sign=-1))
    rows.append(_gain(m, "ste", "GRADE-STE learns the task", sign=1))
    return rows


def _comparison(m: Mapping[str, float], a: str, b: str, name: str, words: str) -> Claim:
    key, sign = f"paired/{a}_minus_{b}/{name}", 1.0
    if key not in m:
        key, sign = f"paired/{b}_minus_{a}/{name}", -1.0
    stated = f"{a} > {b}"
    if key not in m:
        note = "not both methods were run, or not both reached this KL with every seed"
        return Claim("paper", words, stated, "no figure", "", "measured", "not testable", note)
    found, stderr, p = sign * m[key], m.get(f"{key}_stderr", 0.0), m.get(f"{key}_p", 1.0)
    verdict = "partly" if p >= SURE else "confirmed" if found > 0 else "refuted"
    note = f"± {stderr:.2g} over n={m[f'{key}_n']} seeds, paired, p = {p:.2g}"
    if verdict == "partly":
        note += ": no difference that these seeds show"
    return Claim("paper", words, stated, found, "reward, difference of means", "measured", verdict, note)


def _gain(m: Mapping[str, float], method: str, words: str, sign: int) -> Claim:
    key = f"gain/{method}"
    if key not in m:
        return Claim("paper", words, "", "no figure", "", "measured", "not testable", f"{method} was not run")
    found, stderr = m[key], m.get(f"{key}_stderr", 0.0)
    verdict = "confirmed" if sign * found > 3 * stderr else "refuted" if -sign * found > 3 * stderr else "partly"
    note = f"± {stderr:.2g} over n={m[f'{key}_n']} seeds; untrained {m['untrained/reward']:.3f}"
    return Claim("paper", words, "rises" if sign > 0 else "falls", found, "reward, gain", "measured", verdict, note)


def _defects(m: Mapping[str, float]) -> list[Claim]:
    coded, meant = (defects.gae_example(over_batch) for over_batch in (True, False))
    close, far = defects.whitened([0.51, 0.50])[0], defects.whitened([0.9, 0.1])[0]
    spread = m["defects/spread_reinforce"] / m["defects/spread_ste"]
    relative = m["defects/relative_variance_reinforce"] / m["defects/relative_variance_ste"]
    first = defects.FIRST_VALIDATION
    ste, reinforce, gumbel, ppo = (defects.TEST_MEANS[k][0] for k in ("ste", "reinforce", "gumbel", "ppo"))
    base = math.fsum(first) / len(first)
    tau = tau_at(defects.STEPS, 2.0, 0.5, 2000)
    rows = [
        ("the objective contains beta KL, beta = 0.1 (eq. 16)", "in the loss", m["defects/loss_plus_reward"],
         "loss + reward, one step with beta = 0", "measured", "refuted",
         "its logged loss is minus the reward at every step (read in its results), which here is what beta = 0 gives"),
        ("GRADE-STE's KL of 11 shows substantial updates", "4.9 to 11.1 nats", m["defects/kl_late"],
         "nats a token, untrained policy, reference one position late", "measured",
         "refuted" if m["defects/kl_late"] > 100 * m["defects/kl_aligned_max"] else "partly",
         f"aligned it is {m['defects/kl_aligned_max']:.1g} at most; its code logs 9.1 and 3.2 at step 0 (read)"),
        ("GRADE-STE's gradient variance is 14 times lower than REINFORCE's", "14.6", relative,
         "ratio of noise over signal, repeated gradients", "measured",
         "confirmed" if relative > 7 else "partly" if relative > 1 else "refuted",
         f"the paper's figure, the spread of one gradient's norms over parameters, gives {spread:.2g} here: it scales "
         "with the gradient and says nothing about noise"),
        ("PPO uses generalised advantage estimation", "over time", float(coded[0]),
         "advantage of the first token, reward 1, V = 0.5, T = 8", "derived", "refuted",
         f"its loop runs over the batch: {float(coded[0]):.3f} at every token but the last, {float(coded[-1]):.3f} "
         f"there; over time {float(meant[0]):.3f} to {float(meant[-1]):.3f}"),
        ("the batch is 16 prompts", str(defects.STATED_BATCH), defects.BATCH, "prompts a step", "derived", "refuted",
         f"accumulation is a field that nothing reads: {defects.STEPS * defects.BATCH} prompts in all"),
        ("REINFORCE has a moving-average baseline", "0.9", close, "advantage of the better of rewards 0.51 and 0.50",
         "derived", "refuted",
         f"whitening over a batch of two gives the same {far:.4f} for 0.9 and 0.1, and cancels any baseline; over a "
         "batch of one it is NaN"),
        ("all methods are trained on the same reward", "same", m["defects/scope_difference"],
         "reward with the prompt minus without, same completions", "measured",
         "refuted" if abs(m["defects/scope_difference"]) > 1e-3 else "partly",
         "GRADE is scored without the prompt, PPO and REINFORCE with it, evaluation with it (read)"),
        ("results are over a test set of 25,000", "25,000", defects.TEST_N, "samples", "derived", "refuted",
         f"read in its code; z of STE over REINFORCE {defects.z_of_difference('ste', 'reinforce'):.1f}, of REINFORCE "
         f"over GRADE {defects.z_of_difference('reinforce', 'gumbel'):.1f}, of GRADE over PPO "
         f"{defects.z_of_difference('gumbel', 'ppo'):.1f}, one seed each"),
        ("all methods improve on the base model", "not shown", base, "validation reward after one update", "derived",
         "refuted",
         f"no untrained policy was evaluated; against this STE gains {ste - base:+.2f}, REINFORCE "
         f"{reinforce - base:+.2f}, GRADE {gumbel - base:+.2f}, PPO {ppo - base:+.2f}"),
        ("tau is annealed from 2.0 to 0.5", "0.5", tau, "tau at the last step", "derived", "refuted",
         "a ramp of 2000 steps, of which 250 were run; with straight-through tokens tau shapes the backward pass only"),
        ("PPO reaches 0.8 after 0 steps", "0", str(defects.first_above([0.888, 0.5, 0.5], 0.8, window=10)),
         "", "derived", "refuted",
         "a moving average over one value: the first batch of two had 0.888 by chance"),
    ]  # fmt: skip
    return [Claim("paper", *row[:2], *row[2:]) for row in rows]
