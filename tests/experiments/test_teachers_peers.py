"""Distillation beside TRL's: the figures of the contest, and the command where TRL is installed."""

import importlib.util
import json

import pandas as pd
import pytest

from grade.cli.main import main
from grade.experiments.teachers.measure import peers
from grade.experiments.teachers.metrics import teacher_peer_figures
from grade.results import read_metrics


def test_figures_are_ratios_within_a_seed():
    costs = [("grade", 0, 6.0, 5.0, 160, 100), ("trl_distillation", 0, 8.0, 8.0, 200, 120),
             ("grade_adapter", 0, 4.0, 4.0, 140, 100), ("grade", 1, 9.0, 6.0, 150, 100),
             ("trl_distillation", 1, 9.0, 8.0, 300, 100)]  # fmt: skip
    names = ["trainer", "seed", "seconds_per_step", "cpu_seconds_per_step", "peak_bytes", "start_bytes"]
    curves = [("teacher", 0, 0, 0.0), ("grade", 0, 0, 0.4), ("grade", 0, 4, 0.1), ("trl_distillation", 0, 0, 0.4),
              ("trl_distillation", 0, 4, 0.2), ("grade", 1, 0, 0.6), ("grade", 1, 4, 0.3),
              ("trl_distillation", 1, 0, 0.6), ("trl_distillation", 1, 4, 0.2)]  # fmt: skip
    found = teacher_peer_figures(
        pd.DataFrame(curves, columns=["trainer", "seed", "step", "divergence"]).assign(teacher="rewarded"),
        pd.DataFrame(costs, columns=names).assign(teacher="rewarded"),
        pd.DataFrame({"rel_error": [0.001, -0.02]}),
    )
    assert found["over_trl/seconds"] == pytest.approx((6 / 8 + 1) / 2) and found["over_trl/seconds_n"] == 2
    assert found["over_trl/cpu_seconds"] == pytest.approx((5 / 8 + 6 / 8) / 2)
    assert found["over_trl/peak"] == pytest.approx((160 / 200 + 150 / 300) / 2)
    assert found["over_trl/peak_beyond_start"] == pytest.approx((60 / 80 + 50 / 200) / 2)
    assert (found["adapter_over_trl/seconds"], found["adapter_over_trl/seconds_n"]) == (0.5, 1)
    assert found["distilled/rewarded/start"] == pytest.approx(0.5)
    assert found["distilled/rewarded/difference"] == pytest.approx((-0.1 + 0.1) / 2, abs=1e-12)
    assert found["trl_trace/max_rel_error"] == 0.02


def toy_config(toy, folder, **values):
    sizes = {"prompt_tokens": 4, "new_tokens": 6, "batch": 4, "steps": 2, "eval_every": 1, "eval_prompts": 8,
             "learning_rate": 1e-2, "teacher_steps": 2, "teacher_texts": 64, "best_of": 4, "best_prompts": 8,
             "trace_layers": 0}  # fmt: skip
    folders = {"model": str(toy / "base"), "gold_file": str(toy / "judge.npz"), "reviews_dir": str(toy / "reviews"),
               "teachers_dir": str(folder / "teachers")}  # fmt: skip
    return sizes | folders | values


def test_a_teacher_of_the_best_of_n_is_an_adapter_and_a_model(toy, tmp_path):
    peers.TEACHERS["best_of_n"](peers.TeacherPeersConfig.parse(toy_config(toy, tmp_path)), tmp_path / "best")
    assert (tmp_path / "best/adapter/adapter_model.safetensors").is_file()
    assert (tmp_path / "best/merged/model.safetensors").read_bytes() != (toy / "base/model.safetensors").read_bytes()


@pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="the extra peers is not installed")
def test_both_learn_from_one_teacher_from_the_same_start(toy, tmp_path):
    (tmp_path / "peers.yaml").write_text(json.dumps(toy_config(toy, tmp_path)))
    out = tmp_path / "out"
    assert main(["teacher-peers", "--config", str(tmp_path / "peers.yaml"), "--output-dir", str(out)]) == 0
    rows = pd.read_csv(out / "curves.csv")
    teacher, ours, theirs = (rows[rows.trainer == name] for name in ("teacher", peers.OURS, peers.PEER))
    assert teacher.divergence.item() < 1e-5 < teacher.kl.item()  # merged, it is what its adapter makes of the base
    assert ours.divergence.iloc[0] == theirs.divergence.iloc[0]
    assert (ours.divergence.iloc[1:] < ours.divergence.iloc[0]).all()
    assert (theirs.divergence.iloc[1:] < theirs.divergence.iloc[0]).all()
    assert ours["samples"].tolist() == theirs["samples"].tolist() == [0, 4, 8]
    costs = pd.read_csv(out / "timings" / "costs.csv")
    assert len(costs) == 3 and (costs.peak_bytes >= costs.start_bytes).all()
    assert read_metrics(out / "metrics.json")["over_trl/seconds"] > 0
    assert {"trl", "torch", "threads"} <= json.loads((out / "environment.json").read_text()).keys()
