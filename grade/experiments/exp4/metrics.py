"""Figures of experiment 4, and verdicts on document 001 (``claims.yaml``)."""

from typing import Any

import pandas as pd

from grade.experiments.claims import Claim, about, judge
from grade.experiments.measured import Tables, figures_of

GIB = 2**30
_PUBLISHED = {
    "legacy_fp32": "start", "bf16": "loop", "bf16_checkpointed": "loop_checkpointed", "autocast": "autocast",
    "replay": "lean",
}  # fmt: skip
"""Names of figures, and the configurations that they are of."""
GB = 1e9


def metrics(tables: Tables) -> dict[str, float]:
    """Peaks and what the step adds in GiB, operations in TFLOP."""
    rows = tables["configurations"].set_index("configuration").loc[list(_PUBLISHED.values())]
    shown = rows.assign(key=list(_PUBLISHED), peak=rows.peak_bytes / GIB, step=rows.step_bytes / GIB,
                        tflop=rows.flops / 1e12)  # fmt: skip
    ends = {"_peak_gib": "peak", "_step_gib": "step", "_tflop": "tflop"}
    return figures_of(shown, "exp4/{key}", ends)


def exp4_claims(configurations: pd.DataFrame) -> list[Claim]:
    """A verdict on each claim of document 001, from the table `configurations`."""
    at = configurations.set_index("configuration")
    start, after = at.loc["start"], at.loc["all_six"]
    figures: dict[str, Any] = {}
    for name, row in at.iterrows():
        figures |= {
            f"{name} peak": row.peak_bytes, f"{name} weights": row.weights_bytes, f"{name} step": row.step_bytes,
            f"{name} forwards": row.token_forwards, f"{name} less": start.peak_bytes - row.peak_bytes,
            f"{name} saved": 1 - row.peak_bytes / start.peak_bytes,
            f"{name} step saved": 1 - row.step_bytes / start.step_bytes,
        }  # fmt: skip
    figures |= {
        "token-forwards saved": 1 - at.token_forwards["shorter"] / start.token_forwards,
        "eager": after.step_bytes - at.step_bytes["loop_checkpointed"],
        "slower": at.flops["loop_checkpointed"] / at.flops["loop"] - 1,
        "weights as stated": about(start.weights_bytes / GB, 48) and about(after.weights_bytes / GB, 24),
        "freeing/verdict": "partly" if at.peak_bytes["freeing"] < start.peak_bytes else "refuted",
    }
    together, kept = after.step_bytes / GB, at.step_bytes["all_six_kept"] / GB
    nearer = ", which is nearer to the stated figure" if abs(kept - 12.5) < abs(together - 12.5) else ""
    figures["activations/note"] = f"what the step adds; without checkpointing {kept:.1f} GB{nearer}"
    return judge("exp4", figures)
