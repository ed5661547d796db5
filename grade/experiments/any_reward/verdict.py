"""What was found, in sentences and against bars: made from the figures, with no number of their own.

Rules: a method is better where the whole 95 % interval of its samples is below `rloo`'s, worse where it is above, and
not told apart otherwise. Two methods at equal KL are told apart for p <= 0.01 over seeds, not for p >= 0.1; in between
another run may decide otherwise, and the sentence says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import pandas as pd

SURE, NO_DIFFERENCE = 0.01, 0.1
Values = Mapping[str, float | int | None]

_MEANS = {
    "tiny_gold": "the gold judge, tiny model", "tiny_trunk": "the reward through the tiny model's trunk",
    "tiny_bag": "the bag of embeddings, tiny model", "text": "SmolLM2's trunk on the tiny model's text",
    "rule": "the rule of length and format", "sums": "right sums", "smollm2_gold": "the gold judge, SmolLM2",
    "smollm2_trunk": "SmolLM2's own trunk", "tiny_trunk1": "the reward through one layer of the tiny model",
    "smollm2_trunk1": "the reward through one layer of SmolLM2",
    "smollm2_trunk4": "the reward through four layers of SmolLM2", "smollm2_bag": "the bag of embeddings, SmolLM2",
    "smollm2_rule": "the rule of length and format, SmolLM2",
}  # fmt: skip
_SAMPLES = "samples_over_rloo/"
_DETAILS = ("_low", "_high", "_n", "_censored", "_of_run")
BETTER, WORSE, EQUAL, OPEN = "fewer samples than rloo", "more samples than rloo", "not told apart from rloo", "open"


@dataclass(frozen=True)
class Bar:
    """A figure that was asked for.

    Attributes:
        label: What it is.
        key: Name of the figure.
        bound: What it must not exceed, or reach.
        most: Whether the bound is an upper one.
        end: Bound on the interval's end (the low one of a lower bound); None: only the figure counts.
    """

    label: str
    key: str
    bound: float
    most: bool = True
    end: float | None = None


BARS = (
    Bar("corrected form: bias with any critic, in standard errors", "bias/corrected_worst_in_stderr", 3.0),
    Bar("worth of one plug-in sample, tiny trunk, fitted on 256", "worth/tiny_trunk/plugin_256", 50, False, 10),
    Bar("the same in a batch of 64", "worth_at_64/tiny_trunk/plugin_256", 10, False),
    Bar("samples over rloo's, gold judge, tiny model", f"{_SAMPLES}tiny_gold", 1 / 3),
    Bar("samples over rloo's, tiny trunk", f"{_SAMPLES}tiny_trunk", 1 / 2),
    Bar("samples over rloo's, gold judge, SmolLM2", f"{_SAMPLES}smollm2_gold", 1 / 2),
    Bar("samples over rloo's, SmolLM2's trunk", f"{_SAMPLES}smollm2_trunk", 1 / 2),
    Bar("share of a step's time for the fit", "cost/fit_share", 0.05),
)


def bars(figures: Values, asked: Iterable[Bar] = BARS) -> pd.DataFrame:
    """Every bar with what was measured.

    Args:
        figures: From `grade.experiments.any_reward.metrics`.
        asked: Which bars; those that were not measured are left out.

    Returns:
        Columns figure, bar, found, low, high, seeds (None: not of training), verdict: ``reached`` or ``missed``.
    """
    rows = []
    for bar in asked:
        found, low, high = (figures.get(bar.key + end) for end in ("", "_low", "_high"))
        if found is None:
            continue
        sign = "at most" if bar.most else "at least"
        reached = found <= bar.bound if bar.most else found >= bar.bound
        if bar.end is not None:
            reached = reached and low is not None and low > bar.end
        reached = reached and not figures.get(f"{bar.key}_censored")  # a lower bound reaches no upper one
        n, verdict = figures.get(f"{bar.key}_n"), "reached" if reached else "missed"
        rows.append((bar.label, f"{sign} {bar.bound:.3g}", found, low, high, n, verdict))
    return pd.DataFrame(rows, columns=["figure", "bar", "found", "low", "high", "seeds", "verdict"])


def subject(name: str) -> str:
    """A subject for people."""
    return _MEANS.get(name, name.replace("_", " "))


def outcome(figures: Values, name: str, method: str = "auto") -> str:
    """`BETTER`, `WORSE` or `EQUAL`; `OPEN` with fewer than two seeds.

    A censored seed makes the ratio a lower bound, so that nothing is better with it.
    """
    key = ("" if method == "auto" else f"{method}/") + _SAMPLES + name
    low, high = figures.get(f"{key}_low"), figures.get(f"{key}_high")
    if low is None or high is None:
        return OPEN
    if low > 1:
        return WORSE
    return BETTER if high < 1 and not figures.get(f"{key}_censored") else EQUAL


def bias_sentence(figures: Values) -> str:
    """Whether the corrected form is unbiased."""
    worst, tests, p = (figures[f"bias/{name}"] for name in ("corrected_worst_in_stderr", "tests", "p"))
    judged = "no more than chance gives" if p > 0.01 else "more than chance gives"
    return (
        f"Enumerated, the corrected form's bias is at most {figures['bias/exact_worst']:.0e} of the gradient, with any "
        f"of {figures['bias/critics']} critics. Drawn, it is at most {worst:.1f} standard errors in {tests} tests: "
        f"{judged} (p = {p:.2g}; {figures['bias/n']:,} completions or more a test)."
    )


def law_sentence(figures: Values) -> str:
    """How far the law of variance holds."""
    return (
        f"Critics with R2 of up to {figures['law/best_r2']:.2f} divide the variance by up to "
        f"{figures['law/best_gain']:.2g}; gains are {figures['law/gain_over_law_low']:.2g} to "
        f"{figures['law/gain_over_law_high']:.2g} times 1 / (1 - R2)."
    )


def explained_sentences(figures: Values) -> list[str]:
    """For each subject from how many completions on its reward is explained, and how far."""
    found = []
    for key in (key for key in figures if key.endswith("/from_n") and key.startswith("explained/")):
        name, best = key.split("/")[1], key.removesuffix("from_n") + "best_"
        sizes = {int(k.removeprefix(best)): v for k, v in figures.items() if k.startswith(best) and v is not None}
        if not sizes:
            found.append(f"{_start(subject(name))}: it never differs within a prompt.")
            continue
        most = max(sizes)
        start = figures[key]
        since = "nothing beyond the error is explained" if start is None else f"explained from {start:,} completions on"
        found.append(f"{_start(subject(name))}: {since}; R2 {sizes[most]:.2f} with {most:,}.")
    return found


def worth_sentences(figures: Values) -> list[str]:
    """What one sample of the plug-in is worth, alone and in the largest batch, for the largest fit of each subject."""
    plugins: dict[str, int] = {}
    for key in figures:
        kind, _, rest = key.partition("/")
        name, _, label = rest.partition("/")
        count = label.removeprefix("plugin_")
        if kind == "worth" and count != label and count.isdigit():
            plugins[name] = max(plugins.get(name, 0), int(count))
    found = []
    for name, count in plugins.items():
        batches = [int(k.split("/")[0].removeprefix("worth_at_")) for k in figures
                   if k.startswith("worth_at_") and k.endswith(f"/{name}/plugin_{count}")]  # fmt: skip
        own, last = f"{name}/plugin_{count}", max(batches, default=0)
        tail = f"; in a batch of {last}, {_with_interval(figures, f'worth_at_{last}/{own}')}" if last else ""
        found.append(f"{_start(subject(name))}, distilled from {count:,} completions: one sample is worth "
                     f"{_with_interval(figures, f'worth/{own}')} of rloo's{tail}.")  # fmt: skip
    return found


def training_sentences(figures: Values, method: str = "auto") -> list[str]:
    """For each subject how many samples a method needs for what `rloo` ends with."""
    found = []
    for name in trained_subjects(figures, method):
        key = ("" if method == "auto" else f"{method}/") + _SAMPLES + name
        n, ratio = figures[f"{key}_n"], figures.get(key)
        if not n or ratio is None:
            found.append(f"{_start(subject(name))}: rloo gained nothing, so there is no goal.")
            continue
        censored = figures.get(f"{key}_censored") or 0
        least = "at least " if censored else ""
        never = f"; {censored} of them never got there" if censored else ""
        kl = figures.get(key.replace("samples", "kl", 1))
        at = "" if kl is None else f", at {kl:.2g} times its KL"
        seeds = f"{n} {'seed' if n == 1 else 'seeds'}{never}"
        found.append(f"{_start(subject(name))}: {method} needs {least}{_with_interval(figures, key)} times rloo's "
                     f"samples{at} ({seeds}): {outcome(figures, name, method)}.")  # fmt: skip
    return found


def trained_subjects(figures: Values, method: str = "auto") -> list[str]:
    """Subjects on which a method was trained beside `rloo`."""
    start = ("" if method == "auto" else f"{method}/") + _SAMPLES
    return [key.removeprefix(start).removesuffix("_n") for key in figures if key.startswith(start)
            and key.endswith("_n")]  # fmt: skip


def paired_sentences(figures: Values, level: float) -> list[str]:
    """`auto` against the estimators that differentiate the reward itself, at equal KL."""
    return list(_paired(figures, level))


def _paired(figures: Values, level: float) -> Iterator[str]:
    for key, value in figures.items():
        parts = key.split("/")
        if parts[0] != "paired" or parts[2] not in ("auto_minus_ste", "auto_minus_st") or value is None:
            continue
        p, stderr = figures.get(f"{key}_p"), figures.get(f"{key}_stderr")
        if p is None or p >= NO_DIFFERENCE:
            judged = "not told apart"
        elif p > SURE:
            judged = "open, another run may decide otherwise"
        else:
            judged = f"{'auto' if value > 0 else parts[2].removeprefix('auto_minus_')} is better"
        error = "" if stderr is None else f" ± {stderr:.2g}"
        test = "" if p is None else f", p = {p:.2g}"
        yield (f"{_start(subject(parts[1]))}, at {level:g} nats: {parts[2].replace('_minus_', ' minus ')} is "
               f"{value:+.3g}{error} ({figures[f'{key}_n']} seeds{test}): {judged}.")  # fmt: skip


def verdict_sentences(figures: Values) -> list[str]:
    """The verdict: for which rewards, from how many samples, by how much, when not."""
    by: dict[str, list[str]] = {}
    for name in trained_subjects(figures):
        by.setdefault(outcome(figures, name), []).append(name)
    found = []
    for name in by.get(BETTER, ()):
        start, factor = figures.get(f"explained/{name}/from_n"), 1 / figures[f"{_SAMPLES}{name}"]
        since = "" if start is None else f" The reward is explained from {start:,} completions on."
        found.append(f"**Use it for {subject(name)}**: {factor:.2g} times fewer samples than rloo.{since}")
    if EQUAL in by:
        found.append(f"**No difference shown** for {_list(by[EQUAL])}: neither gain nor loss beyond the error.")
    if WORSE in by:
        found.append(f"**Not for {_list(by[WORSE])}**: rloo needs fewer samples.")
    if OPEN in by:
        found.append(f"**Open** for {_list(by[OPEN])}: rloo gained nothing, or there are too few seeds.")
    blind = [key.split("/")[1] for key, value in figures.items()
             if key.startswith("explained/") and key.endswith("/from_n") and value is None]  # fmt: skip
    if blind:
        found.append(f"**Nothing to distil** in {_list(blind)}: no family explains it, and auto is rloo there.")
    return found


def _with_interval(figures: Values, key: str) -> str:
    value, low, high = (figures.get(key + end) for end in ("", "_low", "_high"))
    if value is None:
        return "an unknown number"
    return _number(value) + ("" if low is None or high is None else f" [{_number(low)}, {_number(high)}]")


def _number(value: float) -> str:
    """Two significant digits, without an exponent above 100.

    >>> _number(179.2), _number(0.214), _number(1234.0)
    ('179', '0.21', '1,234')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2g}"


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(subject, names))


def _start(text: str) -> str:
    return text[0].upper() + text[1:]


def bullets(sentences: Iterable[str] | str) -> str:
    """Sentences as a Markdown list; one that says so where there is none.

    >>> bullets("It holds."), bullets([])
    ('- It holds.', '- Not measured.')
    """
    listed = [sentences] if isinstance(sentences, str) else list(sentences)
    return "\n".join(f"- {sentence}" for sentence in listed or ["Not measured."])
