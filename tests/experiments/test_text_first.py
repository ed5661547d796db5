"""Text first: runs with and without scored text on the toy task, what is kept of them, statistics by hand."""

import pandas as pd
import pytest

from grade.errors import InputError
from grade.experiments.learning import reach_table
from grade.experiments.measured import measure_all, read_table
from grade.experiments.text_first.measure import tables as experiment
from grade.experiments.text_first.measure.tables import SMOKE, Settings


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text_first")
    measure_all(experiment, Settings(), folder, log=lambda line: None)
    return folder


def test_methods_with_texts_have_a_run_for_each_source_and_count_their_own_samples(results):
    runs = read_table(results / "measured" / "runs")
    ends = runs.groupby(["method", "source"])["samples"].max()
    assert set(ends.index) == {("offline", "reference:256"), ("auto_texts", "reference:256"), ("rloo", "own")}
    assert ends["offline"].item() == 32 and ends["rloo"].item() == 4 * 8  # those that steer, and those of four steps
    assert runs["outside"].between(-1, 1).all() and runs["length"].gt(0).all()
    shown = runs.dropna(subset=["shown"])
    assert set(shown["seed"]) == {0} and set(shown["step"]) == {0, 4}


@pytest.mark.parametrize(
    ("values", "words"),
    [({"headline_level": 9.0}, "headline_level"),
     ({"chosen_rates": {"rloo": 0.1}}, "chosen_rates"),
     ({"grids": {"a": SMOKE.model_dump() | {"sources": ["64"]}}}, "sources")],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(values, words):
    with pytest.raises(InputError, match=words):
        _ = Settings.parse(values).trained_runs


# --- statistics and figures ---


def curve(method, seed, rewards, kls, each=8):
    rows = zip(rewards, kls, strict=True)
    return [{"subject": "a", "method": method, "seed": seed, "step": step, "samples": each * step, "reward": r, "kl": k}
            for step, (r, k) in enumerate(rows)]  # fmt: skip


def test_samples_to_the_baselines_best_reward_at_no_more_kl_by_hand():
    rows = [
        *curve("rloo", 0, [0.5, 0.6, 0.7, 0.6], [0.0, 2.0, 4.0, 5.0]),  # best: 0.7 at 4 nats, 16 samples
        *curve("rloo", 1, [0.5, 0.9, 0.6, 0.6], [0.0, 2.0, 4.0, 5.0]),  # best: 0.9 at 2 nats, 8 samples
        *curve("auto", 0, [0.5, 0.9, 0.9, 0.9], [0.0, 4.0, 4.0, 4.0]),  # half of the first step: 4
        *curve("auto", 1, [0.5, 0.8, 0.9, 0.9], [0.0, 1.0, 2.0, 4.0]),  # 16
        *curve("ppo", 0, [0.5, 0.9, 0.9, 0.9], [0.0, 9.0, 9.0, 9.0]),  # 0.7 at 4.5 nats: never
        *curve("ppo", 1, [0.9, 0.9, 0.9, 0.9], [0.0, 1.0, 1.0, 1.0]),  # at once
    ]
    table = reach_table(pd.DataFrame(rows), "rloo").set_index("method")
    assert table.ratio.to_dict() == pytest.approx({"auto": 20 / 24, "ppo": 24 / 24})
    assert table.loc["ppo", ["n", "censored"]].tolist() == [2, 1] and table.censored["auto"] == 0
    assert (table.low == 0).all()  # of two seeds no ratio is known
