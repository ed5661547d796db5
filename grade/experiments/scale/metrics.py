"""Figures of the experiment on scale, from its tables; what a table does not hold has no figure."""

from __future__ import annotations

import pandas as pd

from grade.experiments.measured import Tables, figures_of
from grade.experiments.scale.measure.sampling import PEER, sampling_ratios, training_differences
from grade.experiments.scale.measure.tables import GIB

OWN = "own"
Values = dict[str, float | int | str]


def metrics(tables: Tables) -> Values:
    """Every figure that is the same in every run.

    Figures of ``fsdp2`` are the largest over methods, steps and processes, ``gpus/<sharding>_<n>`` those of one of n
    GPUs; ``lean/step_gib`` is what the lean step needs over its weights.
    """
    methods, sharded, gpus, law = (tables[name] for name in ("fsdp2", "sharded", "gpus", "law"))
    values: Values = {}
    if len(methods):
        held = methods[["bytes_0", "bytes_1"]].max(axis=1) - methods.adapter_bytes
        values |= {"fsdp2/max_rel_diff": methods.max_rel_diff.max(), "fsdp2/methods": len(methods),
                   "fsdp2/held_share": (held / (methods.bytes - methods.adapter_bytes)).max()}  # fmt: skip
    if len(sharded):
        values |= {"fsdp2/trace_rel_error": sharded.rel_error.abs().max(), "fsdp2/trace_steps": sharded.step.nunique()}
    sizes = gpus.assign(peak_gib=gpus.peak / GIB, received_gib=gpus.received / GIB)
    values |= figures_of(sizes, "gpus/{sharding}_{gpus}", ("peak_gib", "received_gib"))
    values["lean/step_gib"] = tables["lean"].set_index("phase").over_weights_gib["step"]
    columns = {"/chi2_p": "p", "/chi2_n": "n", "/mean_ratio": "mean_ratio", "/largest_difference": "largest_difference"}
    values |= figures_of(law, "sampler/{sampler}", columns)
    if (law.sampler != OWN).any():
        values["sampler/chi2_p"] = law.p[law.sampler != OWN].min()
    if len(tables["training"]):
        values |= figures_of(training_differences(tables["training"]), "sampler/{sampler}/training_difference",
                             {"": "difference", "_stderr": "stderr", "_n": "n"})  # fmt: skip
    return values


def timed_metrics(tables: Tables) -> Values:
    """``fits/seconds``, the median search; a sampler's seconds over TRL's, and the best in the largest batch."""
    fits, ratios = tables["fits"], peer_ratios(tables["sampling"])
    values: Values = {}
    if len(fits):
        values = {"fits/seconds": fits.wall_seconds.median(), "fits/cpu_seconds": fits.cpu_seconds.median()}
    values |= figures_of(ratios, "sampler/over_trl_{batch}/{sampler}", {"": "ratio"})
    if len(ratios):
        best = ratios[ratios.batch == ratios.batch.max()].sort_values("ratio").iloc[0]
        values |= {"sampler/over_trl": best.ratio, "sampler/over_trl_low": best.ratio_low,
                   "sampler/over_trl_high": best.ratio_high, "sampler/best": best.sampler}  # fmt: skip
    return values


def peer_ratios(sampling: pd.DataFrame) -> pd.DataFrame:
    """Rows of `sampling_ratios` of all but TRL; none where TRL was not there."""
    if PEER not in set(sampling["sampler"]):
        return pd.DataFrame(columns=["batch", "sampler", "ratio", "ratio_low", "ratio_high"])
    ratios = sampling_ratios(sampling)
    return ratios[ratios["sampler"] != PEER].reset_index(drop=True)
