"""A folder of results on one page: its ``README.md``, generated from the metrics.

``report.yaml`` lists the figures; every one is read from a ``metrics.json``, and a table whose file is missing is left
out. Figures of seconds stand below ``timings``, and not here, so that the page stays the same when results are made
again.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from grade.config_files import parse_yaml
from grade.experiments.claims import Claim, markdown, read_claims, to_markdown, verdict_counts, write_claims
from grade.files import write_text
from grade.results import read_metrics

FILE = Path(__file__).with_suffix(".yaml")


def write_report(outputs: str | Path) -> list[Claim]:
    """Write ``README.md``, and the joined verdicts as ``claims.csv`` and ``claims.md``; return these."""
    outputs, claims = Path(outputs), join_claims(outputs)
    title = "# Claims of the source documents and verdicts"
    write_claims(outputs / "claims.csv", claims)
    write_text(outputs / "claims.md", f"{title}\n\n{verdict_counts(claims)}\n{to_markdown(claims)}")
    write_text(outputs / "README.md", report(outputs))
    return claims


def report(outputs: str | Path) -> str:
    """The page as Markdown: what lies in folders below ``outputs``, each with the executed notebook that made it."""
    outputs = Path(outputs)
    notebooks = {path.parent.name: path.stem for path in sorted(outputs.glob("*/[!.]*.ipynb"))
                 if not path.stem.endswith(".failed")}  # fmt: skip
    links = [f"- [{key}]({key}/{name}.ipynb)" for key, name in notebooks.items()]
    claims = join_claims(outputs)
    heading = "## The documents' claims\n\nEvery claim with its figure: [claims.md](claims.md).\n\n"
    parts = [
        f"# Results in `{outputs.as_posix()}`",
        "Generated from the metrics by the pipeline's last stage. ± is a standard error; *of the "
        "paired difference*: over prompts, before against after. Files and folders called `timings` hold "
        "seconds, memory of the process, versions and commits.",
        "\n".join(["Executed notebooks:", "", *links]) if links else "",
        heading + verdict_counts(claims) if claims else "",
    ]
    parts += [_section(outputs, **section) for section in parse_yaml(FILE.read_text(encoding="utf-8"))]
    parts += [_methods(outputs, key) for key, notebook in notebooks.items() if notebook == "limit"]
    parts += [_worth(outputs, key) for key, notebook in notebooks.items() if notebook == "estimators"]
    return "\n\n".join(part for part in parts if part) + "\n"


def join_claims(outputs: str | Path) -> list[Claim]:
    """The verdicts in folders below ``outputs``, by document; another folder of results has a page."""
    files = [file for file in sorted(Path(outputs).glob("*/claims.csv")) if not file.with_name("README.md").exists()]
    return sorted((claim for file in files for claim in read_claims(file)), key=lambda claim: claim.seed)


def _metrics(outputs: Path, folder: str) -> dict[str, Any]:
    path = outputs / folder / "metrics.json"
    return read_metrics(path) if path.is_file() else {}


def _section(outputs: Path, title: str, folder: str, text: str, rows: list[list[str]]) -> str:
    metrics = _metrics(outputs, folder)
    cells = [(label, _value(metrics, key, *stderr), f"`{key}`") for label, key, *stderr in rows
             if metrics.get(key) is not None]  # fmt: skip
    return _table(title, text, ["figure", "value", f"key in `{folder}/metrics.json`"], cells)


def _methods(outputs: Path, key: str) -> str:
    """Held-out reward of every method at the target KL, by policy and reward."""
    metrics = _metrics(outputs, key)
    known = [match for name in metrics if (match := re.fullmatch(r"reward_at_(\S+)/(\w+)/(\w+)", name))
             and f"{name}_stderr" in metrics]  # fmt: skip
    methods, tasks = (list(dict.fromkeys(match[part] for match in known)) for part in (3, 2))
    rows = [[f"`{method}`", *(_value(metrics, f"reward_at_{known[0][1]}/{task}/{method}") for task in tasks)]
            for method in methods]  # fmt: skip
    kl = known[0][1] if known else ""
    text = f"Held-out reward at {kl} nats per completion, ± over seeds and prompts; `_n` in `metrics.json`: seeds. " \
           "A bias from texts, a gradient or states is fitted once, `tilt` refits its own along the run."  # fmt: skip
    return _table(f"Methods side by side: {key}", text, ["method", *tasks], rows)


def _worth(outputs: Path, key: str) -> str:
    """How many rloo samples one ste sample is worth, by reward."""
    metrics = _metrics(outputs, key)
    names = [name for name in metrics if re.fullmatch(r"(after/)?worth/\w+", name) and f"{name}_low" in metrics]
    rows = [(n, f"{metrics[n]:.3g}", f"{metrics[f'{n}_low']:.3g} to {metrics[f'{n}_high']:.3g}") for n in names]
    text = "The `rloo` samples that one `ste` sample replaces, with a 95 % interval; `after`: of the trained policy."
    return _table(f"Worth of a sample: {key}", text, ["reward", "worth", "interval"], rows)


def _table(title: str, text: str, columns: list[str], rows: list[Any]) -> str:
    """A section with one table; nothing without rows."""
    table = markdown(pd.DataFrame(rows, columns=columns)).rstrip()
    return f"## {title}\n\n{text}\n\n{table}" if rows else ""


def _value(metrics: Mapping[str, float], key: str, stderr: str = "") -> str:
    value, error = metrics.get(key), metrics.get(stderr or f"{key}_stderr")
    if value is None:
        return "not run"
    text = str(value) if isinstance(value, int) else f"{value:.3g}"
    return text if error is None else f"{text} ± {error:.2g}"
