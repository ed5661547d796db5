"""Figures of the experiment on activation caching, from its tables."""

from __future__ import annotations

import pandas as pd

from grade.experiments.caching.measure.tables import COPY, Settings
from grade.experiments.formulas import rows_bytes
from grade.experiments.measured import Tables
from grade.experiments.traced import shape_of

GB = 1e9


def metrics(tables: Tables, settings: Settings) -> dict[str, float | str]:
    """Every figure that is the same in each run.

    Names to values: bytes of one layer, peaks in decimal GB and MB, differences of log-probabilities and KL in
    nats, other differences relative.
    """
    shape, length = shape_of(settings.model), settings.prompt_tokens + settings.new_tokens
    parts, eager = layer_parts(tables["layer"], "sdpa"), layer_parts(tables["layer"], "eager")
    peaks, policy = tables["peaks"].set_index("option"), tables["policy"]
    figures = {f"caching/layer_{name.replace(' ', '_').lower()}_bytes": int(n) for name, n in parts.items()}
    figures |= {"caching/layer_bytes": int(parts.sum()), "caching/layer_eager_bytes": int(eager.sum())}
    for row in tables["peaks"].query("option != @COPY", local_dict={"COPY": COPY}).itertuples():
        figures[f"caching/traced_{row.option}_peak_gb"] = row.peak_bytes / GB
        figures[f"caching/traced_{row.option}_step_gb"] = row.step_bytes / GB
    for row in tables["agreement"].itertuples():
        figures[f"caching/measured_{row.option}_ref_max_abs_diff"] = row.ref_max_abs_diff
        figures[f"caching/measured_{row.option}_grad_rel_diff"] = row.grad_rel_diff
        figures[f"caching/measured_{row.option}_peak_mb"] = row.peak_bytes / 1e6
    kept = shape.layers * parts.sum() + rows_bytes(settings.batch, length, shape.vocab, 2)
    return figures | {
        "caching/forward_kept_gb": kept / GB,
        "caching/second_base_gb": (peaks.peak_bytes[COPY] - peaks.peak_bytes["selected"]) / GB,
        "caching/stored_bytes_per_sample": rows_bytes(1, length - 1, 1),
        "caching/last_layer_difference": tables["layer_differences"].relative_difference.iloc[-1],
        "caching/train_eval_difference": policy["dropout"],
        "caching/kl_to_base": policy["kl_to_base"],
        "caching/kl_to_itself": policy["kl_to_itself"],
        "caching/model": settings.model,
    }


def timed_metrics(tables: Tables) -> dict[str, float]:
    """Time of each option over that of ``selected``."""
    seconds = tables["seconds"].set_index("option").seconds
    return {f"caching/measured_{o}_over_selected_seconds": s / seconds["selected"] for o, s in seconds.items()}


def layer_parts(layer: pd.DataFrame, attention: str) -> pd.Series:
    """Bytes that one layer keeps, by group."""
    return layer[layer.attention == attention].groupby("group")["bytes"].sum()
