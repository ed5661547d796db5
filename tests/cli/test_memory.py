"""``grade memory``: what it prints, for people and for programs."""

import io
import json
import sys

from grade.cli.main import main

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
