"""Statistics of the comparison against hand arithmetic; its runs on the toy task."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grade.errors import InputError
from grade.experiments import frontier
from grade.experiments.compare import metrics as stats
from grade.experiments.compare.measure.runs import CURVES, FINALS, Comparison, make_run, search
from grade.experiments.compare.measure.tables import Settings
from grade.experiments.training_runs import sizes, train_all
from grade.gradients.methods import METHODS

SMALL = sizes(6, 6, 8, 2, 1, 8) | dict(final_eval_prompts=16, gumbel_topk=16)
TOY = Comparison({"policy": ""})


def run(method, beta=0.1, seed=0, rate=1e-2, **changes):
    return make_run(method, beta, seed, rate, SMALL | changes)


def curve(method, beta, seed, kls, rewards, golds=None):
    golds = golds or [math.nan] * len(kls)
    rows = enumerate(zip(kls, rewards, golds, strict=True))
    return [(method, beta, seed, i, 8 * i, r, g, k) for i, (k, r, g) in rows]


def curves(*runs):
    return pd.DataFrame([row for run in runs for row in run], columns=list(CURVES))


# --- reward at equal KL ---


def rewards(table, level):
    return frontier.rewards_at_kl(table, [level]).set_index("seed").reward.to_dict()


def test_reward_at_kl_is_that_of_a_mixture_of_two_policies():
    table = curves(curve("ste", 0.1, 0, [0, 4, 8], [0.5, 0.7, 0.8]), curve("ste", 0.1, 1, [0, 1, 3], [0.5, 0.6, 0.8]))
    # Seed 0, chosen on seed 1: its hull is the start and its end, so here the start and (8, 0.8): 0.5 + 2/8 * 0.3.
    # Seed 1, chosen on seed 0: the start and its middle, here (1, 0.6), which is below the level by itself.
    assert rewards(table, 2.0) == pytest.approx({0: 0.575, 1: 0.6})
    figures = stats.frontier_figures(table, [2.0, 20.0])
    assert figures["frontier/ste/kl2"] == pytest.approx(0.5875)
    assert figures["frontier/ste/kl2_stderr"] == pytest.approx(0.0125)  # sd 0.025/sqrt(2), over sqrt(2)
    assert figures["frontier/ste/kl2_n"] == 2
    assert figures["frontier/ste/kl20"] == pytest.approx(0.8)  # beyond all runs it is flat


def test_policies_are_chosen_on_the_other_seeds():
    lucky = curves(
        curve("ste", 0.1, 0, [0, 2], [0.5, 0.9]), curve("ste", 0.1, 1, [0, 2], [0.5, 0.5]),
        curve("ste", 0.2, 0, [0, 2], [0.5, 0.6]), curve("ste", 0.2, 1, [0, 2], [0.5, 0.7]),
    )  # fmt: skip
    # Seed 0's 0.9 is luck: seed 1 prefers 0.2. Seed 1 has what seed 0 prefers.
    assert rewards(lucky, 2.0) == pytest.approx({0: 0.6, 1: 0.5})
    with pytest.raises(InputError, match="at least two"):
        rewards(lucky[lucky.seed == 0], 2.0)


def test_the_frontiers_line_never_falls():
    # Each seed mixes what the other one prefers, which here is worse at a large KL than its own start of the hull.
    table = curves(curve("ste", 0.1, 0, [0, 4, 8], [0.5, 0.7, 0.3]), curve("ste", 0.1, 1, [0, 4, 8], [0.5, 0.6, 0.9]),
                   curve("ste", 0.1, 2, [0, 4, 8], [0.5, 0.6, 0.7]))  # fmt: skip
    levels = [2.0, 4.0, 6.0, 8.0]
    means = [np.mean(list(rewards(table, level).values())) for level in levels]
    line = frontier.frontier_table(table, levels)
    assert min(np.diff(means)) < 0 and line["reward"].tolist() == pytest.approx(np.maximum.accumulate([0.5, *means]))
    assert (line["low"] <= line["reward"]).all() and (line["reward"] <= line["high"]).all()
    better = table.assign(method="rloo", reward=table["reward"] + 1)
    both = frontier.frontier_table(pd.concat([better, table]), levels)
    pd.testing.assert_frame_equal(both[both["method"] == "ste"].reset_index(drop=True), line)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8))
def test_the_hull_is_above_every_point_and_every_mixture(points):
    kl, reward = zip(*points, strict=True)
    hull = frontier.upper_hull(kl, reward)
    x, y = [kl[i] for i in hull], [reward[i] for i in hull]
    assert x == sorted(set(x)) and y == sorted(set(y)) and max(y) == max(reward) and x[0] == min(kl)
    for a, b in itertools.product(range(len(kl)), repeat=2):
        middle = (kl[a] + kl[b]) / 2, (reward[a] + reward[b]) / 2
        assert np.interp(middle[0], x, y) >= middle[1] - 1e-9


# --- tests over seeds, ends of runs ---


def test_final_figures_are_means_over_seeds_at_one_beta():
    rows = [
        ("ste", beta, seed, 2, 16, 0.6, 0.5, 3.0, gain, 0.0)
        for beta, seed, gain in ((0.1, 0, 0.2), (0.1, 1, 0.4), (0.3, 0, 0.9))
    ]
    figures = stats.final_figures(pd.DataFrame(rows, columns=list(FINALS)), 0.1)
    assert figures["gain/ste"] == pytest.approx(0.3) and figures["gain/ste_stderr"] == pytest.approx(0.1)
    assert (figures["gain/ste_n"], figures["final/ste/samples"], figures["final/ste/kl"]) == (2, 16, 3.0)


# --- runs ---


def test_every_method_gets_the_same_number_of_completions():
    assert {run(method).config.batch_completions for method in METHODS} == {8}


def test_runs_that_would_not_be_comparable_are_refused():
    with pytest.raises(InputError, match="per_device_train_batch_size"):
        run("remax", per_device_train_batch_size=7)


def test_two_methods_start_from_the_same_policy_and_are_judged_alike():
    table, finals = train_all(TOY, [run("ste"), run("rloo")])
    first = table[table["step"] == 0]
    assert first["reward"].nunique() == 1 and first["kl"].abs().max() <= 1e-5
    assert finals["samples"].tolist() == [16, 16]
    last = table[table["step"] == 2]
    assert (last["kl"] > 1e-4).all()
    # The curve is over the first 8 prompts, the end over all 16: KL over the same 8.
    assert finals["kl"].tolist() == last["kl"].tolist()
    assert (finals["reward"].to_numpy() != last["reward"].to_numpy()).all()


def test_a_learning_rate_is_chosen_by_the_objective_on_prompts_of_its_own():
    rates, table = search(TOY, [run("ste", 0.0, 100, rate) for rate in (1e-9, 1e-2)])
    assert rates == {"ste": 1e-2}  # without a penalty and without a step there is nothing to gain
    assert table["objective"].tolist() == table["reward"].tolist()
    assert search(TOY, [run("ste", rate=3e-3)])[0] == {"ste": 3e-3}


def test_a_headline_that_was_not_run_is_refused():
    with pytest.raises(InputError, match="headline_beta"):
        Settings.parse({"headline_beta": 0.7})
