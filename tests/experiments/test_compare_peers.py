"""The peer: its settings, its figures, and that its absence is one line."""

import math

import pandas as pd
import pytest
import torch

from grade.cli.main import main
from grade.errors import InputError
from grade.experiments import trl_runs
from grade.experiments.compare import peers as contest
from grade.experiments.compare.measure import peers, text_peers
from grade.experiments.compare.measure.runs import CURVES, make_run
from grade.experiments.training_runs import Bench, sizes
from grade.gradients.objective import Objective
from grade.models.prompts import PromptBatch, ScoredTexts
from grade.results import read_metrics

VALUES = sizes(6, 10, 8, 2, 1, 8)


def test_the_peer_has_the_settings_of_our_run():
    config = make_run("grpo", 0.5, 3, 2e-3, VALUES).config
    theirs = peers.settings(config)
    assert (theirs["per_device_train_batch_size"], theirs["num_generations"], theirs["max_steps"]) == (8, 4, 2)
    assert theirs["beta"] == 0.05  # ours divided by T = 10: its loss is a mean over tokens, ours a sum
    assert (theirs["learning_rate"], theirs["seed"], theirs["scale_rewards"]) == (2e-3, 3, "group")


def contestants(kind, folder, method, reward="bag"):
    bench = kind({"policy": str(folder / "base")}, "", str(folder / "reviews"))
    return bench, make_run(method, 0.1, 0, 1e-2, VALUES | {"gumbel_topk": 16}, str(folder / reward))


def test_the_peer_learns_from_the_same_start_on_the_same_prompts(toy):
    pytest.importorskip("trl")
    bench, run = contestants(Bench, toy, "grpo")
    ours, theirs = peers.train_once(bench, run)[0], peers.train_peer(bench, run)
    assert [row["step"] for row in theirs] == [row["step"] for row in ours] == [0, 1, 2]
    assert theirs[0]["reward"] == ours[0]["reward"] and theirs[-1]["samples"] == ours[-1]["samples"] == 16
    assert theirs[0]["kl"] <= 1e-5 < theirs[-1]["kl"]


@pytest.mark.parametrize("reward", ["bag", "judge.npz"])
def test_a_black_box_is_the_same_function_for_both(toy, reward):
    bench, run = contestants(peers.FunctionBench, toy, "distilled", reward)
    with pytest.raises(InputError, match="no gradient"):
        Objective(bench.task(run).reward_model).require_gradient("ste")
    ours = peers.train_once(bench, run)[0]
    assert ours[-1]["samples"] == 16 and ours[-1]["kl"] > 1e-5
    if reward == "bag":  # the model's own rewards, though it is asked through a function
        own = peers.train_once(*contestants(Bench, toy, "distilled"))[0]
        assert ours[0]["reward"] == pytest.approx(own[0]["reward"])
    if trl_runs.have_trl():
        theirs = peers.train_peer(*contestants(peers.FunctionBench, toy, "grpo", reward))
        assert theirs[0]["reward"] == ours[0]["reward"] and theirs[-1]["kl"] > 1e-5


def test_times_to_a_goal_that_all_reach():
    rows = [("ste", 0, 0.0, 0.5), ("ste", 1, 2.0, 0.9), (peers.PEER, 0, 0.0, 0.5), (peers.PEER, 1, 10.0, 0.7)]
    table = pd.DataFrame([(m, 0.1, 0, s, 8 * s, t, r, r, 0.0) for m, s, t, r in rows], columns=list(CURVES))
    costs = pd.DataFrame([("grpo", 0.2, 2**20, 0), (peers.PEER, 0.4, 2**21, 0)],
                         columns=["method", "seconds_per_sample", "peak_bytes", "start_bytes"])  # fmt: skip
    found = contest.peer_figures(table, costs)
    # Goal 0.5 + 0.5 * 0.2 = 0.6: ours after 2 * 0.1 / 0.4 = 0.5 s, the peer's after 10 * 0.1 / 0.2 = 5 s.
    assert found["peer/goal_reward"] == pytest.approx(0.6)
    assert found["peer/end_reward/ste"] == 0.9
    # In samples both need a part of their one step: 8 * 0.25 and 8 * 0.5. The last of ours is ste.
    assert found["peer/samples_to_goal/ste"] == pytest.approx(2.0)
    assert found["peer/samples_over_trl"] == pytest.approx(0.5)
    assert found["peer/seconds_over_trl"] == pytest.approx(0.1)
    assert found[f"peer/peak_mib/{peers.PEER}"] == 2


def test_what_differs_from_run_to_run_is_written_apart(tmp_path):
    table = pd.DataFrame([("ste", 0.1, 0, 1, 8, 2.0, 0.9, 0.5, 0.1)], columns=list(CURVES))
    figures = {"peer/end_reward/ste": 0.9, "peer/seconds_per_sample/ste": 0.2, "peer/settings/seed": 0}
    contest.write_peers(tmp_path, table, figures)
    assert set(read_metrics(tmp_path / "metrics.json")) == {"peer/end_reward/ste", "peer/settings/seed"}
    timed = read_metrics(tmp_path / "timings" / "metrics.json")
    assert set(timed) == {"peer/seconds_per_sample/ste"}
    assert "seconds" not in pd.read_csv(tmp_path / "curves.csv")
    assert pd.read_csv(tmp_path / "timings" / "seconds.csv").seconds.tolist() == [2.0]


@pytest.mark.parametrize("command", ["peers", "teacher-peers", "step-peers"])
def test_a_missing_extra_is_one_line_and_exit_code_2(command, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(trl_runs, "have_trl", lambda: False)
    assert main([command, "--output-dir", str(tmp_path / "peers")]) == 2
    assert "pip install -e '.[peers]'" in capsys.readouterr().err
    assert not (tmp_path / "peers").exists()


def test_other_ways_to_use_text_are_evaluated_alike():
    of = {"texts": "reference:32", "steps": 2, "batch": 4, "learning_rate": 1e-2}
    contestants = [{"method": "prompted", "strengths": ["", "A wonderful film."]},
                   {"method": "best_of_n", "strengths": [1, 8]}, {"method": "awr", "strengths": [0.5], **of},
                   {"method": "raft", "strengths": [0.25], **of},
                   {"method": "policy_gradient", "strengths": [0.1], **of}]  # fmt: skip
    config = text_peers.TextPeersConfig.parse({"contestants": contestants, "eval_prompts": 16})
    *_, rows = text_peers.compare_text_peers(config)
    rows = rows.set_index(["method", "strength", "step"])
    assert rows.kl["prompted", "", 0] == 0 < rows.kl["prompted", "A wonderful film.", 0]
    assert rows.kl["best_of_n", 1, 0] == 0 and rows.kl["best_of_n", 8, 0] == pytest.approx(math.log(8) - 7 / 8)
    assert rows.reward["best_of_n", 8, 0] > rows.reward["best_of_n", 1, 0]
    trained = rows[rows.source == "reference:32"]
    assert (trained[["samples", "texts", "reward_calls"]] == 32).all(None)
    assert (trained.xs(2, level="step").kl > 0).all() and (trained.xs(0, level="step").kl == 0).all()


def test_weights_of_texts_and_pairs_of_completions_follow_the_reward():
    advantage = torch.tensor([-1.0, 0.0, 1.0, 9.0])
    awr = text_peers.likelihood_weights("awr", advantage, 0.5)
    assert torch.allclose(awr[:3].log(), advantage[:3] / (0.5 * advantage.std())) and awr[3] == 20
    assert text_peers.likelihood_weights("raft", advantage, 0.5).tolist() == [0, 0, 1, 1]
    prompts = PromptBatch(torch.tensor([[0, 5], [7, 8]] * 3), torch.tensor([[0, 1], [1, 1]] * 3))
    ids = torch.arange(12).view(6, 2)
    texts = ScoredTexts(prompts, ids, torch.ones_like(ids), torch.tensor([0.3, 1.0, 0.1, 1.0, 0.2, 1.0]))
    pairs = {"prompt_ids": [[5]], "chosen_ids": [[0, 1]], "rejected_ids": [[4, 5]]}
    assert text_peers.preference_pairs(texts) == pairs  # of the other prompt all completions are as good
