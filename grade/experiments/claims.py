"""Claims of the source documents, and what becomes of them: a row each, as YAML, CSV, a table, or Markdown.

The claims of a document are rows of a file ``claims.yaml`` beside the experiment that tests them: what it states, the
figure that was obtained here (a name among the experiment's figures), and the rule by which the figure confirms the
claim or refutes it. `judge` makes the verdicts. Text in a row may hold figures: ``{peak:.1f} GB``.
"""

from __future__ import annotations

import dataclasses
import math
import re
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
from pydantic import Field

from grade.config import Config
from grade.errors import InputError, reading
from grade.files import write_text

ABOUT = 0.25
"""The documents write "~": a figure within a quarter of the stated range counts as confirmed."""

How = Literal["traced", "measured", "counted", "derived"]
"""The real step without data; run here; live bytes of real tensors; arithmetic, or read in the published code."""
Verdict = Literal["confirmed", "refuted", "partly", "not testable"]
RULES = {
    "about": lambda x, low, high: low * (1 - ABOUT) <= x <= (low if high is None else high) * (1 + ABOUT),
    "above": lambda x, low, high: x > low,
    "at least": lambda x, low, high: x >= low,
    "below": lambda x, low, high: x < high,
    "at most": lambda x, low, high: x <= high,
    "true": lambda x, low, high: bool(x),
}
"""When a figure confirms a claim with bounds ``low`` and ``high``. By the rule ``given`` the figure is the verdict."""


class Row(Config):
    """A claim with its rule, as it stands in ``claims.yaml``."""

    claim: str = Field(min_length=1, description="what the document says, in its words as far as they are short")
    stated: str = Field(description="the figure that it gives, as it writes it")
    figure: str = Field("", description="name of the figure that was obtained here")
    value: float | str = Field("", description="instead: a number, or text, which may hold figures")
    unit: str = Field("", description="unit of the figure; empty for text")
    how: How = Field(description="where the figure is from")
    rule: Verdict | Literal["about", "above", "at least", "below", "at most", "true", "given"] = Field(
        description="a verdict that depends on no figure, or one of RULES"
    )
    judged: str = Field("", description="name of the figure that the rule is applied to, if it is another one")
    low: float | None = None
    high: float | None = None
    otherwise: Verdict = Field("refuted", description="the verdict where the rule does not hold")
    partly_above: float | None = Field(None, description="partly, where the rule does not hold, above this")
    note: str = Field(description="what explains the verdict, with the figures that go with it")
    timed: bool = Field(False, description="whether figure or note hold times, which differ from run to run")


class _Document(Config):
    """A file ``claims.yaml``."""

    document: str = Field(min_length=1, description="the document's number")
    claims: list[Row]


@dataclass(frozen=True)
class Claim:
    """A claim with its verdict. ``seed`` is the document's number; the other fields are those of `Row`."""

    seed: str
    claim: str
    stated: str
    found: float | str
    unit: str
    how: str
    verdict: str
    note: str
    timed: bool = False

    def __post_init__(self) -> None:
        if not self.seed or not self.claim:
            raise InputError("claim", self.claim, "a document and a claim that are not empty")
        for name, allowed in (("how", get_args(How)), ("verdict", get_args(Verdict))):
            if getattr(self, name) not in allowed:
                raise InputError(f"{name} of {self.claim!r}", getattr(self, name), f"one of {', '.join(allowed)}")
        if not isinstance(self.found, str) and not math.isfinite(self.found):
            raise InputError(f"figure for {self.claim!r}", self.found, "a finite number, or text")

    def without_times(self) -> Claim:
        """The same verdict; a timed one refers to the file of times instead of giving its figure."""
        if not self.timed:
            return self
        return dataclasses.replace(self, found="timed", unit="", note="see timings/claims.csv")


COLUMNS = tuple(field.name for field in dataclasses.fields(Claim) if field.name != "timed")


class _Figures(string.Formatter):
    """``{name:.2f}`` with any name, dots and slashes included."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        return kwargs[field_name], field_name


def judge(experiment: str | Path, figures: Mapping[str, Any]) -> list[Claim]:
    """The verdicts on the claims in ``claims.yaml`` of an experiment's folder, in its order, from its figures.

    Every figure that a row names must be there; see `_in_units`.
    """
    document, claims = _Document.load([Path(__file__).parent / experiment / "claims.yaml"]), []
    figures = _in_units(figures)
    for row in document.claims:
        try:
            verdict = _verdict(row, figures)
            texts = {name: _Figures().vformat(getattr(row, name), (), figures) for name in ("claim", "note")}
            value = figures[row.figure] if row.figure else row.value
            value = _Figures().vformat(value, (), figures) if isinstance(value, str) else value
        except KeyError as error:
            raise InputError(f"figures for {row.claim!r}", f"no {error}", "all that claims.yaml names") from None
        unit = "" if isinstance(value, str) else row.unit
        what = document.document, texts["claim"], row.stated, value, unit, row.how, verdict, texts["note"]
        claims.append(Claim(*what, row.timed))
    return claims


def _verdict(row: Row, figures: Mapping[str, Any]) -> str:
    if row.rule in get_args(Verdict):
        return row.rule
    value = figures[row.judged or row.figure]
    if row.rule == "given":
        return value
    if RULES[row.rule](value, row.low, row.high):
        return "confirmed"
    return "partly" if row.partly_above is not None and value > row.partly_above else row.otherwise


def _in_units(figures: Mapping[str, Any]) -> dict[str, Any]:
    """The figures, and every number in decimal MB and GB, in GiB and in percent as well: ``<name> MB`` and so on."""
    scaled = dict(figures)
    for name, value in figures.items():
        if not isinstance(value, str | bool | None):
            units = {"MB": value / 1e6, "GB": value / 1e9, "GiB": value / 2**30, "%": 100 * value}
            scaled = {f"{name} {unit}": number for unit, number in units.items()} | scaled
    return scaled


def claims_table(claims: Iterable[Claim], digits: int = 4) -> pd.DataFrame:
    """The claims as a table of text, figures to so many significant digits.

    >>> row = Claim("000", "4 GB of soft tokens", "4 GB", 8.192, "MB", "derived", "refuted", "1*64*32000*4 bytes")
    >>> claims_table([row])[["stated", "found", "unit", "verdict"]].iloc[0].tolist()
    ['4 GB', '8.192', 'MB', 'refuted']
    """
    rows = [{name: getattr(claim, name) for name in COLUMNS} for claim in claims]
    for row in rows:
        row["found"] = row["found"] if isinstance(row["found"], str) else _number(row["found"], digits)
    return pd.DataFrame(rows, columns=list(COLUMNS))


def write_claims(path: str | Path, claims: Iterable[Claim]) -> None:
    """Write ``claims.csv`` in one step: figures to 6 significant digits."""
    table = claims_table(claims, digits=6)
    write_text(path, table.to_csv(index=False, lineterminator="\n"))


def read_claims(path: str | Path) -> list[Claim]:
    """Read a file that `write_claims` wrote; figures stay the text that is in the file."""
    with reading("claims", path, "a file of claims"):
        table = pd.read_csv(path, dtype=str, keep_default_na=False)
        return [Claim(**row) for row in table[list(COLUMNS)].to_dict("records")]


def verdict_counts(claims: Iterable[Claim]) -> str:
    """How many claims of each document got which verdict, as a Markdown table."""
    verdicts = list(get_args(Verdict))
    table = pd.DataFrame([(c.seed, c.verdict) for c in claims], columns=["document", "verdict"])
    counts = pd.crosstab(table.document, table.verdict).reindex(columns=verdicts, fill_value=0)
    return _markdown(["document", *verdicts], counts.reset_index().to_numpy().tolist(), "| --- |" + " --- |" * 4)


def to_markdown(claims: Iterable[Claim]) -> str:
    """The claims as a Markdown table, figure and unit in one column."""
    table = claims_table(claims)
    table["found"] = (table["found"] + " " + table["unit"]).str.strip()
    table = table.drop(columns="unit")
    return _markdown(table.columns, table.to_numpy().tolist(), "|" + " --- |" * len(table.columns))


def _markdown(columns: Iterable[str], rows: Iterable[Iterable[Any]], rule: str) -> str:
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in (columns, *rows)]
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


def _cell(value: object) -> str:
    """A value on one line that Markdown shows as it is: no column, no HTML tag and no entity begins in it."""
    text = " ".join(str(value).split()).replace("|", r"\|")
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", re.sub(r"&(?=#?\w+;)", "&amp;", text))


def about(found: float, low: float, high: float | None = None) -> bool:
    """Whether a figure lies within `ABOUT` of the stated range.

    >>> about(12.4, 10), about(12.6, 10), about(18, 10, 15)
    (True, False, True)
    """
    return RULES["about"](found, low, high)


def _number(value: float, digits: int) -> str:
    """Significant digits without an exponent where one can do without: 147456, not 1.475e+05."""
    if value != 0 and abs(value) >= 10**digits:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"
