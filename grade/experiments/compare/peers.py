"""Figures of the contest with TRL (`grade.experiments.compare.measure.peers`), and its files.

Seconds and memory differ from run to run; the figures that hold them are listed in `TIMED`, and are kept apart.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from grade.experiments.compare.measure.peers import PEER
from grade.experiments.learning import first_reach
from grade.experiments.measured import figures_of, write_environment
from grade.results import write_history, write_metrics

TIMED = ("seconds_per_sample", "peak_mib", "start_mib", "seconds_to_goal", "seconds_over_trl")
"""Names below ``peer/`` of what differs from run to run."""


def write_peers(folder: str | Path, curves: pd.DataFrame, figures: Mapping[str, Any]) -> None:
    """Write ``metrics.json`` and ``curves.csv``, and what differs from run to run below ``timings``."""
    folder, columns = Path(folder), ["method", "beta", "seed", "step", "samples", "seconds"]
    timed = {name: value for name, value in figures.items() if name.split("/")[1] in TIMED}
    write_history(folder / "curves.csv", curves.drop(columns="seconds").to_dict("records"))
    write_history(folder / "timings" / "seconds.csv", curves[columns].to_dict("records"))
    write_metrics(folder / "metrics.json", {name: value for name, value in figures.items() if name not in timed})
    write_metrics(folder / "timings" / "metrics.json", timed)
    write_environment(folder / "timings" / "environment.json")


def peer_figures(curves: pd.DataFrame, costs: pd.DataFrame) -> dict[str, float]:
    """Metrics ``peer/...``: ours against the peer.

    The reward to reach lies half of the way from the untrained policy's to the lowest end of all, so that all
    reach it. Near the ends a policy exploits the reward at a KL of tens of nats, where time says little.

    ``samples_over_trl`` and ``seconds_over_trl`` are of the last of ours. A goal is there only if all gain.
    """
    mib = costs.assign(peak_mib=costs["peak_bytes"] / 2**20, start_mib=costs["start_bytes"] / 2**20)
    figures: dict[str, float] = {}
    for name in ("seconds_per_sample", "peak_mib", "start_mib"):
        figures |= figures_of(mib, f"peer/{name}/{{method}}", {"": name})
    runs = {method: run.sort_values("step") for method, run in curves.groupby("method", sort=False)}
    for method, run in runs.items():
        figures |= {f"peer/end_{name}/{method}": float(run[name].iloc[-1]) for name in ("reward", "kl")}
    base, lowest = runs[PEER]["reward"].iloc[0], min(run["reward"].iloc[-1] for run in runs.values())
    if lowest <= base:
        return figures
    goal = base + 0.5 * (lowest - base)
    *_, last = (method for method in runs if method != PEER)
    at = {name: {method: first_reach(run.assign(samples=run[name]), goal, math.inf)[0] for method, run in runs.items()}
          for name in ("seconds", "samples", "kl")}  # fmt: skip
    for name, label in (("seconds", "seconds_to_goal"), ("samples", "samples_to_goal"), ("kl", "kl_at_goal")):
        figures |= {f"peer/{label}/{method}": value for method, value in at[name].items()}
    ratios = {f"peer/{name}_over_trl": at[name][last] / at[name][PEER] for name in ("seconds", "samples")}
    return figures | ratios | {"peer/goal_reward": goal}
