"""The peer: what it is told, what is made of it, and that its absence is one line."""

import pandas as pd
import pytest

from grade.cli.main import main
from grade.errors import InputError
from grade.experiments.compare import peers
from grade.experiments.compare.frontier import CURVES
from grade.experiments.compare.runs import Run, run_config

VALUES = dict(max_steps=2, max_prompt_tokens=6, max_new_tokens=10, min_new_tokens=10, batch_size=8, eval_every=1)


def test_the_peer_is_told_what_our_run_is_told():
    config = run_config(Run("grpo", 0.5, 3, 2e-3), VALUES)
    told = peers.settings(config)
    assert (told["per_device_train_batch_size"], told["num_generations"], told["max_steps"]) == (8, 4, 2)
    assert told["beta"] == 0.05  # ours divided by T = 10: its loss is a mean over tokens, ours a sum
    assert (told["learning_rate"], told["seed"], told["scale_rewards"]) == (2e-3, 3, "group")


def test_times_to_a_goal_that_all_reach():
    rows = [("ste", 0, 0.0, 0.5), ("ste", 1, 2.0, 0.9), (peers.PEER, 0, 0.0, 0.5), (peers.PEER, 1, 10.0, 0.7)]
    table = pd.DataFrame([(m, 0.1, 0, s, 8 * s, t, r, r, 0.0) for m, s, t, r in rows], columns=list(CURVES))
    costs = pd.DataFrame([("grpo", 0.2, 2**20, 0), (peers.PEER, 0.4, 2**21, 0)],
                         columns=["method", "seconds_per_sample", "peak_bytes", "start_bytes"])  # fmt: skip
    found = peers.peer_figures(table, costs)
    # Goal 0.5 + 0.5 * 0.2 = 0.6: ours after 2 * 0.1 / 0.4 = 0.5 s, the peer's after 10 * 0.1 / 0.2 = 5 s.
    assert found["peer/goal_reward"] == pytest.approx(0.6)
    assert found["peer/best_over_trl_seconds"] == pytest.approx(0.1) and found["peer/best_method"] == "ste"
    assert found["peer/end_reward/ste"] == 0.9
    assert found["peer/grpo_over_trl_seconds_per_sample"] == 0.5
    assert found[f"peer/peak_mib/{peers.PEER}"] == 2


def test_a_missing_extra_is_one_line_and_exit_code_2(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peers, "have_peer", lambda: False)
    assert main(["peers", "--output-dir", str(tmp_path / "peers")]) == 2
    assert "pip install 'grade[peers]'" in capsys.readouterr().err
    assert not (tmp_path / "peers").exists()


@pytest.mark.parametrize("values", [{"methods": ["ste"], "learning_rates": [1e-3]}, {"learning_rates": [1e-3]}])
def test_a_contest_that_would_not_compare_is_refused(values):
    with pytest.raises(InputError):
        peers.PeersConfig.parse(values)
