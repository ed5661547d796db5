"""Tables, figures and verdict of the experiment on any reward: end to end at toy size, and by hand."""

import json
import math

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from grade.errors import InputError
from grade.experiments.any_reward import verdict
from grade.experiments.any_reward.figures import (
    batches_figure,
    explained_figure,
    frontier_figure,
    law_figure,
    learning_figure,
    tokens_figure,
    worth_figure,
)
from grade.experiments.any_reward.measure import cost, training
from grade.experiments.any_reward.measure.runs import COLUMNS, FILE
from grade.experiments.any_reward.measure.subject import load_subject
from grade.experiments.any_reward.measure.tables import Grid, Measurements, Settings
from grade.experiments.any_reward.measure.training import RUN, SEARCH_SEEDS
from grade.experiments.any_reward.metrics import (
    batch_ratios,
    best_worths,
    explained_figures,
    kl_figures,
    main_runs,
    metrics,
    sample_figures,
    timed_metrics,
    worth_figures,
)
from grade.experiments.measured import Tables, measure_all


@pytest.fixture(scope="module")
def settings():
    return Settings()


@pytest.fixture(scope="module")
def tables(settings, tmp_path_factory):
    """Tables that were written and read again."""
    folder = tmp_path_factory.mktemp("any_reward")
    measure_all(Measurements(settings), folder, log=lambda line: None)
    return Tables(Measurements(settings), str(folder / "measured"))


def curve(method, seed, rewards, kls, target=10.0, completions=8, **names):
    """A run with an evaluation after every step."""
    row = dict.fromkeys(COLUMNS, math.nan) | {"policy": "tiny", "trained_on": "gold", "method": method, "seed": seed}
    row |= {"target_kl": target, "completions": completions} | names
    return pd.DataFrame([
        row | {"step": step, "samples": completions * step, "reward": reward, "kl": kl}
        for step, (reward, kl) in enumerate(zip(rewards, kls, strict=True))
    ])  # fmt: skip


def learned(*, rloo=(0.5, 0.6, 0.7, 0.8, 0.8), auto=(0.5, 0.8, 0.8, 0.8, 0.8), seeds=3, **names):
    """`auto` reaches what `rloo` reaches at step 3 one step, and one evaluation per seed, earlier or later."""
    runs = []
    for seed in range(seeds):
        runs += [curve("rloo", seed, rloo, [0, 2, 4, 5, 5], **names)]
        runs += [curve("auto", seed, [*auto[:1], auto[1] + 0.01 * seed, *auto[2:]], [0, 3, 3, 3, 3], **names)]
    return pd.concat(runs, ignore_index=True)


def worth_rows(r2s, **names):
    row = dict(policy="tiny", stage="untrained", reward="trunk", estimator="plugin", fitted=256, weight=0.0, n=1)
    row |= dict(low=1.0, high=100.0, cosine_mean=0.9) | names
    return [row | dict(family=family, r2=r2, worth=10 * i) for i, (family, r2) in enumerate(r2s.items(), 1)]


# --- end to end ---


def test_written_tables_give_every_kind_of_figure(tables, settings):
    found, timed = metrics(tables, settings), timed_metrics(tables, settings)
    expected = """bias/corrected_worst_in_stderr bias/n bias/exact_worst bias/values/corrected/mse law/best_gain
        explained/tiny_trunk/bag_32 explained/tiny_trunk/bag_32_stderr explained/rule/from_n
        worth/tiny_trunk/plugin_16 worth/tiny_trunk/plugin_16_low worth_at_64/tiny_trunk/plugin_16_high
        worth/tiny_trunk/corrected_16 worth/tiny_trunk/st worth/tiny_trunk/ste_tau2_hops1 worth/tiny_trunk/ppo_16
        samples_over_rloo/tiny_trunk_n samples_over_rloo/rule_n plug_in/samples_over_rloo/rule_n
        end/tiny_trunk/auto/reward end/tiny_trunk/auto/kl reward_at_kl/tiny_trunk/0.5/auto
        paired/tiny_trunk/auto_minus_ste paired/tiny_trunk/auto_minus_ste_stderr paired/rule/auto_minus_rloo_n"""
    assert [key for key in expected.split() if key not in found] == []
    assert all(value is None or math.isfinite(value) for value in (found | timed).values())
    assert not any("second" in key for key in found)
    assert 0 < timed["cost/fit_share"] < 1 and timed["cost/completions"] >= settings.cost_completions
    assert timed["seconds/tiny_trunk/auto_n"] == 2
    json.dumps(found)
    assert found["bias/exact_worst"] < 1e-9 and found["bias/p"] > 1e-4


def test_every_figure_is_drawn(tables, settings, tmp_path):
    runs = tables["runs"]
    seconds = runs.merge(tables["run_seconds"], on=list(RUN))
    drawn = [
        law_figure(tables["law"]), explained_figure(tables["explained"]), worth_figure(tables["worth"]),
        learning_figure(runs, settings.headline_kl), learning_figure(seconds, settings.headline_kl, "seconds"),
        frontier_figure(runs, settings.kl_levels), tokens_figure(tables["tokens"]),
        batches_figure({"rule": pd.Series({4: 0.5, 8: 0.7})}),
    ]  # fmt: skip
    for fig, panels in zip(drawn, (1, 1, 2, 4, 4, 2, 1, 1), strict=True):
        assert len(fig.axes) == panels
        fig.savefig(tmp_path / "figure.png")
    plt.close("all")
    assert batches_figure({"rule": pd.Series({8: 0.7})}) is None
    assert frontier_figure(runs[runs["seed"] == 0], [1.0]) is None and tokens_figure(tables["tokens"][:0]) is None


def test_what_is_explained_stands_by_reward_and_size_a_panel_for_each_policy_and_stage():
    row = {"policy": "tiny", "stage": "untrained", "reward": "rule", "n": 64, "family": "bag", "r2": 0.1}
    rows = [row, row | dict(reward="gold", r2=0.2), row | dict(n=1024, r2=0.3), row | dict(stage="trained", r2=0.4),
            row | dict(policy="sums", r2=0.5)]  # fmt: skip
    untrained, trained, sums, none = explained_figure(pd.DataFrame(rows)).axes
    assert [ax.get_title() for ax in (untrained, trained, sums)] == [
        "tiny, untrained",
        "tiny, trained",
        "sums, untrained",
    ]
    assert not none.axison and sums.axison
    assert [text.get_text() for text in untrained.get_yticklabels()] == [
        "rule, n = 64",
        "rule, n = 1,024",
        "gold, n = 64",
    ]
    assert [text.get_text() for text in untrained.texts] == ["0.10", "0.30", "0.20"]
    assert [text.get_text() for text in trained.texts] == [
        "0.40"
    ]  # of the same rows; those that are not there are empty
    plt.close("all")


def test_sentences_are_made_from_any_figures(tables, settings):
    found = metrics(tables, settings)
    said = [verdict.bias_sentence(found), verdict.law_sentence(found), *verdict.explained_sentences(found),
            *verdict.worth_sentences(found), *verdict.training_sentences(found), *verdict.verdict_sentences(found),
            *verdict.paired_sentences(found, settings.headline_level)]  # fmt: skip
    assert len(said) >= 9 and all(sentence.endswith(".") for sentence in said)
    assert "nan" not in " ".join(said) and "None" not in " ".join(said)


def test_tokens_are_quoted_and_ranked(tables):
    table = tables["tokens"]
    assert (table["policy"] == "tiny").all() and (table["reward"] == "gold").all()
    assert table["token"].str.match(r"^['\"].*['\"]$", flags=16).all()  # 16: a line end is a character too
    most, least = table[table["rank"] > 0], table[table["rank"] < 0]
    assert most["value"].is_monotonic_decreasing and most["value"].min() >= least["value"].max()


def test_a_step_is_timed_with_a_store_that_is_as_full(settings):
    subject = load_subject("tiny", "", settings.folders("tiny"), rewards=["rule"], prompt_tokens=4, length=6)
    table = cost.fit_cost(subject, 8, 42, 3)
    assert table["completions"].tolist() == [40 + 4 * 8 + 8 * n for n in range(1, 257)]  # 42 in whole groups, 4 steps
    assert table["chosen"].any() and table["fitted"].any() and not table["fitted"].all()
    assert (table["fit_seconds"] < table["step_seconds"]).all() and (table["fit_seconds"] > 0).all()
    assert all(p.grad is None for p in subject.backbone.trainable_parameters())


# --- settings ---


def finished(folder, *runs):
    lines = [json.dumps({"key": str(i), "columns": table.to_dict("list")}) for i, table in enumerate(runs)]
    (folder / FILE).write_text("\n".join(lines))
    return str(folder)


def test_finished_runs_are_read_and_none_is_trained(tmp_path):
    grid = Grid(rewards=["gold"], methods=["rloo"], target_kls=[10.0], seeds=[1, 2], completions=8, steps=4)
    settings = dict(chosen_rates={}, searched_rates=[0.1, 0.2], search_kl=10.0, headline_kl=10.0, grids=[grid])
    searched = [
        curve("rloo", seed, [0.5, 0.6, 0.6, 0.6, end], [0, 1, 1, 1, 1], learning_rate=rate)
        for seed in SEARCH_SEEDS for rate, end in ((0.1, 0.6), (0.2, 0.7))
    ]  # fmt: skip
    runs = [curve("rloo", seed, [0.5] * 5, [0] * 5, learning_rate=rate) for seed in (1, 2, 3) for rate in (0.1, 0.2)]
    measurements = Measurements(Settings(finished_dir=finished(tmp_path, *searched, *runs), **settings))
    found = measurements.runs()  # those of the grid alone, at the rate that the search is for
    assert set(found["seed"]) == {1, 2} and set(found["learning_rate"]) == {0.2} and len(found) == 10
    assert set(measurements.search()["seed"]) == set(SEARCH_SEEDS) and len(measurements.search()) == 10 * len(
        SEARCH_SEEDS
    )
    assert set(measurements.run_seconds()) == {*RUN, "seconds"}
    with pytest.raises(InputError, match=f"finished_dir: got .*{FILE}"):
        Measurements(Settings(finished_dir=str(tmp_path / "none"), **settings)).runs()
    missing = finished(tmp_path, *searched, *runs[:2])
    with pytest.raises(InputError, match=r"all 2 runs; 1 are missing, the first: policy tiny, .* seed 2, .* steps 4"):
        Measurements(Settings(finished_dir=missing, **settings)).runs()


def test_methods_without_a_rate_are_searched(monkeypatch):
    monkeypatch.setattr(training, "SEARCH_SEEDS", SEARCH_SEEDS[:1])
    grid = Grid(rewards=["rule"], methods=["rloo"], target_kls=[2.0], seeds=[3], completions=8, steps=1, eval_prompts=8)
    settings = Settings(grids=[grid], chosen_rates={}, searched_rates=[1e-2, 2e-2], search_kl=2.0)
    assert settings.searched == ["rloo"] and Settings().searched == []
    measurements = Measurements(settings)
    assert sorted(measurements.search()["learning_rate"].unique()) == [1e-2, 2e-2]
    assert set(measurements.runs()["learning_rate"]) <= {1e-2, 2e-2} and set(measurements.runs()["seed"]) == {3}
    factor = grid.model_copy(update={"rate_factor": 0.5})
    own = Measurements(settings.model_copy(update={"grids": [factor], "chosen_rates": {"rloo": 1e-2}}))
    assert set(own.runs()["learning_rate"]) == {5e-3} and own.search().empty


def test_what_is_explained_after_training_here():
    table = Measurements(Settings(trained_on={"tiny": "rule"}, explained_sizes={"tiny": [16]})).explained()
    before, after = (table[table["stage"] == stage] for stage in ("untrained", "trained"))
    assert len(before) == len(after) == 2 * 3 and before["reward"].tolist() == after["reward"].tolist()
    assert (before["r2"].to_numpy() != after["r2"].to_numpy()).any()  # other completions
    again = Measurements(Settings(explained_sizes={"tiny": [16]})).explained()
    assert again.equals(before.reset_index(drop=True))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"trained_on": {"tiny": "rule"}, "trained": {"tiny": "adapter"}}, "trained_on.*both name tiny"),
        ({"trained_on": {"tiny": "rule"}, "chosen_rates": {}, "grids": [{"rewards": ["rule"], "methods": ["rloo"],
          "target_kls": [2.0]}]}, "trained_on"),
        ({"headline_level": 3.0}, "headline_level"), ({"headline_kl": 3.0}, "target_kls = .2.0"),
        ({"explained": {"sums": ["sums"]}}, "sums"), ({"explained": {"gpt": ["gold"]}}, "explained"),
        ({"grids": [{"rewards": ["rule"]}]}, "methods"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(values, words):
    with pytest.raises(InputError, match=words):
        Settings.parse(values, "any_reward.yaml")


# --- figures by hand ---


def test_samples_over_rloo_by_hand():
    # Final 0.8 at KL <= 5.5: rloo from 24 samples on; auto at 8, and within the first step for seeds 1 and 2.
    found = sample_figures(learned(), "tiny_gold")
    ratios = [1 / 3, 0.30 / 0.31 / 3, 0.30 / 0.32 / 3]
    assert found["samples_over_rloo/tiny_gold"] == pytest.approx(math.prod(ratios) ** (1 / 3))
    assert found["samples_over_rloo/tiny_gold_high"] < 1 and found["samples_over_rloo/tiny_gold_n"] == 3
    assert found["samples_over_rloo/tiny_gold_censored"] == 0 and found["kl_over_rloo/tiny_gold"] < 0.7
    assert verdict.outcome(found, "tiny_gold") == verdict.BETTER
    lower_bound = found | {"samples_over_rloo/tiny_gold_censored": 1}
    assert verdict.outcome(lower_bound, "tiny_gold") == verdict.EQUAL
    never = sample_figures(learned(auto=(0.5, 0.5, 0.6, 0.6, 0.6)), "tiny_gold")
    assert never["samples_over_rloo/tiny_gold_censored"] == 3 and never["kl_over_rloo/tiny_gold"] is not None
    assert verdict.outcome(never, "tiny_gold") == verdict.WORSE
    nothing = sample_figures(learned(rloo=(0.5, 0.5, 0.5, 0.5, 0.5)), "tiny_gold")
    assert nothing == {"samples_over_rloo/tiny_gold_n": 0} and verdict.outcome(nothing, "tiny_gold") == verdict.OPEN
    assert sample_figures(learned()[lambda t: t["method"] == "auto"], "tiny_gold") == {}


def test_batches_and_targets_have_names_of_their_own(tables, settings):
    runs = pd.concat([learned(), learned(completions=4), learned(target=5.0)], ignore_index=True)
    found = metrics(dict(tables) | {"runs": runs}, settings.model_copy(update={"headline_kl": 10.0}))
    names = ("samples_over_rloo/tiny_gold", "batch_4/samples_over_rloo/tiny_gold",
             "target_5/samples_over_rloo/tiny_gold")  # fmt: skip
    assert [found[name] for name in names] == pytest.approx([found[names[0]]] * 3)
    assert main_runs(runs)["tiny_gold"]["completions"].unique().tolist() == [8]
    assert batch_ratios(runs, 10.0)["tiny_gold"].index.tolist() == [4, 8]


def test_equal_kl_is_compared_seed_by_seed():
    found = kl_figures(learned(), "tiny_gold", [2.0, 3.0], 3.0)
    # At 3 nats: auto's own 0.80, 0.81, 0.82 at step 1; rloo's line from 0.6 at 2 to 0.7 at 4, or above it by mixing.
    assert found["reward_at_kl/tiny_gold/3/auto"] == pytest.approx(0.81)
    expected = found["reward_at_kl/tiny_gold/3/auto"] - found["reward_at_kl/tiny_gold/3/rloo"]
    assert found["paired/tiny_gold/auto_minus_rloo"] == pytest.approx(expected)
    assert found["paired/tiny_gold/auto_minus_rloo_n"] == 3 and "paired/tiny_gold/auto_minus_rloo_p" in found
    assert "reward_at_kl/tiny_gold/2/rloo" in found
    assert kl_figures(learned(seeds=1), "tiny_gold", [2.0], 2.0) == {}


def test_the_additive_family_that_explains_most_is_taken():
    rows = worth_rows({"counts": 0.3, "bag": 0.5, "trunk": 0.9}) + worth_rows({"values": 0.2}, fitted=64)
    rows += worth_rows({"": math.nan}, estimator="st", fitted=0, weight=1.0, n=64)
    table = pd.DataFrame(rows)
    assert best_worths(table)["family"].tolist() == ["bag", "values", ""]
    found = worth_figures(table)
    assert found["worth/tiny_trunk/plugin_256"] == 20 and found["worth/tiny_trunk/plugin_64"] == 10
    assert found["worth_at_64/tiny_trunk/st"] == 10 and "worth/tiny_trunk/st" not in found


def test_from_how_many_completions_a_reward_is_explained():
    row = dict(policy="sums", stage="untrained", reward="sums", r2_stderr=0.1)
    rows = [row | dict(family=family, n=n, r2=r2) for family, n, r2 in
            (("counts", 64, 0.1), ("bag", 64, 0.15), ("counts", 256, 0.3), ("bag", 256, 0.1))]  # fmt: skip
    found = explained_figures(pd.DataFrame(rows))
    assert found["explained/sums/from_n"] == 256 and found["explained/sums/best_64"] == 0.15
    assert verdict.explained_sentences(found) == ["Right sums: explained from 256 completions on; R2 0.30 with 256."]
    useless = explained_figures(pd.DataFrame([row | dict(family="bag", n=64, r2=math.nan, stage="trained")]))
    assert useless["trained/explained/sums/from_n"] is None


# --- verdict ---


def test_bars_are_held_against_figures_and_their_intervals():
    key = "worth/tiny_trunk/plugin_256"
    found = {key: 80.0, f"{key}_low": 11.0, f"{key}_high": 200.0, "samples_over_rloo/tiny_gold": 0.3,
             "samples_over_rloo/tiny_trunk": 0.6}  # fmt: skip
    assert verdict.bars(found)["verdict"].tolist() == ["reached", "reached", "missed"]
    assert verdict.bars(found | {f"{key}_low": 9.0})["verdict"].iloc[0] == "missed"
    censored = found | {"samples_over_rloo/tiny_gold_censored": 1}
    assert verdict.bars(censored)["verdict"].iloc[1] == "missed"
    assert verdict.bars({}).empty


def test_the_verdict_names_each_reward_once():
    found = {}
    for name, low, high in (("tiny_gold", 0.2, 0.5), ("text", 0.5, 1.5), ("sums", 1.1, 2.0), ("rule", None, None)):
        key = f"samples_over_rloo/{name}"
        found |= {key: 0.25, f"{key}_low": low, f"{key}_high": high, f"{key}_n": 5, f"{key}_censored": 0}
    found |= {"explained/sums/from_n": None, "explained/tiny_gold/from_n": 256}
    said = verdict.verdict_sentences(found)
    assert said[0] == ("**Use it for the gold judge, tiny model**: 4 times fewer samples than rloo. The reward is "
                       "explained from 256 completions on.")  # fmt: skip
    assert [line.split("**")[1] for line in said[1:]] == [
        "No difference shown", "Not for right sums", "Open", "Nothing to distil",
    ]  # fmt: skip
    assert verdict.verdict_sentences({}) == [] and verdict.bullets([]) == "- Not measured."


def test_auto_is_better_than_ste_only_if_the_test_says_so():
    key = "paired/tiny_trunk/auto_minus_ste"
    found = {key: 0.05, f"{key}_n": 5, f"{key}_stderr": 0.01, f"{key}_p": 0.01}
    assert verdict.paired_sentences(found, 5.0)[0].endswith("auto is better.")
    assert verdict.paired_sentences(found | {key: -0.05}, 5.0)[0].endswith("ste is better.")
    assert verdict.paired_sentences(found | {f"{key}_p": 0.2}, 5.0)[0].endswith("not told apart.")
    assert verdict.paired_sentences(found | {f"{key}_p": 0.04}, 5.0)[0].endswith("another run may decide otherwise.")
