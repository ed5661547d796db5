"""Claims of the source documents and what was found: one row each, as a CSV file, a table, or Markdown.

A row says what a document states, what this project found, how it was found, and the verdict. The rules that turn
numbers into verdicts live beside each experiment's claims (`grade.experiments.exp6.claims`); this module only holds
and writes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from grade.errors import InputError
from grade.results import replacing

ABOUT = 0.25
"""The documents write "~": a figure within a quarter of the stated range counts as confirmed."""
SURE = 0.01
"""Two methods differ for p up to this, of a paired test over seeds."""
NO_DIFFERENCE = 0.1
"""Seeds show no difference for p from this. In between another run may decide otherwise."""

HOW = ("traced", "measured", "counted", "derived")
VERDICTS = ("confirmed", "refuted", "partly", "not testable")


@dataclass(frozen=True)
class Claim:
    """One claim of a source document.

    Attributes:
        seed: The document's number, for example ``"000"``.
        claim: What it says, in its words as far as they are short.
        stated: The figure it gives, as it writes it.
        found: The figure found here; text where the finding is not a number.
        unit: Unit of ``found``; empty for text.
        how: ``traced`` (the real step without data), ``measured`` (run here), ``counted`` (live bytes of real
            tensors), ``derived`` (arithmetic, or read in the published code; the note says which).
        verdict: ``confirmed``, ``refuted``, ``partly`` or ``not testable``.
        note: What explains the verdict, with the figures that go with it.
        timed: Whether figure or note hold times, which differ from run to run.
    """

    seed: str
    claim: str
    stated: str
    found: float | str
    unit: str
    how: str
    verdict: str
    note: str
    timed: bool = False

    def without_times(self) -> Claim:
        """The same verdict; a timed one refers to the file of times instead of giving its figure."""
        if not self.timed:
            return self
        return dataclasses.replace(self, found="timed", unit="", note="see timings/claims.csv")

    def check(self) -> None:
        """Check what a reader relies on.

        Raises:
            InputError: For an empty claim, an unknown ``how`` or ``verdict``, or a figure that is not finite.
        """
        if not self.seed or not self.claim:
            raise InputError("claim", self, "a seed and a claim that are not empty")
        if self.how not in HOW:
            raise InputError(f"how of {self.claim!r}", self.how, f"one of {', '.join(HOW)}")
        if self.verdict not in VERDICTS:
            raise InputError(f"verdict on {self.claim!r}", self.verdict, f"one of {', '.join(VERDICTS)}")
        if not isinstance(self.found, str) and not math.isfinite(self.found):
            raise InputError(f"found for {self.claim!r}", self.found, "a finite number, or text")


COLUMNS = tuple(field.name for field in dataclasses.fields(Claim) if field.name != "timed")


def claims_table(claims: Iterable[Claim], digits: int = 4) -> pd.DataFrame:
    """The claims as a table of text, in the order given.

    Args:
        claims: Rows; each is checked.
        digits: Significant digits of the figures found.

    Returns:
        A frame with one column for each field of `Claim`.

    Raises:
        InputError: As `Claim.check`.

    >>> row = Claim("000", "4 GB of soft tokens", "4 GB", 8.192, "MB", "derived", "refuted", "1*64*32000*4 bytes")
    >>> claims_table([row])[["stated", "found", "unit", "verdict"]].iloc[0].tolist()
    ['4 GB', '8.192', 'MB', 'refuted']
    """
    rows = []
    for claim in claims:
        claim.check()
        found = claim.found if isinstance(claim.found, str) else _number(claim.found, digits)
        rows.append({name: getattr(claim, name) for name in COLUMNS} | {"found": found})
    return pd.DataFrame(rows, columns=list(COLUMNS))


def write_claims(path: str | Path, claims: Iterable[Claim]) -> None:
    """Write ``claims.csv`` in one step: figures to 6 significant digits, nothing written if a row is wrong.

    Args:
        path: The file; its folder is made.
        claims: Rows, written in the order given.

    Raises:
        InputError: As `Claim.check`.
    """
    table = claims_table(claims, digits=6)
    with replacing(path) as file:
        table.to_csv(file, index=False, lineterminator="\n")


def read_claims(path: str | Path) -> list[Claim]:
    """Read a file that `write_claims` wrote.

    Args:
        path: The file.

    Returns:
        The claims; figures as the text that is in the file.

    Raises:
        InputError: If it cannot be read, lacks a column, or holds a row that `Claim.check` refuses.
    """
    try:
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, UnicodeDecodeError, pd.errors.ParserError, pd.errors.EmptyDataError) as error:
        raise InputError("claims", str(path), f"a file of claims ({str(error).splitlines()[0]})") from None
    if tuple(table.columns) != COLUMNS:
        raise InputError(f"columns of {path}", ", ".join(table.columns), ", ".join(COLUMNS))
    claims = [Claim(*row) for row in table.itertuples(index=False)]
    for claim in claims:
        claim.check()
    return claims


def verdict_counts(claims: Iterable[Claim]) -> str:
    """How many claims of each document got which verdict, as a Markdown table.

    Args:
        claims: Rows.

    Returns:
        The table, one line a document, ending in a newline.
    """
    table = pd.DataFrame([(c.seed, c.verdict) for c in claims], columns=["document", "verdict"])
    counts = pd.crosstab(table.document, table.verdict).reindex(columns=list(VERDICTS), fill_value=0)
    lines = ["| document | " + " | ".join(VERDICTS) + " |", "| --- |" + " --- |" * len(VERDICTS)]
    lines += [f"| {row[0]} | " + " | ".join(map(str, row[1:])) + " |" for row in counts.itertuples()]
    return "\n".join(lines) + "\n"


def to_markdown(claims: Iterable[Claim]) -> str:
    """The claims as a Markdown table, figure and unit in one column.

    Args:
        claims: Rows.

    Returns:
        The table, ending in a newline.

    Raises:
        InputError: As `Claim.check`.
    """
    table = claims_table(claims)
    found = [f"{value} {unit}".strip() for value, unit in zip(table["found"], table["unit"], strict=True)]
    table = table.assign(found=found).drop(columns="unit")
    lines = ["| " + " | ".join(table.columns) + " |", "|" + " --- |" * len(table.columns)]
    for row in table.itertuples(index=False):
        lines.append("| " + " | ".join(map(_cell, row)) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: object) -> str:
    """A value on one line that Markdown shows as it is: no column, no HTML tag and no entity begins in it."""
    text = " ".join(str(value).split()).replace("|", r"\|")
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", re.sub(r"&(?=#?\w+;)", "&amp;", text))


def about(found: float, low: float, high: float | None = None) -> bool:
    """Whether a figure lies within `ABOUT` of the stated range.

    >>> about(12.4, 10), about(12.6, 10), about(18, 10, 15)
    (True, False, True)
    """
    return low * (1 - ABOUT) <= found <= (low if high is None else high) * (1 + ABOUT)


def size_verdict(found: float, low: float, high: float | None = None) -> str:
    """A stated size is right or wrong."""
    return "confirmed" if about(found, low, high) else "refuted"


def confirmed_if(holds: bool, otherwise: str = "refuted") -> str:
    """``confirmed`` where the condition holds, another verdict where it does not.

    >>> confirmed_if(True), confirmed_if(False), confirmed_if(False, "partly")
    ('confirmed', 'refuted', 'partly')
    """
    return "confirmed" if holds else otherwise


def _number(value: float, digits: int) -> str:
    """Significant digits without an exponent where one can do without: 147456, not 1.475e+05."""
    if value != 0 and abs(value) >= 10**digits:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"
