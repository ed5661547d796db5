"""Figures of Experiment 6, from its tables: those that are the same in every run, and those made of seconds."""

import numpy as np
import pandas as pd

from grade.experiments.exp6.measure.tables import HOPS, Settings
from grade.experiments.measured import Tables, figures_of


def metrics(tables: Tables) -> dict[str, float]:
    """Every figure that does not depend on the machine's speed: P(positive), KL in nats per token, bytes."""
    counted, at_256 = tables["bytes"], mass_at_256(tables["mass"])
    return {
        **run_metrics(tables["runs"]),
        **_parity(tables),
        **{f"memory/{name}": value for name, value in counted.items()},
        "memory/reward_bag_over_gather": counted["reward_bag_bytes"] / counted["reward_gather_bytes"],
        **figures_of(at_256, "support/top256_mass_tau{tau:g}", {"": "mass"}),
    }


def timed_metrics(tables: Tables, settings: Settings) -> dict[str, float]:
    """Every figure made of seconds."""
    times = tables["time_against_tokens"]
    at_headline = times[times["T"] == settings.speed_new_tokens].set_index("engine").seconds
    return {
        "speed/unrolled_over_replay": at_headline["unrolled"] / at_headline["replay"],
        "speed/checkpointed_over_replay": at_headline["checkpointed"] / at_headline["replay"],
        **{f"speed/reference_{form}_seconds": value for form, value in tables["reference_seconds"].items()},
    }


def fitted_exponent(tokens: pd.Series, seconds: pd.Series) -> float:
    """Exponent p of ``seconds ~ tokens^p`` by least squares on logarithms."""
    return float(np.polyfit(np.log(tokens.astype(float)), np.log(seconds.astype(float)), 1)[0])


def run_metrics(runs: pd.DataFrame) -> dict[str, float]:
    """Figures ``train/<run>/...``: means over seeds of the table of runs.

    Standard errors are over prompts; with several seeds, those of the mean of their (nearly independent) estimates.
    """
    figures: dict[str, float] = {}
    for name, rows in runs.groupby(runs["run"].str.rpartition("-")[0]):
        n = len(rows)
        of_run = {
            "val_reward_before": rows["reward before"].mean(),
            "val_reward_after": rows["reward after"].mean(),
            "val_reward_stderr": float(np.sqrt((rows["reward stderr"] ** 2).sum()) / n),
            "gold_before": rows["gold before"].mean(),
            "gold_after": rows["gold after"].mean(),
            "gold_stderr": float(np.sqrt((rows["gold stderr"] ** 2).sum()) / n),
            "kl": rows["KL"].mean(),
            "samples": int(rows["samples"].iloc[0]),
        }
        figures |= {f"train/{name}/{key}": value for key, value in of_run.items()}
    return figures


def mass_at_256(mass: pd.DataFrame) -> pd.DataFrame:
    """The rows of the document's K = 256, or of the largest K below it where the vocabulary is smaller."""
    return mass[mass.K == min(256, mass.K.max())]


def _parity(tables: Tables) -> dict[str, float]:
    hops, course = tables["hops"], tables["parity"]
    warm, cold = hops.iloc[:-2], hops.iloc[-2:]  # the last two rows are those at tau = 1
    straight = warm[warm.estimator == "ste"].set_index(["policy", "hops"]).error
    at_two = {policy: straight[policy, HOPS] for policy in ("untrained", "trained")}
    return {
        **{f"parity/{name}": value for name, value in tables["kl_at_start"].items()},
        "parity/replay_rel_error_ste": max(at_two.values()),
        **{f"parity/replay_rel_error_ste_{policy}": error for policy, error in at_two.items()},
        **{f"parity/replay_rel_error_ste_tau1_hops{n}": error for n, error in zip(cold.hops, cold.error, strict=True)},
        "parity/reward_max_abs_diff": (course.replay_reward - course.legacy_reward).abs().max(),
        "parity/kl_max_abs_diff": (course.replay_kl - course.legacy_kl).abs().max(),
        "parity/steps": len(course),
        "parity/accumulation_rel_error": tables["accumulation"]["rel_error"],
    }
