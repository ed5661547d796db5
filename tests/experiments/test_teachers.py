"""Teachers: statistics by hand, settings of the runs with hints."""

import pandas as pd
import pytest

from grade.experiments.learning import reach_table
from grade.experiments.sums import sum_prompts
from grade.experiments.teachers.measure.hinted import METHODS, HintedRuns, hinted_runs, sum_rows


def curve(method, *points, seed=0):
    return [dict(method=method, seed=seed, subject="sums", step=step, samples=8 * step, reward=reward, kl=kl)
            for step, (reward, kl) in enumerate(points)]  # fmt: skip


def test_a_run_that_is_better_at_equal_kl_gets_there_by_mixing_its_policies():
    """At a KL of 1, half of (.2, 0) and (.8, 2) has a reward of .5, which none of the run's policies has there."""
    base, points = curve("rloo", (0.2, 0.0), (0.3, 0.6), (0.5, 1.0)), [(0.2, 0.0), (0.3, 1.5), (0.8, 2.0), (0.8, 2.0)]
    table = reach_table(pd.DataFrame(base + curve("hinted", *points)), "rloo")
    assert (table.ratio.item(), table.censored.item()) == (pytest.approx(1.0), 0)
    table = reach_table(pd.DataFrame(base + curve("hinted", *points[:2])), "rloo")  # .27 at most
    assert (table.ratio.item(), table.censored.item()) == (pytest.approx(0.5), 1)


def test_only_a_right_hint_is_the_answer_and_every_run_has_valid_settings():
    rows = sum_rows(sum_prompts()[0])
    assert all(row["prompt"] == f"{a}+{row['answer'] - a}=" for row in rows for a in [int(row["prompt"].split("+")[0])])
    assert sum(row["other"] == row["answer"] for row in rows) < 0.02 * len(rows)
    assert {row["other"] for row in rows} == set(range(99))
    runs = hinted_runs(HintedRuns(methods=dict.fromkeys(METHODS, {}), seeds=[3]))
    found = {run.names["method"]: (run.config.method, run.config.teacher_context) for run in runs}
    reading = "{answer}="
    assert found == {
        "rloo": ("rloo", ""), "rloo_again": ("rloo", ""), "auto": ("distilled", ""), "hinted": ("distilled", reading),
        "sibling": ("distilled", "{sibling}="), "nonsense": ("distilled", "{other}="), "weight_1": ("teacher", reading),
    }  # fmt: skip
    assert [run.names["method"] for run in runs if run.config.seed != 3] == ["rloo_again"]
