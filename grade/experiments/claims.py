"""Claims of the source documents, and what becomes of them: a row each, as CSV, a table, or Markdown."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

import pandas as pd
from pydantic import Field

from grade.config import Config
from grade.files import write_text

ABOUT = 0.25
"""The documents write "~": a figure within a quarter of the stated range counts as confirmed."""

How = Literal["traced", "measured", "counted", "derived"]
"""The real step without data; run here; live bytes of real tensors; arithmetic, or read in the published code."""
Verdict = Literal["confirmed", "refuted", "partly", "undecided", "not testable"]


class Claim(Config):
    """A claim with its verdict."""

    seed: str = Field(min_length=1, description="the document's number")
    claim: str = Field(min_length=1, description="what the document says, in its words as far as they are short")
    stated: str = Field(description="the figure that it gives, as it writes it")
    found: float | str = Field(description="the figure that was obtained here, or text")
    unit: str = Field("", description="unit of the figure; empty for text")
    how: How = Field(description="where the figure is from")
    verdict: Verdict
    note: str = Field(description="what explains the verdict, with the figures that go with it")


COLUMNS = tuple(Claim.model_fields)


def claims_table(claims: Iterable[Claim]) -> pd.DataFrame:
    """The claims as a table of text, figures to 6 significant digits.

    >>> row = Claim(seed="000", claim="4 GB of soft tokens", stated="4 GB", found=8.192, unit="MB", how="derived",
    ...             verdict="refuted", note="1*64*32000*4 bytes")
    >>> claims_table([row])[["stated", "found", "unit", "verdict"]].iloc[0].tolist()
    ['4 GB', '8.192', 'MB', 'refuted']
    """
    table = pd.DataFrame([claim.model_dump() for claim in claims], columns=list(COLUMNS))
    return table.assign(found=[x if isinstance(x, str) else _number(x) for x in table.found])


def write_claims(path: str | Path, claims: Iterable[Claim]) -> None:
    """Write ``claims.csv`` in one step."""
    write_text(path, claims_table(claims).to_csv(index=False, lineterminator="\n"))


def read_claims(path: str | Path) -> list[Claim]:
    """Read a file that `write_claims` wrote; figures stay the text that is in the file."""
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    return [Claim.parse(row, str(path)) for row in table.to_dict("records")]


def verdict_counts(claims: Iterable[Claim]) -> str:
    """How many claims of each document got which verdict, as a Markdown table."""
    verdicts = list(get_args(Verdict))
    table = pd.DataFrame([(c.seed, c.verdict) for c in claims], columns=["document", "verdict"])
    counts = pd.crosstab(table.document, table.verdict).reindex(columns=verdicts, fill_value=0)
    return markdown(counts.reset_index())


def to_markdown(claims: Iterable[Claim]) -> str:
    """The claims as a Markdown table, figure and unit in one column."""
    table = claims_table(claims)
    table["found"] = [f"{found} {unit}".strip() for found, unit in zip(table.found, table.unit, strict=True)]
    return markdown(table.drop(columns="unit"))


def markdown(table: pd.DataFrame) -> str:
    """A table as Markdown."""
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
    return low * (1 - ABOUT) <= found <= (low if high is None else high) * (1 + ABOUT)


def _number(value: float) -> str:
    """Significant digits without an exponent where one can do without: 1475000, not 1.475e+06."""
    return f"{value:.0f}" if abs(value) >= 10**6 else f"{value:.6g}"
