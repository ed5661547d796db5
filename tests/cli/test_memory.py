"""``grade memory`` and ``grade bench``: what they print and write, and that bad input is one line and exit code 2."""

import io
import json
import sys

import pytest

from grade.cli.main import main
from grade.cli.memory import step_of
from grade.errors import InputError
from grade.experiments import bench
from grade.files import write_json
from grade.memory.settings import StepConfig
from grade.results import read_metrics

TINY = ["memory", "--model", "tiny", "--prompt-tokens", "4", "--max-new-tokens", "2", "--gumbel-topk", "8"]


def test_a_trace_is_json_for_programs(capsys):
    assert main([*TINY, "--json", "--gradient-checkpointing", "--set", "lora.r=4"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["config"]["gradient_checkpointing"] and data["config"]["lora"]["r"] == 4
    assert data["peak_bytes"] == sum(data["categories"].values()) and data["flops"] > 0


def test_what_fits_and_saves_is_a_table_for_people_and_json_for_programs(capsys):
    options = ["memory", "--model", "tiny", "--prompt-tokens", "4", "--max-new-tokens", "2", "--method", "grpo"]
    options += ["--num-generations", "3", "--fits", "700000B", "--overhead", "100000B"]
    assert main(options) == 0
    out = capsys.readouterr().out
    for words in ("grpo (G=3, 1 update)", "at the peak", "peak of each phase", "reward ", "largest tensors", "TFLOP",
                  "largest that fits 683.59 KiB", "single changes that save"):  # fmt: skip
        assert words in out
    assert main([*options, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["config"]["method"], data["config"]["batch_size"]) == ("grpo", 3)
    assert data["fit"]["batch_size"] % 3 == 0 and data["fit"]["peak"] <= 600_000
    assert main([*TINY, "--fits", "1KiB"]) == 0
    assert "no batch: " in capsys.readouterr().out


def test_a_runs_own_yaml_is_a_step(tmp_path, capsys):
    """With training's defaults, and its names."""
    write_json(tmp_path / "bag" / "reward.json", {"kind": "trunk"})
    run, step, name = tmp_path / "run.yaml", tmp_path / "step.yaml", f"reward: {tmp_path / 'bag'}"
    run.write_text(f"model: tiny\nmethod: ste\nbeta: 0.5\nmax_completion_length: 6\nlora: {{r: 2}}\n{name}\n")
    step.write_text("model: tiny\nmax_new_tokens: 6\nlora: {r: 2}\n")
    found = step_of([run], ["max_prompt_length=7", "lora.alpha=8"])
    sizes = dict(batch_size=8, max_new_tokens=6, prompt_tokens=7, hops=2, gumbel_topk=256, reward="trunk")
    assert found == StepConfig(model="tiny", method="ste", dtype="float32", lora=dict(r=2, alpha=8), **sizes)
    assert step_of([step], ["per_device_train_batch_size=3"]).changed(batch_size=1) == step_of([step])
    assert step_of([step]).dtype == "bfloat16"
    run.write_text("model: tiny\nnum_generations: 4\nbf16: true\nreward: [hf:judge, rewards.py:length]\n")
    found = step_of([run])
    assert (found.method, found.num_generations, found.dtype, found.batch_size) == ("rloo", 4, "bfloat16", 8)
    assert capsys.readouterr().err.startswith("reward hf:judge is not traced")
    run.write_text("model: tiny\nmethod: grpo\nhops: 3\nlearning_rate: 1.0\n")
    with pytest.raises(InputError, match="run.yaml: hops: got 'hops'; allowed: a setting of this method"):
        step_of([run])


def test_tracing_shows_on_a_terminal_how_far_it_is(monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for quiet in ("", "0"):
        monkeypatch.setenv("GRADE_PROGRESS", quiet)
        monkeypatch.setattr("sys.stderr", Terminal())
        assert main(TINY) == 0
        assert ("steps traced" in sys.stderr.getvalue() and "ste B=" in sys.stderr.getvalue()) == (quiet != "0")
    assert "steps traced" not in capsys.readouterr().out


def test_bench_writes_every_step_and_the_headline_figures(tmp_path, capsys):
    target, metrics = tmp_path / "new" / "memory.json", tmp_path / "metrics.json"
    options = ["--output", str(target), "--metrics", str(metrics), "--set", "models=[tiny]", "--set"]
    assert main(["bench", "memory", *options, "steps=[8]"]) == 0
    data = json.loads(target.read_text())
    assert read_metrics(tmp_path / "timings.json")["environment/torch"]
    assert "environment" not in data and [row["config"]["method"] for row in data["steps"]] == ["gumbel_legacy"]
    figures = read_metrics(metrics)
    assert figures["cpu/steps"] == 1 and figures["cpu/max_rel_error"] < 0.01
    assert str(target) in capsys.readouterr().out
    assert main(["bench", "memory", *options, "steps=[13]"]) == 2
    assert "steps: got 13; allowed: 0 to 12" in capsys.readouterr().err


def test_without_a_gpu_cuda_is_refused_and_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    assert main(["bench", "memory", "--device", "cuda", "--output", str(tmp_path / "x" / "memory.json")]) == 2
    assert "this machine has no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "x" / "memory.json").exists()
