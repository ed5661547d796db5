"""``grade memory`` and ``grade bench``: what they print and write, and that bad input is one line and exit code 2."""

import io
import json
import sys

from grade.cli.main import main
from grade.experiments import bench
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
