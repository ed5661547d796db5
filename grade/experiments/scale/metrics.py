"""Figures of the experiment on scale, from its tables."""

from __future__ import annotations

import pandas as pd

from grade.experiments.measured import Tables

GIB = 2**30
OWN, PEER = "own", "trl"
Values = dict[str, float | int | str]


def metrics(tables: Tables) -> Values:
    """Every figure that is the same in every run.

    Names to values; what a table does not hold has no figure.

    - ``fsdp2/max_rel_diff`` of the adapter after training, two processes against one, over all methods, and
      ``fsdp2/methods``; ``fsdp2/held_share``, the largest share of the base's bytes that a process holds;
    - ``fsdp2/trace_rel_error``, the largest of traced against tracked peaks, and ``fsdp2/trace_steps``;
    - ``gpus/<sharding>_<n>/peak_gib`` and ``received_gib`` of one of n GPUs, traced;
    - ``lean/step_gib``, what the lean step needs over its weights, traced;
    - ``sampler/chi2_p``, the smallest of other samplers than our own, each also ``sampler/<name>/chi2_p`` with
      ``n``, ``mean_ratio`` and ``largest_difference``; ``sampler/<name>/training_difference`` to our own with
      ``_stderr`` and ``_n``.
    """
    return _fsdp2(tables) | _memory(tables) | _samplers(tables)


def timed_metrics(tables: Tables) -> Values:
    """Figures of seconds.

    ``fits/seconds``, the median search, and ``fits/cpu_seconds``; ``sampler/over_trl``, the least seconds of a
    sampler over TRL's in the largest batch, with ``_low`` and ``_high``, and ``sampler/best``; below
    ``sampler/over_trl_<batch>/`` every sampler's.
    """
    found: Values = {}
    fits = tables["fits"]
    if len(fits):
        found = {"fits/seconds": fits["wall_seconds"].median(), "fits/cpu_seconds": fits["cpu_seconds"].median()}
    ratios = peer_ratios(tables["sampling"])
    for row in ratios.itertuples():
        found[f"sampler/over_trl_{row.batch}/{row.sampler}"] = row.ratio
    if len(ratios):
        last = ratios[ratios["batch"] == ratios["batch"].max()]
        best = last.loc[last["ratio"].idxmin()]
        found |= {"sampler/over_trl": best.ratio, "sampler/over_trl_low": best.ratio_low,
                  "sampler/over_trl_high": best.ratio_high, "sampler/best": best.sampler}  # fmt: skip
    return found


def peer_ratios(sampling: pd.DataFrame) -> pd.DataFrame:
    """Rows of `sampling_ratios` of all but TRL; none where TRL was not there."""
    from grade.experiments.scale.measure.sampling import sampling_ratios

    if PEER not in set(sampling["sampler"]):
        return pd.DataFrame(columns=["batch", "sampler", "ratio", "ratio_low", "ratio_high"])
    ratios = sampling_ratios(sampling)
    return ratios[ratios["sampler"] != PEER].reset_index(drop=True)


def _fsdp2(tables: Tables) -> Values:
    found: Values = {}
    methods, sharded = tables["fsdp2"], tables["sharded"]
    if len(methods):
        base = methods["bytes"] - methods["adapter_bytes"]
        held = methods[["bytes_0", "bytes_1"]].max(axis=1) - methods["adapter_bytes"]
        found |= {"fsdp2/max_rel_diff": methods["max_rel_diff"].max(), "fsdp2/methods": len(methods),
                  "fsdp2/held_share": (held / base).max()}  # fmt: skip
    if len(sharded):
        found |= {"fsdp2/trace_rel_error": sharded["rel_error"].abs().max(),
                  "fsdp2/trace_steps": sharded["step"].nunique()}  # fmt: skip
    return found


def _memory(tables: Tables) -> Values:
    found: Values = {}
    for row in tables["gpus"].itertuples():
        key = f"gpus/{row.sharding}_{row.gpus}"
        found |= {f"{key}/peak_gib": row.peak / GIB, f"{key}/received_gib": row.received / GIB}
    lean = tables["lean"].set_index("phase")["over_weights_gib"]
    return found | {"lean/step_gib": lean["step"]}


def _samplers(tables: Tables) -> Values:
    found: Values = {}
    law = tables["law"]
    for row in law.itertuples():
        key = f"sampler/{row.sampler}"
        found |= {f"{key}/chi2_p": row.p, f"{key}/chi2_n": row.n, f"{key}/mean_ratio": row.mean_ratio,
                  f"{key}/largest_difference": row.largest_difference}  # fmt: skip
    others = law[law["sampler"] != OWN]
    if len(others):
        found["sampler/chi2_p"] = others["p"].min()
    if len(tables["training"]):
        from grade.experiments.scale.measure.sampling import training_differences

        for row in training_differences(tables["training"]).itertuples():
            key = f"sampler/{row.sampler}/training_difference"
            found |= {key: row.difference, f"{key}_stderr": row.stderr, f"{key}_n": row.n}
    return found
