"""Figures of the experiment on activation caching, from its tables."""

from __future__ import annotations

import pandas as pd

from grade.experiments.caching.measure.tables import COPY, Settings
from grade.experiments.formulas import rows_bytes
from grade.experiments.measured import Tables, figures_of
from grade.experiments.traced import shape_of

GB = 1e9


def metrics(tables: Tables, settings: Settings) -> dict[str, float | str]:
    """Bytes of one layer, peaks in decimal GB and MB, log-probabilities and KL in nats, other differences relative."""
    shape, length = shape_of(settings.model), settings.prompt_tokens + settings.new_tokens
    parts, eager = layer_parts(tables["layer"], "sdpa"), layer_parts(tables["layer"], "eager")
    peaks, policy, agreement = tables["peaks"], tables["policy"], tables["agreement"]
    peak = peaks.set_index("option").peak_bytes
    options = peaks[peaks.option != COPY].assign(peak_gb=peaks.peak_bytes / GB, step_gb=peaks.step_bytes / GB)
    measured = ("ref_max_abs_diff", "grad_rel_diff", "peak_mb")
    kept = shape.layers * parts.sum() + rows_bytes(settings.batch, length, shape.vocab, 2)
    return {
        **{f"caching/layer_{name.replace(' ', '_').lower()}_bytes": int(n) for name, n in parts.items()},
        "caching/layer_bytes": int(parts.sum()), "caching/layer_eager_bytes": int(eager.sum()),
        **figures_of(options, "caching/traced_{option}", {"_peak_gb": "peak_gb", "_step_gb": "step_gb"}),
        **figures_of(agreement.assign(peak_mb=agreement.peak_bytes / 1e6), "caching/measured_{option}",
                     {f"_{name}": name for name in measured}),
        "caching/forward_kept_gb": kept / GB,
        "caching/second_base_gb": (peak[COPY] - peak["selected"]) / GB,
        "caching/stored_bytes_per_sample": rows_bytes(1, length - 1, 1),
        "caching/last_layer_difference": tables["layer_differences"].relative_difference.iloc[-1],
        "caching/train_eval_difference": policy["dropout"],
        "caching/kl_to_base": policy["kl_to_base"], "caching/kl_to_itself": policy["kl_to_itself"],
        "caching/model": settings.model,
    }  # fmt: skip


def timed_metrics(tables: Tables) -> dict[str, float]:
    """Time of each option over that of ``selected``."""
    seconds = tables["seconds"].set_index("option").seconds
    return {f"caching/measured_{o}_over_selected_seconds": s / seconds["selected"] for o, s in seconds.items()}


def layer_parts(layer: pd.DataFrame, attention: str) -> pd.Series:
    """Bytes that one layer keeps with ``sdpa`` or ``eager`` attention, by group."""
    return layer[layer.attention == attention].groupby("group")["bytes"].sum()
