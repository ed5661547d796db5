"""What the notebook of an experiment leaves in its folder: figures, tables, and verdicts on a document's claims."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import PIL.Image
from IPython.display import Image, display
from matplotlib.figure import Figure

from grade.experiments.claims import COLUMNS, Claim, about, claims_table, write_claims
from grade.files import write_text

ROOT = Path(__file__).parents[2]
"""The project's root: where relative paths of a notebook's parameters start, wherever its kernel runs."""
MOST_COLORS = 128
"""Of a picture: enough for curves and text."""


def output_folder(path: str | Path) -> Path:
    """A folder of results, made if it is missing. A relative path starts at the project's root, not at the notebook."""
    folder = ROOT / path
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def save_figure(figure: Figure, path: str | Path) -> Image:
    """Write a figure as a PNG of at most `MOST_COLORS` colours, a third of the bytes; return it to be shown."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    with PIL.Image.open(path) as picture:
        picture.convert("RGB").quantize(MOST_COLORS).save(path, optimize=True)
    plt.close(figure)
    return Image(path, width=int(100 * figure.get_figwidth()))


def kept_table(path: str | Path, settings: Mapping[str, Any], make: Callable[[], pd.DataFrame]) -> pd.DataFrame:
    """A table that takes minutes: read from a file if these settings made it, otherwise made and written there.

    Args:
        path: A file of CSV. Its first line holds the settings, as JSON after "# ".
        settings: Everything that the rows depend on besides the code. Who changes the code deletes the file.
        make: Makes the rows; the index is not kept. Text comes back as it was, except "NaN", which is a missing number.

    Returns:
        The rows as they were written, numbers bit by bit, so that a table is the same whether it was made or read.
    """
    path, first = Path(path), f"# {json.dumps(settings)}\n"
    if not path.is_file() or path.open(encoding="utf-8").readline() != first:
        write_text(path, first + make().to_csv(index=False, na_rep="NaN", lineterminator="\n"))
    options = dict(keep_default_na=False, na_values=["NaN"], lineterminator="\n")  # text may hold \r, or nothing
    return pd.read_csv(path, skiprows=1, float_precision="round_trip", **options)


def save_verdicts(document: str, rows: Iterable[Sequence[Any]], folder: str | Path) -> None:
    """Write the verdicts on a document's claims to ``claims.csv``, and show them.

    Args:
        document: The document's number.
        rows: For every claim, seven values: the claim in the document's words; the figure that it gives, as it writes
            it; the figure that was found, or text; its unit; how it was found (`grade.experiments.claims.How`); the
            verdict, a bool for confirmed or refuted, or `about`: of the figure found and the one given; and what
            explains it.
        folder: Where the file goes.

    Raises:
        InputError: For another verdict than `grade.experiments.claims.Verdict`, or a figure that is not finite.
    """
    claims = []
    for claim, stated, found, unit, how, verdict, note in rows:
        found = found if isinstance(found, str) else float(found)
        verdict = about(found, float(stated.split()[0])) if verdict is about else verdict
        verdict = verdict if isinstance(verdict, str) else ("confirmed" if verdict else "refuted")
        values = document, claim, stated, found, unit, how, verdict, note
        claims.append(Claim.parse(dict(zip(COLUMNS, values, strict=True)), claim))
    write_claims(Path(folder) / "claims.csv", claims)
    table = claims_table(claims)
    with pd.option_context("display.max_colwidth", None, "display.max_rows", None):
        display(table)
        display(table.verdict.value_counts())
