"""Any reward: statistics of training runs by hand, and runs on the toy task."""

import math

import numpy as np
import pandas as pd
import pytest

from grade.errors import InputError
from grade.experiments import learning
from grade.experiments import reward_runs as training
from grade.experiments.any_reward.measure.tables import Settings
from grade.experiments.reward_runs import COLUMNS, Grid, Rewards, make_run, run_all
from grade.experiments.rewards import Models
from grade.training.toy import toy_task

SMALL = Models(prompt_tokens=6, new_tokens=6)
METHODS = ["rloo", "grpo", "ppo", "ste", "st", "plug_in", "corrected", "auto"]
NONE = pd.DataFrame(columns=list(COLUMNS))


def bench(**options):
    return Rewards({"tiny": ""}, **options)


def toy_run(method="rloo", seed=0, reward="bag", target_kl=2.0, rate=1e-2, completions=8):
    grid = Grid(rewards=[reward], methods=[method], completions=completions, steps=2, eval_every=1, eval_prompts=8)
    return make_run(SMALL, grid, reward, method, target_kl, seed, rate)


def curve(method, seed, rewards, kls, target=10.0, each=8, rate=1e-2):
    row = dict.fromkeys(COLUMNS, math.nan) | {"policy": "tiny", "trained_on": "gold", "completions": each}
    row |= {"method": method, "seed": seed, "target_kl": target, "learning_rate": rate}
    return [row | {"step": step, "samples": each * step, "reward": reward, "kl": kl, "gold": reward / 2}
            for step, (reward, kl) in enumerate(zip(rewards, kls, strict=True))]  # fmt: skip


def table(*curves):
    return pd.DataFrame([row for rows in curves for row in rows], columns=list(COLUMNS))


# --- statistics ---


def test_samples_to_the_baselines_final_reward_by_hand():
    runs = table(
        curve("rloo", 0, [0.2, 0.4, 0.6, 0.6, 0.6], [0.0, 2.0, 4.0, 5.0, 5.0]),  # goal 0.6 at KL <= 5.5: from 16 on
        curve("auto", 0, [0.2, 0.6, 0.8, 0.8, 0.8], [0.0, 4.0, 8.0, 9.0, 9.0]),  # 8 samples at 4 nats
        curve("rloo", 1, [0.2, 0.4, 0.6, 0.7, 0.5], [0.0, 2.0, 4.0, 6.0, 4.0]),  # goal 0.6, KL <= 5.5: from 16 on
        curve("auto", 1, [0.2, 0.4, 0.6, 0.7, 0.9], [0.0, 1.0, 2.0, 3.0, 5.0]),  # 16 samples at 2 nats
        curve("plug_in", 0, [0.2, 0.3, 0.9, 0.9, 0.9], [0.0, 3.0, 15.0, 15.0, 15.0]),  # 0.6 at 9 nats only: censored
        curve("plug_in", 1, [0.2, 0.8, 0.8, 0.8, 0.8], [0.0, 3.0, 3.0, 3.0, 3.0]),  # at two thirds of the first step
        curve("rloo", 2, [0.5, 0.6, 0.4, 0.5, 0.5], [0.0, 1.0, 1.0, 1.0, 1.0]),  # gained nothing: sets no goal
        curve("auto", 2, [0.5, 0.7, 0.7, 0.7, 0.7], [0.0, 1.0, 1.0, 1.0, 1.0]),
    )
    ratios = learning.ratio_table(runs).set_index("method")
    assert set(ratios.subject) == {"tiny_gold"} and ratios.most.all() and (ratios.completions == 8).all()
    # auto: 8/16 and 16/16, logs -ln 2 and 0: half of ln 2 is mean and standard error; t(0.975, 1) = 12.7062.
    assert ratios.ratio["auto"] == pytest.approx(0.5**0.5)
    assert ratios.high["auto"] == pytest.approx(math.exp(math.log(2) / 2 * (12.7062 - 1)), rel=1e-3)
    assert ratios.of_run["auto"] == pytest.approx((0.25 * 0.5) ** 0.5)
    assert ratios.kl_ratio["auto"] == pytest.approx((4 / 4 * 2 / 4) ** 0.5)
    assert ratios.ratio["plug_in"] == pytest.approx((32 / 16 * (16 / 3) / 16) ** 0.5)
    assert ratios.loc["plug_in", ["n", "censored"]].tolist() == [2, 1]
    assert ratios.kl_ratio["plug_in"] == pytest.approx(2 / 4)  # of the seed that reached it
    assert ratios.loc["rloo", ["ratio", "low", "high", "kl_ratio"]].tolist() == [1, 1, 1, 1]


def test_rewards_at_equal_kl_by_hand():
    path, low = ([0.5, 0.7, 0.75], [0.0, 8.0, 2.0]), ([0.5, 0.6, 0.7], [0.0, 1.0, 2.0])
    runs = table(*(curve("auto", s, *c, target=t) for s in (0, 1) for t, c in ((5.0, path), (10.0, low))),
                 *(curve("rloo", s, [0.5, 0.6], [0.0, 2.0 + 2 * s], target=5.0) for s in (0, 1)),
                 curve("ste", 0, [0.5, 0.6], [0.0, 2.0]))  # fmt: skip
    (row,) = learning.paired_rewards(runs, 1.0).itertuples()  # ste has one seed
    # auto: half of the way to 0.75 at KL 2; rloo: half and a quarter of the way to 0.6.
    assert (row.method, row.against, row.n) == ("auto", "rloo", 2)
    assert row.difference == pytest.approx(0.625 - (0.55 + 0.525) / 2)


def test_rates_are_chosen_at_equal_kl():
    search = table(
        curve("rloo", 9, [0.5, 0.7], [0.0, 2.0], rate=0.1), curve("rloo", 9, [0.5, 0.9], [0.0, 8.0], rate=0.3),
        curve("auto", 9, [0.5, 0.6], [0.0, 2.0], rate=0.1), curve("auto", 9, [0.5, 0.9], [0.0, 8.0], rate=0.3),
    )  # fmt: skip
    # At 2 nats 0.3 has 0.6, a quarter of the way to 0.9: less than rloo's 0.7. At 8 nats 0.1 still has 0.7 or 0.6.
    assert training.chosen_rates(search, 2.0)["rloo"] == 0.1
    assert training.chosen_rates(search, 8.0) == {"rloo": 0.3, "auto": 0.3}
    early = table(
        curve("rloo", 9, [0.5, 0.5, 0.8], [0.0, 1.0, 1.0], rate=0.1),
        curve("rloo", 9, [0.5, 0.7, 0.7], [0.0, 1.0, 1.0], rate=0.3),
    )
    assert training.chosen_rates(early, 1.0) == {"rloo": 0.3}  # (0.7 + 0.7) / 2 against (0.5 + 0.8) / 2


# --- runs ---


@pytest.fixture(scope="module")
def all_methods():
    return run_all(bench(), [toy_run(method) for method in METHODS], NONE)


def test_every_method_is_a_run_of_the_same_size(all_methods):
    rows = all_methods
    assert rows["method"].drop_duplicates().tolist() == list(METHODS) and rows.columns.tolist() == list(COLUMNS)
    assert rows.groupby("method")["samples"].apply(list).tolist() == [[0, 8, 16]] * len(METHODS)
    start = rows[rows["step"] == 0]
    assert (start["reward"] == start["reward"].iloc[0]).all() and (start["kl"].abs() < 1e-4).all()


def test_a_policy_that_serves_many_runs_is_as_good_as_new(all_methods):
    alone = run_all(bench(), [toy_run("auto")], NONE)
    expected = all_methods[all_methods["method"] == "auto"].reset_index(drop=True)
    pd.testing.assert_frame_equal(alone, expected, check_exact=True)
    shared = bench()
    first = [p.detach().clone() for p in shared.task(toy_run(seed=0)).backbone.trainable_parameters()]
    other = shared.task(toy_run(seed=1)).backbone.trainable_parameters()
    assert not all(np.array_equal(a, b.detach()) for a, b in zip(first, other, strict=True))


def test_finished_runs_are_not_trained_again(all_methods, monkeypatch):
    def train_all(bench, runs, processes):
        started.extend(runs)
        return pd.concat([all_methods[:3].assign(**run.names) for run in runs]), None

    started = []
    monkeypatch.setattr(training, "train_all", train_all)
    others = [toy_run(seed=1), toy_run(rate=2e-2), toy_run(target_kl=3.0), toy_run(completions=16)]
    rows = run_all(bench(), [toy_run("auto"), *others, toy_run("rloo")], all_methods)
    assert started == others and rows["method"].tolist() == ["auto"] * 3 + ["rloo"] * 15


def test_runs_that_cannot_be_are_refused_before_the_first_starts():
    with pytest.raises(InputError, match="num_generations"):
        run_all(bench(), [toy_run(), toy_run(completions=6)], NONE)


def test_learning_rates_are_not_chosen_on_the_prompts_of_the_evaluation():
    search, usual = bench(on_search_prompts=True).task(toy_run()), bench().task(toy_run())
    assert usual.validation_prompts == toy_task().validation_prompts
    assert search.train_prompts == usual.train_prompts and search.validation_prompts == toy_task().train_prompts[-100:]


def test_a_headline_that_no_grid_has_is_refused():
    with pytest.raises(InputError, match="headline_kl"):
        Settings.parse({"headline_kl": 9.0})
