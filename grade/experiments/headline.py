"""The headline figures of a profile: published, made again, and how far apart the two may be.

``headline.yaml`` names them once. `headline` is the small file that ``dvc exp show`` lists; `check` compares the
figures in the working folder with those of a git revision. Runs that train on another processor follow another course
after the first rounding, so trained figures have tolerances from their own standard errors; traced and counted ones
none to speak of.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import yaml

from grade.config import Config
from grade.errors import InputError
from grade.experiments.measured import published_text
from grade.results import read_metrics

FILE = Path(__file__).with_suffix(".yaml")


class _Figure(Config):
    """A row of ``headline.yaml``: one of ``share``, ``stderrs`` and ``at_most`` is the tolerance."""

    name: str = ""  # a column of dvc exp show; empty for a figure that is only checked
    label: str
    file: str  # metrics file below the profile's folder of results
    key: str  # name of the figure there
    share: float = 0.0  # within this share of the published figure
    stderrs: float = 0.0  # or within so many standard errors of the difference of two runs
    at_most: float | None = None  # or below this, whatever was published
    reason: str

    def allowed(self, metrics: Mapping[str, float]) -> tuple[float, float]:
        """The least and the largest value that passes, given the published metrics."""
        if self.at_most is not None:
            return -math.inf, self.at_most
        published = metrics[self.key]
        stderr = metrics[f"{self.key}_stderr"] if self.stderrs else 0.0
        width = self.stderrs * math.sqrt(2) * stderr + self.share * abs(published)
        return published - width, published + width


def figures(path: Path = FILE) -> list[_Figure]:
    """The rows of ``headline.yaml``."""
    return [_Figure.parse(row, path.name) for row in yaml.safe_load(path.read_text(encoding="utf-8"))]


def headline(outputs: str | Path) -> dict[str, float]:
    """The named figures of a folder of results; one whose file or key is missing there is left out."""
    values = {}
    for figure in figures():
        path = Path(outputs) / figure.file
        value = read_metrics(path).get(figure.key) if figure.name and path.is_file() else None
        if value is not None:
            values[figure.name] = value
    return values


def check(outputs: str | Path, revision: str = "HEAD") -> pd.DataFrame:
    """The figures of a folder of results, relative to the working folder, beside those of a git revision.

    A row per figure: what was published, yours, the least and the largest value that passes, whether yours does.
    """
    rows = []
    for figure in figures():
        file = f"{Path(outputs).as_posix()}/{figure.file}"
        text = published_text(file, revision) if revision else None
        published = {} if text is None else pd.json_normalize(json.loads(text), sep="/").to_dict("records")[0]
        if figure.key not in published:
            continue
        low, high = figure.allowed(published)
        yours = read_metrics(file).get(figure.key)
        if yours is None:
            raise InputError(f"{figure.file}: figure", figure.key, "a figure that the file has")
        holds = low <= yours <= high
        rows.append(dict(figure=figure.label, published=published[figure.key], yours=yours, low=low, high=high,
                         holds=holds, reason=figure.reason))  # fmt: skip
    if not rows:
        raise InputError("revision", revision, f"a git revision that has results in {outputs}")
    return pd.DataFrame(rows)


def as_text(table: pd.DataFrame) -> str:
    """The check as a table for a terminal, at most 120 columns wide, with the tolerances' reasons and a count below."""
    reasons = table.reason.unique().tolist()
    lines = [f"{'figure':<66}{'published':>10}{'yours':>10}  {'allowed':<20} why"]
    for row in table.itertuples():
        allowed = f"at most {row.high:.4g}" if row.low == -math.inf else f"{row.low:.4g} to {row.high:.4g}"
        why = f"[{reasons.index(row.reason) + 1}] {'ok' if row.holds else 'OUT'}"
        lines.append(f"{row.figure:<66}{row.published:>10.4g}{row.yours:>10.4g}  {allowed:<20} {why}")
    lines += [f"[{number}] {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join([*lines, f"{table.holds.sum()} of {len(table)} figures are within their tolerance"])
