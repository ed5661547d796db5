"""Claims of the source documents, and what becomes of them: a row each, as YAML, CSV, a table, or Markdown.

The claims of a document are rows of a file ``claims.yaml`` beside the experiment that tests them: what it states, the
figure that was obtained here (a name among the experiment's figures), and the rule by which the figure confirms the
claim or refutes it. `judge` makes the verdicts. Text in a row may hold figures: ``{peak:.1f} GB``.
"""

import re
import string
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
from pydantic import Field

from grade.config import Config
from grade.config_files import load_config
from grade.errors import InputError
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


class _Stated(Config):
    """What a row of ``claims.yaml`` and its verdict have in common."""

    claim: str = Field(min_length=1, description="what the document says, in its words as far as they are short")
    stated: str = Field(description="the figure that it gives, as it writes it")
    unit: str = Field("", description="unit of the figure; empty for text")
    how: How = Field(description="where the figure is from")
    note: str = Field(description="what explains the verdict, with the figures that go with it")


class Row(_Stated):
    """A claim with its rule, as it stands in ``claims.yaml``."""

    figure: str = Field("", description="name of the figure that was obtained here")
    value: float | str = Field("", description="instead: a number, or text, which may hold figures")
    rule: Verdict | Literal["about", "above", "at least", "below", "at most", "true", "given"] = Field(
        description="a verdict that depends on no figure, or one of RULES"
    )
    judged: str = Field("", description="name of the figure that the rule is applied to, if it is another one")
    low: float | None = None
    high: float | None = None
    otherwise: Verdict = Field("refuted", description="the verdict where the rule does not hold")
    partly_above: float | None = Field(None, description="partly, where the rule does not hold, above this")


class _Document(Config):
    """A file ``claims.yaml``."""

    document: str = Field(min_length=1, description="the document's number")
    claims: list[Row]


class Claim(_Stated):
    """A claim with its verdict."""

    seed: str = Field(min_length=1, description="the document's number")
    found: float | str = Field(description="the figure that was obtained here, or text")
    verdict: Verdict


COLUMNS = ("seed", "claim", "stated", "found", "unit", "how", "verdict", "note")


class _Figures(string.Formatter):
    """``{name:.2f}`` with any name, dots and slashes included."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, str]:
        return kwargs[field_name], field_name


def judge(experiment: str | Path, figures: Mapping[str, Any]) -> list[Claim]:
    """The verdicts on the claims in ``claims.yaml`` of an experiment's folder, in its order, from its figures.

    Every figure that a row names must be there; see `_in_units`.
    """
    document, claims = load_config(_Document, [Path(__file__).parent / experiment / "claims.yaml"]), []
    figures = _in_units(figures)
    text = partial(_Figures().vformat, args=(), kwargs=figures)
    for row in document.claims:
        try:
            value = figures[row.figure] if row.figure else row.value
            found = {"found": text(value), "unit": ""} if isinstance(value, str) else {"found": float(value)}
            found |= {"verdict": _verdict(row, figures), "claim": text(row.claim), "note": text(row.note)}
        except KeyError as error:
            raise InputError(f"figures for {row.claim!r}", f"no {error}", "all that claims.yaml names") from None
        stated = row.model_dump(include=set(_Stated.model_fields))
        claims.append(Claim.parse(stated | found | {"seed": document.document}, row.claim))
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

    >>> row = Claim(seed="000", claim="4 GB of soft tokens", stated="4 GB", found=8.192, unit="MB", how="derived",
    ...             verdict="refuted", note="1*64*32000*4 bytes")
    >>> claims_table([row])[["stated", "found", "unit", "verdict"]].iloc[0].tolist()
    ['4 GB', '8.192', 'MB', 'refuted']
    """
    table = pd.DataFrame([claim.model_dump() for claim in claims], columns=list(COLUMNS))
    return table.assign(found=[x if isinstance(x, str) else _number(x, digits) for x in table.found])


def write_claims(path: str | Path, claims: Iterable[Claim]) -> None:
    """Write ``claims.csv`` in one step: figures to 6 significant digits."""
    table = claims_table(claims, digits=6)
    write_text(path, table.to_csv(index=False, lineterminator="\n"))


def read_claims(path: str | Path) -> list[Claim]:
    """Read a file that `write_claims` wrote; figures stay the text that is in the file."""
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    return [Claim.parse(row, str(path)) for row in table[list(COLUMNS)].to_dict("records")]


def verdict_counts(claims: Iterable[Claim]) -> str:
    """How many claims of each document got which verdict, as a Markdown table."""
    verdicts = list(get_args(Verdict))
    table = pd.DataFrame([(c.seed, c.verdict) for c in claims], columns=["document", "verdict"])
    counts = pd.crosstab(table.document, table.verdict).reindex(columns=verdicts, fill_value=0)
    return _markdown(counts.reset_index())


def to_markdown(claims: Iterable[Claim]) -> str:
    """The claims as a Markdown table, figure and unit in one column."""
    table = claims_table(claims)
    table["found"] = [f"{found} {unit}".strip() for found, unit in zip(table.found, table.unit, strict=True)]
    return _markdown(table.drop(columns="unit"))


def _markdown(table: pd.DataFrame) -> str:
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in (table.columns, *table.to_numpy().tolist())]
    return "\n".join([lines[0], "|" + " --- |" * table.shape[1], *lines[1:]]) + "\n"


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
