"""One HTML page of a training run: curves, completions of the evaluations by step, liked tokens, settings, command.

Everything is in the page itself (``page.html.jinja``): style, the curves as SVG, no script and no address. What the run
wrote is escaped.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader
from matplotlib import style
from matplotlib.figure import Figure

_STYLE = ["seaborn-v0_8-whitegrid", "tableau-colorblind10", {"svg.fonttype": "none", "svg.hashsalt": "grade"}]
_PANELS = {"reward": "reward of the training batches", "KL": "KL to the base, nats per token",
           "held-out reward": "held-out reward ± standard error", "R2": "R² of the distilled reward"}  # fmt: skip


def page(
    title: str, summary: str, rows: pd.DataFrame, evaluations: dict[int, pd.DataFrame], tokens: list[list[str]],
    settings: dict[str, Any], command: str, versions: dict[str, str], most: int, shown: Callable[..., str],
) -> str:  # fmt: skip
    """The page; ``rows`` is the history, ``most`` prompts are shown; without ``versions`` those that are installed."""
    here = {name: f"{version(name)} (where this page was made)" for name in ("torch", "transformers", "peft")}
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    environment.filters["shown"] = shown
    values = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()
              if value not in (None, "", [], {})}  # fmt: skip
    return environment.get_template("page.html.jinja").render(
        title=title, summary=summary, curves=_curves(rows, settings.get("target_kl")) if len(rows) else "",
        steps=list(evaluations), prompts=_side_by_side(evaluations, most), tokens=tokens,
        command=command, versions={name: versions.get(name, text) for name, text in here.items()}, settings=values,
    )  # fmt: skip


def _side_by_side(evaluations: dict[int, pd.DataFrame], most: int) -> list[tuple[str, list[dict[str, Any] | None]]]:
    """Prompts with one completion for each step, None where a step has none; a prompt may be there several times."""
    rows: dict[tuple[str, int], dict[int, dict[str, Any]]] = {}
    for step, table in evaluations.items():
        parts = list(table.attrs["names"].values())
        for i, row in zip(table.groupby("prompt").cumcount(), table.to_dict("records"), strict=True):
            scores = {name: float(row[name]) for name in ("reward", *(parts if len(parts) > 1 else []))}
            rows.setdefault((row["prompt"], i), {})[step] = {"text": row["completion"], "scores": scores}
    common = sorted(rows.items(), key=lambda item: -len(item[1]))[:most]  # an evaluation may have prompts of its own
    return [(prompt, [row.get(step) for step in evaluations]) for (prompt, _), row in common]


def _curves(rows: pd.DataFrame, target: float | None) -> str:
    """One SVG element, a panel for each figure that was logged; the target is in nats per completion."""
    panels = [name for name in _PANELS if rows[name].notna().any()]
    with style.context(_STYLE):
        figure = Figure(figsize=(9, 2.6 * max(1, -(-len(panels) // 2))), layout="constrained")
        for i, name in enumerate(panels):
            ax = figure.add_subplot(-(-len(panels) // 2), 2, i + 1)
            known = rows.dropna(subset=name)
            errors = known["stderr"] if name == "held-out reward" else None
            mark = "o" if errors is not None or len(known) == 1 else ""
            ax.errorbar(known["step"], known[name], errors, color=f"C{i}", marker=mark, capsize=3, label=name)
            if name == "KL" and target:
                ax.plot(rows["step"], target / rows["length"], "--", color="0.3", label="target / mean length")
                ax.legend(frameon=False)
            if name == "R2":
                ax.set_ylim(max(-1.0, min(0.0, known[name].min())) - 0.05, 1.05)
            ax.set(title=_PANELS[name], xlabel="step")
            ax.xaxis.get_major_locator().set_params(integer=True)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    svg = re.sub(r"<metadata>.*?</metadata>", "", file.getvalue(), flags=re.S)
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg[svg.index("<svg") :])
