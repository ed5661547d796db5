"""Experiment 6's tables: any order of measuring gives the same numbers, and times come from where a run keeps them."""

from __future__ import annotations

import pandas as pd
import pytest

from grade.experiments.exp6.measure import tables as experiment
from grade.experiments.exp6.metrics import run_metrics


@pytest.fixture(scope="module")
def toy():
    return experiment.Settings()


def test_tables_do_not_depend_on_what_was_measured_before(toy):
    sizes = dict(runs_dir=str(toy.runs), parity_hops=[0, 2], parity_steps=2)
    forwards, backwards = (experiment.Settings(**sizes) for _ in range(2))
    names = ("kl_at_start", "bytes", "hops", "parity", "kept")
    first = {name: experiment.TABLES[name](forwards) for name in names}
    last = {name: experiment.TABLES[name](backwards) for name in reversed(names)}
    assert first["kl_at_start"] == last["kl_at_start"] and first["kl_at_start"]["kl_at_init_max"] <= 1e-6
    assert first["bytes"] == last["bytes"]
    for name in ("hops", "parity", "kept"):
        pd.testing.assert_frame_equal(first[name], last[name])
    errors = first["hops"].set_index(["policy", "tau", "estimator", "hops"]).error
    assert errors["untrained", 2.0, "ste", 0] != errors["trained", 2.0, "ste", 0]
    assert first["kept"].groupby("engine").bytes.min()["unrolled"] > first["kept"].bytes.min()


def test_runs_are_read_without_their_times(toy):
    runs, curves, texts = (experiment.TABLES[name](toy) for name in ("runs", "curves", "texts"))
    assert not [column for table in (runs, curves) for column in table if "seconds" in column]
    assert runs.run.tolist() == ["gumbel-0", "ste-0", "ste_trunk-0"] == sorted(set(texts.run))
    table = runs[runs.run == "ste-0"]
    figures = run_metrics(pd.concat([table, table.assign(run="ste-1")]))
    assert figures["train/ste/val_reward_after"] == pytest.approx(table["reward after"].iloc[0])
