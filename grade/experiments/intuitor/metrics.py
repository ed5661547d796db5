"""Figures of the experiment on Intuitor, and verdicts on document 004 (``claims.yaml``)."""

from collections.abc import Mapping
from typing import Any

from grade.experiments.claims import Claim, judge
from grade.experiments.formulas import rows_bytes
from grade.experiments.intuitor.measure.tables import SETTINGS, STATED_GB
from grade.experiments.measured import Tables, figures_of
from grade.memory.shapes import ModelShape

LENGTH = 6144  # tokens at which the document states its sizes


def metrics(tables: Tables) -> dict[str, float]:
    """Scores in nats, peaks in decimal GB, sequences that fit a GPU."""
    lengths, sweep = tables["lengths"], tables["sweep"]
    names = lengths.step.str.replace(", ", "_").str.replace(" ", "_").str.lower()
    return {
        **{f"intuitor/{name}": value for name, value in tables["certainty"].items()},
        **figures_of(tables["fits"], "intuitor/{setting}_fits_{logits}", {"": "fits"}),
        **figures_of(lengths.assign(name=names), "intuitor/peak_gb_{tokens}_{name}", {"": "peak_gb"}),
        **{f"intuitor/sweep_{x}": sweep[x].iloc[-1] - sweep[x].iloc[0] for x in ("published", "document")},
    }


def intuitor_claims(
    shape: ModelShape, rows_gb: Mapping[str, float], peaks: Mapping[int, Mapping[str, float]], m: Mapping[str, float]
) -> list[Claim]:
    """A verdict on each claim of document 004, from GB by formula and row, traced GB by length and step, figures."""
    nearest = min(peaks, key=lambda n: abs(n - LENGTH))
    pairs = {n: (at["Intuitor, dense logits"], at["PPO, dense logits"]) for n, at in peaks.items()}
    more = {n: ours - ppo for n, (ours, ppo) in pairs.items()}
    factors = {n: ours / ppo for n, (ours, ppo) in pairs.items()}
    four, eighteen = (64 * n * shape.vocab * 8 / 1e9 for n in (4096, 18_432))
    figures: dict[str, Any] = {
        **m, **{f"{row} GB": size for row, size in rows_gb.items()},
        **{f"{step} GB": peak for step, peak in peaks[nearest].items()},
        "Intuitor more GB": more[nearest], "Intuitor most more GB": max(more.values()),
        "scores": rows_bytes(64, 4096, 1), "64 prompts of 16": 64 * 16, "L": shape.layers,
        "all at once TB": 16 * 2 * rows_gb["full logits"] / 1e3, "its rows GB": 3 + 1.2 + 0.0008 + 3 + 6,
        "largest factor": max(factors.values()),
        "factors": ", ".join(f"{n}: {factors[n]:.2f}" for n in sorted(set(STATED_GB) & set(peaks))),
        "less by its formula": 1 - four / eighteen, "18K TB": eighteen / 1e3, "4K GB": four,
        "logits of a sequence": rows_bytes(1, LENGTH, shape.vocab),
        "conservative GB": 16 * 4 * 3072 * shape.vocab * 8 / 1e9,
        "aggressive TB": 32 * 8 * 4096 * shape.vocab * 8 / 1e9 / 1e3,
    }  # fmt: skip
    for name in SETTINGS:
        fits = m[f"intuitor/{name}_fits_chunked"]
        figures[f"{name}/most"] = f"{fits:.0f}" + (" (all that are asked for)" if fits >= 32 else "")
    return judge("intuitor", figures)
