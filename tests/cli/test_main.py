"""The command line on a tiny project on disk: what it writes."""

import contextlib
import json
import shutil

import pandas as pd
import pytest
import torch
from conftest import save_toy_files
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from grade.cli.main import main
from grade.entropy.probe import ProbeReport
from grade.results import read_metrics

SMALL = {
    "method": "ste", "max_steps": 3, "max_prompt_length": 6, "truncation": "right", "max_completion_length": 6,
    "min_completion_length": 2, "per_device_train_batch_size": 4, "eval_strategy": "steps", "eval_steps": 2,
    "eval_prompts": 8, "final_eval_prompts": 16, "kl_eval_prompts": 8, "learning_rate": 1e-2, "gumbel_topk": 16,
    "beta": 0.25, "lr_scheduler_type": "constant", "seed": 0, "use_cpu": True, "samples": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Base, reward model, judge, reviews and a config, as the pipeline's stages leave them."""
    root = tmp_path_factory.mktemp("project")
    save_toy_files(root)
    places = {"model": "base", "reward": "bag", "gold": "judge.npz", "train_dataset": "reviews/policy.jsonl",
              "eval_dataset": "reviews/validation.jsonl"}  # fmt: skip
    values = SMALL | places | {"lora": {"r": 2, "alpha": 4}}
    (root / "train.yaml").write_text(json.dumps(values))  # JSON is YAML
    return root


def train(project, output, *extra):
    with contextlib.chdir(project):  # whose files are named by relative paths
        return main(["train", "--config", "train.yaml", "--output-dir", str(output), *extra])


@pytest.fixture(scope="module")
def trained(project, tmp_path_factory):
    output = tmp_path_factory.mktemp("runs") / "ste"
    assert train(project, output, "--method", "ste", "--set", "save_steps=2", "--log_completions") == 0
    return output


def test_train_writes_adapter_history_metrics_and_samples(trained):
    history = pd.read_csv(trained / "history.csv")
    assert history.step.tolist() == [0, 1, 2, 3] and history.samples.tolist() == [0, 4, 8, 12]
    names = ["reward", "kl", "loss", "tau", "grad_norm", "residual"]
    assert history[[f"train/{name}" for name in names]].iloc[1:].notna().all(None)
    assert history["val/reward_mean"].notna().tolist() == [True, False, True, True]
    times = pd.read_csv(trained / "timings.csv")  # apart: they differ from run to run
    assert times.step.tolist() == [0, 1, 2, 3] and times.seconds.is_monotonic_increasing
    assert not [column for column in history if "seconds" in column]
    metrics, timings = read_metrics(trained / "metrics.json"), read_metrics(trained / "timings.json")
    assert not [name for name in metrics if name.startswith("environment") or "seconds" in name]
    assert metrics["before/val/kl_max"] <= 1e-6 and metrics["after/val/kl"] > 0
    assert metrics["gain/reward_n"] == 16 and timings["seconds_per_step"] > 0 and timings["peak_memory_bytes"] > 0
    gain = metrics["after/val/reward_mean"] - metrics["before/val/reward_mean"]
    assert metrics["gain/reward"] == pytest.approx(gain, abs=1e-5)  # six significant digits


def test_probe_writes_a_report_and_names_a_state_that_does_not_fit(project, trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(project)
    options = ["--adapter", str(trained / "adapter"), "--output", str(tmp_path / "report.json")]
    options += ["--backbone=base", "--reward=bag", "--reviews=reviews", "--batch_config.B=2", "--batch_config.G=3"]
    options += ["--generation.max_new_tokens=4"]
    assert main(["probe", *options]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["figures"]["samples"] == 6 and report["config"]["batch_config"]["G"] == 3
    assert len(report["texts"]) == 6 and len({prompt for prompt, _ in report["texts"]}) == 2
    again = ProbeReport.of(report)
    assert again.as_dict() == {name: report[name] for name in again.as_dict()} and again.step is None
    timings = json.loads((tmp_path / "timings_report.json").read_text())
    assert timings["seconds/sampling"] > 0 and not {"environment", "seconds/sampling"} & {*report, *report["figures"]}
    assert report["figures"]["delta_h1_momentum"] != 0  # optimizer.pt beside the adapter was taken
    follow = ["--set", "follow=[train.yaml]"]
    assert main(["probe", *options, *follow]) == 0
    other = json.loads((tmp_path / "report.json").read_text())["figures"]
    assert other["delta_h1_momentum"] == pytest.approx(report["figures"]["delta_h1_momentum"], rel=0.5)
    assert other["delta_h1_gradient"] != report["figures"]["delta_h1_gradient"] and "delta_h1_ascent" not in other
    capsys.readouterr()
    other_shape = torch.load(trained / "adapter" / "optimizer.pt", weights_only=True)
    other_shape["state"][0]["exp_avg"] = torch.ones(1)
    torch.save(other_shape, tmp_path / "state.pt")
    assert main(["probe", *options, "--optimizer-state", str(tmp_path / "state.pt")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"optimizer state: got '{tmp_path / 'state.pt'}'" in line


def test_a_stage_that_runs_again_writes_the_same_bytes(project, trained, tmp_path):
    """The pipeline removes a stage's outs before it runs it again."""
    output, outs = tmp_path / trained.name, ("adapter", "checkpoints", "samples.json", "metrics.json", "history.csv")
    shutil.copytree(trained, output)
    for name in outs:
        shutil.rmtree(output / name) if (output / name).is_dir() else (output / name).unlink()
    options = ("--method", "ste", "--set", "save_steps=2", "--log_completions", "--resume", "auto")
    assert train(project, output, *options) == 0
    files = [p.relative_to(trained) for name in outs for p in (trained / name, *(trained / name).rglob("*"))]
    assert [str(file) for file in files if (trained / file).is_file() and
            (output / file).read_bytes() != (trained / file).read_bytes()] == []  # fmt: skip


def test_evaluate_repeats_the_runs_own_evaluation(project, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(project)
    arguments = ["evaluate", "--config", "train.yaml", "--adapter", str(trained / "adapter")]
    assert main([*arguments, "--output", str(tmp_path / "eval.json")]) == 0
    got, want = read_metrics(tmp_path / "eval.json"), read_metrics(trained / "metrics.json")
    assert got["val/reward_mean"] == pytest.approx(want["after/val/reward_mean"], rel=1e-5)  # six digits


def test_a_run_is_shown_with_its_history_and_completions(trained, tmp_path, capsys):
    assert main(["show", str(trained), "--rows", "2"]) == 0
    blocks = capsys.readouterr().out.split("\n\n")
    history = pd.read_csv(trained / "history.csv").set_index("step")
    lines = [line.split() for line in blocks[0].splitlines()[1:]]
    assert [line[0] for line in lines] == ["0", "2", "3"]  # those with an evaluation
    columns = ("train/reward", "train/kl", "val/reward_mean", "val/reward_stderr")
    assert lines[2][1:] == [f"{history.loc[3, name]:.4g}" for name in columns]
    assert [block.splitlines()[0] for block in blocks[1:]] == [
        "completions, step 3: 2 of 4 completions", "eval, step 3: 2 of 16 completions"
    ]  # fmt: skip
    assert main(["show", str(tmp_path)]) == 2 and "with checkpoints or history.csv" in capsys.readouterr().err


@torch.no_grad()
def test_the_adapter_loads_from_any_folder_and_merges_to_the_same_logits(project, trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the run named its base "base", from its own folder
    ids = AutoTokenizer.from_pretrained(project / "base")("The film was a delight.", return_tensors="pt").input_ids
    base = AutoModelForCausalLM.from_pretrained(project / "base")
    bare = base(ids).logits
    want = PeftModel.from_pretrained(base, trained / "adapter")(ids).logits
    assert (want - bare).norm() > 1e-3 * want.norm()
    assert torch.equal(AutoPeftModelForCausalLM.from_pretrained(trained / "adapter")(ids).logits, want)
    assert main(["merge", str(trained), "out"]) == 0
    got = AutoModelForCausalLM.from_pretrained("out")(ids).logits
    assert (got - want).norm() <= 1e-5 * want.norm()  # the requirement; float32 sums in another order


def test_tensorboard_gets_the_history_when_asked(project, tmp_path):
    pytest.importorskip("tensorboard")
    assert train(project, tmp_path / "run", "--set", "report_to=[tensorboard]") == 0
    assert list((tmp_path / "run").rglob("events.out.tfevents.*"))
