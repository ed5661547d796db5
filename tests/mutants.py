"""Do the tests notice a fault? Small faults in the core, one at a time, each against the tests of its own wing.

A random sample of places (`mutants_made`) and some faults by hand. ``make mutants`` writes ``tests/mutants.csv``, the
outcome of every one, and ``docs/mutants.md``; ``python tests/mutants.py --page`` writes the page alone from the tables.
``tests/mutants_explained.csv`` holds the reasons for those that no test notices; they are written by hand.
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from mutants_made import WINGS, Mutant, count, replaced, sample

ROOT = Path(__file__).parents[1]
TABLE, EXPLAINED = ROOT / "tests" / "mutants.csv", ROOT / "tests" / "mutants_explained.csv"
PAGE = ROOT / "docs" / "mutants.md"
WORK = ROOT / ".workspaces" / "mutants"
SIZE, SEED, BAR = 51, 2, 0.95
"""Places of each wing, the seed of the draw, and the share of faults that the tests must notice."""
MOST_SECONDS = 90.0
"""Tests of a fault are chosen up to this many seconds together; a fault that survives these meets all of them."""
COLUMNS = ("wing", "file", "function", "line", "operator", "before", "after", "result", "test", "tests", "seconds")

BY_HAND = {
    "every step with the same noise": (
        "training", "grade/training/trainer.py", "manual_seed(int(seed >> 1))", "manual_seed(0)",
    ),
    "every microbatch with one seed": (
        "training", "grade/training/trainer.py", "self.state.global_step + 1, place]", "self.state.global_step + 1, 0]",
    ),
    "prompts not shuffled": (
        "training", "grade/training/trainer.py", "args.seed if args.shuffle_dataset else None)", "None)",
    ),
    "min_new_tokens one too many": (
        "models", "grade/models/sampling.py", "device=logits.device) < min_new_tokens",
        "device=logits.device) <= min_new_tokens",
    ),
    "min_new_tokens one too many, scored": (
        "models", "grade/models/scoring.py", "device=ids.device) < min_new_tokens",
        "device=ids.device) <= min_new_tokens",
    ),
    "storages rounded to 1,024 bytes": (
        "memory", "grade/memory/tracker.py", "self, round_to: int = 512", "self, round_to: int = 1024",
    ),
    "storages rounded to 1,024 bytes, records": (
        "memory", "grade/memory/live.py", "self, round_to: int = 512", "self, round_to: int = 1024",
    ),
    "storages rounded to 1,024 bytes, a step": (
        "memory", "grade/memory/trace.py", "step: Step, round_to: int = 512", "step: Step, round_to: int = 1024",
    ),
    "the judge's C": ("rewards", "grade/rewards/gold.py", "c: float = 3.0", "c: float = 1.0"),
    "the judge's C is not used": (
        "rewards", "grade/rewards/gold.py", "LogisticRegression(C=c, ", "LogisticRegression(",
    ),
}  # fmt: skip
"""Faults that are easy to make and hard to see: wing, file, text that stands there once, its replacement."""


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    wing: str
    file: str
    function: str
    line: int
    operator: str
    before: str
    after: str
    result: str
    test: str
    tests: int
    seconds: float

    @property
    def key(self) -> tuple[str, ...]:
        return self.file, self.function, self.before, self.after

    @property
    def noticed(self) -> bool:
        return self.result != "survived"


def by_hand(root: Path = ROOT) -> list[Mutant]:
    """The faults of `BY_HAND`; raises where the text is not there."""
    return [replaced(root, *change) for change in BY_HAND.values()]


def read_table(path: Path = TABLE) -> list[Row]:
    """The outcomes of the last run."""
    with path.open(encoding="utf-8", newline="") as file:
        lines = [row | dict(line=int(row["line"]), tests=int(row["tests"])) for row in csv.DictReader(file)]
    return [Row(**(row | dict(seconds=float(row["seconds"])))) for row in lines]


def write_table(path: Path, rows: Iterable[Row]) -> None:
    """Write the outcomes, in order of wings, files and lines."""
    order = sorted(rows, key=lambda row: (list(WINGS).index(row.wing), row.file, row.line, row.after))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) | {"seconds": f"{row.seconds:.0f}"} for row in order)


def explanations() -> dict[tuple[str, ...], tuple[str, str]]:
    """By file, function, text before and after: whether a fault is `equivalent` or `survives`, and why."""
    with EXPLAINED.open(encoding="utf-8", newline="") as file:
        return {tuple(key): (verdict, reason) for *key, verdict, reason in list(csv.reader(file))[1:]}


def shares(rows: list[Row]) -> dict[str, dict[str, int]]:
    """Faults of each wing by outcome, the sample and those by hand together; the last entry sums them."""
    known, counts = explanations(), {}
    for wing in (*WINGS, "all"):
        part = [row for row in rows if wing in (row.wing, "all")]
        same = sum(not row.noticed and known.get(row.key, ("",))[0] == "equivalent" for row in part)
        killed, late = (sum(row.result == result for row in part) for result in ("killed", "timeout"))
        counts[wing] = dict(tried=len(part), killed=killed, timeout=late, equivalent=same)
        counts[wing]["survived"] = len(part) - killed - late - same
    return counts


def share(counts: dict[str, int]) -> float:
    """The share of faults that were noticed, of those that change anything."""
    return (counts["killed"] + counts["timeout"]) / max(1, counts["tried"] - counts["equivalent"])


def page(rows: list[Row], commit: str = "") -> str:
    """The text of ``docs/mutants.md``.

    Args:
        rows: The table.
        commit: What was tried; empty: what the page says now.
    """
    text = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    commit = commit or next(iter(re.findall(r"at commit `(\w+)`", text)), "unknown")
    pin = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("cosmic"))
    known, counts, hand = explanations(), shares(rows), sum(row.operator == "by hand" for row in rows)
    missed = [row for row in rows if not row.noticed]
    paragraphs = (
        f"Written by `make mutants`, last at commit `{commit}` with {pin.replace('==', ' ')}; the tests ran for "
        f"{sum(row.seconds for row in rows) / 60:.0f} minutes. `tests/mutants.csv` holds every row.",
        "A small fault is put into the core, one at a time, and the tests of its own wing run: those that run the "
        f"line, the quickest first. {len(rows) - hand} places were drawn at random (seed {SEED}), {SIZE} in each wing, "
        f"and {hand} faults are by hand. The faults are those of cosmic-ray's operators: numbers one up or down, "
        "comparisons, arithmetic and boolean operators exchanged, conditions negated, decorators removed, loops that "
        "do not run, exceptions not caught. Operators are exchanged within their kind, since `x << 0.5` fails "
        "wherever a test runs it.",
        "Left out by rule, since they cannot change a result: annotations and aliases of types, what an error says "
        "(`raise`), `if TYPE_CHECKING`, and checks of the program on itself (`assert`, `zip(..., strict=True)`, "
        "`dataclass(frozen=True)`).",
        "When this sample was first tried, nobody had looked at it: 288 of its 306 faults were noticed by at most a "
        "minute of tests each, which is 96.3 % [94, 98] of those that change anything. So much may be expected of "
        "other faults. Those that were not noticed got tests, so the shares below say less.",
    )
    lines = ["# Do the tests notice a fault?", ""]
    lines += [line for text in paragraphs for line in (textwrap.fill(text, 118, break_on_hyphens=False), "")]
    lines += ["| wing | tried | killed | timeout | equivalent | survived | noticed |", "|---|---|---|---|---|---|---|"]
    lines += [_line(wing, *found.values(), f"{100 * share(found):.1f} %") for wing, found in counts.items()]
    lines += ["", "Noticed: killed or timeout, of those that are not equivalent.", ""]
    for verdict, title in (("equivalent", "Equivalent: no input shows a difference"), ("", "Survived")):
        part = [row for row in missed if (known.get(row.key, ("",))[0] == "equivalent") == bool(verdict)]
        if part:
            lines += [f"## {title}", "", "| place | before | after | reason |", "|---|---|---|---|"]
            lines += [_fault(row, known.get(row.key, ("", "not explained"))[1]) for row in part]
            lines += [""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _fault(row: Row, reason: str) -> str:
    before, after = (text.replace("|", r"\|") for text in (row.before, row.after))
    return _line(f"{row.file}:{row.line}", f"`{before}`", f"`{after}`", reason)


def run(size: int, seed: int, wings: list[str], again: str) -> list[Row]:
    """Try the faults; each outcome is kept in the work folder at once.

    Args:
        size: Places of each wing.
        seed: Seed of the draw.
        wings: Wings to try.
        again: Which known outcomes to find anew: ``all``, ``survived`` or ``none``.
    """
    from mutants_run import Runner

    kept, hand = WORK / "results.csv", by_hand()
    runner = Runner(ROOT, WORK)
    known = {row.key: row for row in read_table(kept)} if kept.is_file() and again != "all" else {}
    known = {key: row for key, row in known.items() if again == "none" or row.noticed}
    faults = {wing: [*sample(ROOT, wing, size, seed), *(m for m in hand if m.wing == wing)] for wing in wings}
    runner.warm_up(wings)
    done = []
    for wing in wings:
        print(f"{wing}: {len(faults[wing])} faults of {count(ROOT, wing)} places", flush=True)
        for mutant in faults[wing]:
            row = known.get(mutant.key) or _try(partial(runner.judge, mutant), mutant)
            done.append(row)
            write_table(kept, {**known, **{row.key: row for row in done}}.values())
    return done


def _try(judge: partial, mutant: Mutant) -> Row:
    outcome = judge(MOST_SECONDS)
    if outcome.result == "survived" and outcome.left:
        outcome = judge(math.inf)
    row = Row(mutant.wing, mutant.file, mutant.function, mutant.line, mutant.operator, mutant.before, mutant.after,
              outcome.result, outcome.test, outcome.chosen, outcome.seconds)  # fmt: skip
    print(f"{row.result:8} {row.seconds:4.0f} s  {row.file}:{row.line} {row.after}  <- {row.test}", flush=True)
    return row


def _head() -> str:
    done = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()


def main() -> int:
    """Run, write the table and the page; 1 when fewer are noticed than the bar says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=SIZE, help="places of each wing (default: %(default)s)")
    parser.add_argument("--wing", action="append", choices=WINGS, help="only this wing; nothing is written")
    parser.add_argument(
        "--again", choices=("all", "survived", "none"), default="all",
        help="outcomes in the work folder to find anew: none continues a run (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--page", action="store_true", help="write the page alone, from the table")
    options = parser.parse_args()
    if not options.page:
        print(f"cosmic-ray {version('cosmic-ray')}, seed {SEED}")
        rows = run(options.size, SEED, options.wing or list(WINGS), options.again)
        if options.wing:
            return 0
        write_table(TABLE, rows)
    rows, head = read_table(), "" if options.page else _head()
    PAGE.write_text(page(rows, head), encoding="utf-8")
    found = shares(rows)["all"]
    print(f"{100 * share(found):.1f} % noticed: {found}")
    return int(share(found) < BAR)


if __name__ == "__main__":
    sys.exit(main())
