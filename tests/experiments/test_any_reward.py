"""Training runs on any reward: statistics against hand arithmetic, runs on the toy task."""

import dataclasses
import json
import math

import numpy as np
import pandas as pd
import pytest

from grade.errors import InputError
from grade.experiments.any_reward import learning
from grade.experiments.any_reward.measure import runs as training
from grade.experiments.any_reward.measure.rewards import BlackBox
from grade.experiments.any_reward.measure.runs import COLUMNS, FILE, METHODS, Run, Shared, run_all, run_config
from grade.experiments.any_reward.measure.sums import SumsConfig
from grade.experiments.any_reward.measure.training import (
    RUN,
    SEARCH_SEEDS,
    grid,
    methods_for,
    search_runs,
    timed,
    untimed,
)
from grade.gradients.methods import FAMILIES
from grade.training.toy import toy_task

SMALL = {
    "max_prompt_length": 6, "max_completion_length": 6, "min_completion_length": 6, "eval_steps": 1, "eval_prompts": 8,
    "final_eval_prompts": 8, "kl_eval_prompts": 8, "gumbel_topk": 16,
}  # fmt: skip
TOY = Shared({"tiny": ""}, values=SMALL)


def toy_run(method="rloo", seed=0, **changes):
    values = {"policy": "tiny", "reward": "bag", "target_kl": 2.0, "learning_rate": 1e-2, "completions": 8, "steps": 2}
    return Run(method=method, seed=seed, **(values | changes))


def curve(method, seed, rewards, kls, target=10.0, each=8, rate=1e-2):
    rows = []
    for step, (reward, kl) in enumerate(zip(rewards, kls, strict=True)):
        row = dict.fromkeys(COLUMNS, math.nan) | {"method": method, "seed": seed, "target_kl": target}
        rows.append(row | {"step": step, "samples": each * step, "seconds": 0.5 * step, "reward": reward, "kl": kl,
                           "gold": reward / 2, "learning_rate": rate})  # fmt: skip
    return rows


def table(*curves):
    return pd.DataFrame([row for rows in curves for row in rows], columns=list(COLUMNS))


# --- statistics ---


def test_a_goal_is_reached_where_reward_and_kl_are_both_in_bounds():
    run = table(curve("auto", 0, [0.0, 0.5, 1.0, 0.75], [0.0, 4.0, 8.0, 2.0]))
    # At 0.75 on the way up KL is 6; it comes down to 5 a half of the last segment later, at 0.875 and 16 + 4 samples.
    assert learning.first_reach(run, 0.75, 6.0) == pytest.approx((12.0, 6.0))
    assert learning.first_reach(run, 0.75, 5.0) == pytest.approx((20.0, 5.0))
    assert learning.first_reach(run, 0.75, 1.0) is None and learning.first_reach(run, 1.01, 99.0) is None
    assert learning.first_reach(run, 0.0, 0.0) == (0.0, 0.0)


def test_samples_to_the_baselines_final_reward_by_hand():
    runs = table(
        curve("rloo", 0, [0.2, 0.4, 0.6, 0.6, 0.6], [0.0, 2.0, 4.0, 5.0, 5.0]),  # goal 0.6 at KL <= 5.5: from 16 on
        curve("auto", 0, [0.2, 0.6, 0.8, 0.8, 0.8], [0.0, 4.0, 8.0, 9.0, 9.0]),  # 8 samples at 4 nats
        curve("rloo", 1, [0.2, 0.4, 0.6, 0.7, 0.5], [0.0, 2.0, 4.0, 6.0, 4.0]),  # goal 0.6, KL <= 5.5: from 16 on
        curve("auto", 1, [0.2, 0.4, 0.6, 0.7, 0.9], [0.0, 1.0, 2.0, 3.0, 5.0]),  # 16 samples at 2 nats
        curve("plug_in", 0, [0.2, 0.3, 0.9, 0.9, 0.9], [0.0, 3.0, 15.0, 15.0, 15.0]),  # 0.6 at 9 nats only: censored
        curve("plug_in", 1, [0.2, 0.8, 0.8, 0.8, 0.8], [0.0, 3.0, 3.0, 3.0, 3.0]),  # at two thirds of the first step
    )
    each = learning.reaches(runs).set_index(["method", "seed"])
    assert each.loc[("auto", 0), ["samples", "kl", "reached"]].tolist() == pytest.approx([8, 4, True])
    assert each.loc[("plug_in", 0), "samples"] == 32 and not each.loc[("plug_in", 0), "reached"]
    assert (each["baseline_samples"] == 16).all() and (each["baseline_run"] == 32).all()
    found = learning.sample_ratios(runs).set_index("method")
    # auto: 8/16 and 16/16, logs -ln 2 and 0: half of ln 2 is mean and standard error; t(0.975, 1) = 12.7062.
    assert found.loc["auto", "ratio"] == pytest.approx(0.5**0.5)
    assert found.loc["auto", "high"] == pytest.approx(math.exp(math.log(2) / 2 * (12.7062 - 1)), rel=1e-3)
    assert found.loc["auto", "of_run"] == pytest.approx((0.25 * 0.5) ** 0.5)
    assert found.loc["auto", "kl_ratio"] == pytest.approx((4 / 4 * 2 / 4) ** 0.5)
    assert found.loc["plug_in", "ratio"] == pytest.approx((32 / 16 * (16 / 3) / 16) ** 0.5)
    assert found.loc["plug_in", ["n", "censored"]].tolist() == [2, 1]
    assert found.loc["plug_in", "kl_ratio"] == pytest.approx(2 / 4)  # of the seed that reached it
    assert found.loc["rloo", ["ratio", "low", "high", "kl_ratio"]].tolist() == [1, 1, 1, 1]


def test_a_baseline_that_gained_nothing_sets_no_goal():
    runs = table(
        curve("rloo", 0, [0.5, 0.6, 0.4, 0.5], [0.0, 1.0, 1.0, 1.0]),
        curve("rloo", 1, [0.5, 0.6, 0.6, 0.6], [0.0, 1.0, 1.0, 1.0]),
        curve("auto", 0, [0.5, 0.7, 0.7, 0.7], [0.0, 1.0, 1.0, 1.0]),
        curve("auto", 1, [0.5, 0.7, 0.7, 0.7], [0.0, 1.0, 1.0, 1.0]),
    )
    assert set(learning.reaches(runs)["seed"]) == {1}
    with pytest.raises(InputError, match="rloo, auto"):
        learning.reaches(runs, "ppo")
    with pytest.raises(InputError, match="one policy, reward and batch"):
        learning.reaches(pd.concat([runs, runs]))


def test_ends_are_compared_seed_by_seed():
    runs = table(
        curve("rloo", 0, [0.5, 0.6, 0.8], [0.0, 1.0, 3.0]), curve("auto", 0, [0.5, 0.8, 0.8], [0.0, 1.0, 1.0]),
        curve("rloo", 1, [0.5, 0.5, 0.5], [0.0, 1.0, 1.0]), curve("auto", 1, [0.5, 0.6, 0.8], [0.0, 1.0, 1.0]),
        curve("auto", 1, [0.5, 0.0, 0.0], [0.0, 1.0, 1.0], target=5.0),
    )  # fmt: skip
    figures = learning.paired_ends(runs, 10.0)
    # 0.8 - 0.7 and 0.7 - 0.5: mean 0.15, standard error 0.05.
    assert figures["paired/auto_minus_rloo/reward"] == pytest.approx(0.15)
    assert figures["paired/auto_minus_rloo/reward_stderr"] == pytest.approx(0.05)
    assert figures["paired/auto_minus_rloo/gold"] == pytest.approx(0.075)
    assert figures["paired/auto_minus_rloo/kl"] == pytest.approx(-0.5)
    assert learning.ends(runs).set_index(["method", "target_kl", "seed"]).loc[("auto", 10.0, 1), "gain"] == (
        pytest.approx(0.2)
    )


def test_rewards_at_equal_kl_mix_over_targets():
    path, low = ([0.5, 0.7, 0.75], [0.0, 8.0, 2.0]), ([0.5, 0.6, 0.7], [0.0, 1.0, 2.0])
    runs = table(*(curve("auto", s, *c, target=t) for s in (0, 1) for t, c in ((5.0, path), (10.0, low))),
                 *(curve("rloo", s, [0.5, 0.6], [0.0, 2.0 + 2 * s], target=5.0) for s in (0, 1)))  # fmt: skip
    figures = learning.paired_at_kl(runs, 1.0)
    # auto: half of the way to 0.75 at KL 2; rloo: half and a quarter of the way to 0.6.
    assert figures["paired/auto_minus_rloo/kl1"] == pytest.approx(0.625 - (0.55 + 0.525) / 2)


def test_the_learning_table_is_means_over_seeds():
    runs = table(curve("rloo", 0, [0.5, 0.6], [0.0, 1.0]), curve("rloo", 1, [0.5, 0.8], [0.0, 3.0]))
    last = learning.learning_table(runs).iloc[-1]
    assert (last["samples"], last["n"]) == (8, 2) and last["seconds"] == 0.5
    assert last[["reward", "reward_stderr", "kl", "gold"]].tolist() == pytest.approx([0.7, 0.1, 2.0, 0.35])
    one = learning.learning_table(runs[runs["seed"] == 0])
    assert one["reward_stderr"].isna().all()


# --- runs ---


@pytest.fixture(scope="module")
def all_methods(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    plan = [toy_run(method) for method in METHODS]
    return plan, folder, run_all(TOY, plan, folder)


def test_every_method_is_a_run_of_the_same_size(all_methods):
    _, _, rows = all_methods
    assert rows["method"].drop_duplicates().tolist() == list(METHODS) and rows.columns.tolist() == list(COLUMNS)
    assert rows.groupby("method")["samples"].apply(list).tolist() == [[0, 8, 16]] * len(METHODS)
    start = rows[rows["step"] == 0]
    assert (start["reward"] == start["reward"].iloc[0]).all() and (start["kl"].abs() < 1e-4).all()
    distilled = rows["method"].isin(["plug_in", "corrected", "auto"]) & (rows["step"] > 0)
    assert rows.loc[distilled, ["r2", "slope", "trust", "residual_weight"]].notna().all(axis=None)
    assert set(rows.loc[distilled, "family"]) <= set(FAMILIES)
    assert rows.loc[~distilled, "r2"].isna().all() and set(rows.loc[~distilled, "family"]) == {""}
    weights = rows[distilled].groupby("method")["residual_weight"].max()
    assert (weights["plug_in"], weights["corrected"]) == (0, 1)


@pytest.mark.parametrize("policy", ["tiny", "smollm2", "sums"])
def test_a_finished_run_is_known_by_every_setting(policy):
    """Also where the settings of the policy of sums have the names of a run's: its own seed and steps."""
    shared = Shared({policy: ""})
    run = Run(policy, "sums" if policy == "sums" else "gold", "rloo", 2.0, 0, 1e-3, 8, 2)
    others = dict(method="auto", target_kl=3.0, seed=1, learning_rate=1e-2, completions=16, steps=3)
    runs = [run, *(dataclasses.replace(run, **{name: value}) for name, value in others.items())]
    assert len({training._key(shared, each) for each in runs}) == len(runs)


def test_finished_runs_are_read_and_a_cut_off_line_is_trained_again(all_methods, tmp_path, monkeypatch):
    plan, folder, rows = all_methods
    lines = (folder / FILE).read_text().splitlines()
    assert len(lines) == len(plan)
    (tmp_path / FILE).write_text("\n".join([*lines[:-1], lines[-1][:50]]))  # killed while it wrote the last run
    trained = []
    monkeypatch.setattr(
        training, "train_once", lambda shared, run: trained.append(run) or rows.tail(3).to_dict("records")
    )
    again = run_all(TOY, plan, tmp_path)
    assert trained == plan[-1:]
    pd.testing.assert_frame_equal(again, rows)
    assert [run_all(TOY, plan, tmp_path).equals(rows), len(trained)] == [True, 1]
    assert training.read_table(tmp_path).equals(rows)
    changed = [toy_run("rloo", learning_rate=2e-2), toy_run("rloo", seed=1)]
    run_all(TOY, changed, tmp_path)
    run_all(Shared({"tiny": ""}, values=SMALL | {"beta": 0.2}), plan[:1], tmp_path)
    assert len(trained) == 4  # other settings are other runs


def test_a_policy_that_serves_many_runs_is_as_good_as_new(all_methods):
    plan, _, rows = all_methods
    shared = Shared({"tiny": ""}, values=SMALL)
    alone = pd.DataFrame(training.train_once(shared, plan[-1]), columns=list(COLUMNS))
    drop = ["seconds"]
    expected = rows[rows["method"] == plan[-1].method].reset_index(drop=True)
    pd.testing.assert_frame_equal(alone.drop(columns=drop), expected.drop(columns=drop), check_exact=True)
    first = [p.clone() for p in shared.task(toy_run(seed=0)).backbone.trainable_parameters()]
    other = shared.task(toy_run(seed=1)).backbone.trainable_parameters()
    assert len(first) == len(other) and not all(
        np.array_equal(a.detach(), b.detach()) for a, b in zip(first, other, strict=True)
    )


def test_only_ste_and_st_see_more_than_values():
    for method in METHODS:
        reward = TOY.task(toy_run(method)).reward_model
        assert isinstance(reward, BlackBox) == (method not in ("ste", "st")) == (not callable(reward))
    assert run_config(toy_run("grpo"), SMALL).scale_rewards == "group"
    assert {run_config(toy_run(m), SMALL).group for m in METHODS if m not in ("ste", "st")} == {4}


def test_a_run_that_fails_costs_no_other(tmp_path, monkeypatch):
    def train_once(shared, run):
        if run.seed == 0:
            raise InputError("loss", math.nan, "a finite number")
        return curve("rloo", run.seed, [0.5], [0.0])

    monkeypatch.setattr(training, "train_once", train_once)
    with pytest.raises(InputError, match="loss: got nan"):
        run_all(TOY, [toy_run(seed=0), toy_run(seed=1)], tmp_path)
    assert [json.loads(line)["columns"]["seed"] for line in (tmp_path / FILE).read_text().splitlines()] == [[1]]


@pytest.mark.parametrize(
    "line", ['{"key": "a", "rows": []}', '["a"]', '{"key": "a", "columns": {"seed": [1], "kl": []}}']
)
def test_a_line_that_is_no_run_is_refused(tmp_path, line):
    (tmp_path / FILE).write_text(f"{line}\n")
    with pytest.raises(InputError, match=r"runs.jsonl: got '.*allowed: lines with the key of a run and its columns"):
        run_all(TOY, [toy_run()], tmp_path)
    assert (tmp_path / FILE).read_text() == f"{line}\n"


def test_sums_end_by_themselves(tmp_path):
    shared = Shared({"sums": str(tmp_path / "sums")}, values=SMALL, sums=SumsConfig(largest=9, steps=20))
    run = toy_run("auto", policy="sums", reward="sums")
    assert run_config(run, SMALL).max_completion_length == 3
    rows = run_all(shared, [run])
    assert len(rows) == 3 and rows["gold"].isna().all() and rows["reward"].between(0, 1).all()


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
    more = table(curve("rloo", 10, [0.5, 0.9, 0.9], [0.0, 1.0, 1.0], rate=0.1),
                 curve("rloo", 10, [0.5, 0.7, 0.7], [0.0, 1.0, 1.0], rate=0.3))  # fmt: skip
    assert training.chosen_rates(pd.concat([early, more]), 1.0) == {"rloo": 0.1}  # 0.65 and 0.9 against 0.7 and 0.7
    with pytest.raises(InputError, match="several runs"):
        training.chosen_rates(pd.concat([search, search]), 2.0)


def test_a_search_and_a_grid_of_runs():
    plan = search_runs(["rloo", "ste"], [0.1, 0.2], 2.0, completions=8, steps=2)
    assert [(run.reward, run.method, run.learning_rate, run.seed) for run in plan] == [
        (reward, method, rate, seed) for reward, method in (("gold", "rloo"), ("trunk", "ste"))
        for rate in (0.1, 0.2) for seed in SEARCH_SEEDS
    ]  # fmt: skip
    table = run_all(dataclasses.replace(TOY, on_search_prompts=True), plan[:4:3])
    rates = training.chosen_rates(table, 2.0)
    assert set(rates) == {"rloo"} and rates["rloo"] in (0.1, 0.2) and len(table) == 6
    assert "seconds" not in untimed(table) and set(timed(table)) == {*RUN, "seconds"}
    assert not untimed(table).duplicated(list(RUN)).any()
    runs = grid(["sums", "trunk"], [5, 20], [0, 1], {"rloo": 0.1, "ste": 0.2}, policy="smollm2", steps=7)
    assert [(run.policy, run.method) for run in runs[:3]] == [("sums", "rloo"), ("smollm2", "rloo"), ("smollm2", "ste")]
    assert [run.seed for run in runs] == [0] * 6 + [1] * 6 and runs[3].target_kl == 20
    assert methods_for("gold") == tuple(method for method in METHODS if method not in ("ste", "st"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": "gpt"}, "policy"), ({"reward": "trunk9"}, "reward"), ({"method": "dpo"}, "method"),
        ({"method": "ste", "reward": "gold"}, "for ste one of bag"), ({"target_kl": 0.0}, "target_kl"),
        ({"completions": 6}, "num_generations"),
    ],
)  # fmt: skip
def test_runs_that_cannot_be_are_refused_before_the_first_starts(changes, words):
    with pytest.raises(InputError, match=words):
        run_all(TOY, [toy_run(), toy_run(**changes)])
    with pytest.raises(InputError, match="at least one"):
        run_all(TOY, [])


def test_learning_rates_are_not_chosen_on_the_prompts_of_the_evaluation():
    search = Shared({"tiny": ""}, values=SMALL, on_search_prompts=True).task(toy_run())
    usual = TOY.task(toy_run())
    assert usual.validation_prompts == toy_task().validation_prompts
    assert search.train_prompts == usual.train_prompts and search.validation_prompts == toy_task().train_prompts[-100:]
