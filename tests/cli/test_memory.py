"""``grade memory``: what it prints for programs, and which steps it reads."""

import json

import pytest

from grade.cli.main import main
from grade.cli.memory import step_of
from grade.errors import InputError
from grade.files import write_json
from grade.memory.settings import StepConfig

TINY = ["memory", "--model", "tiny", "--prompt-tokens", "4", "--max-new-tokens", "2", "--gumbel-topk", "8"]


def test_a_trace_is_json_for_programs(capsys):
    assert main([*TINY, "--json", "--gradient-checkpointing", "--set", "lora.r=4"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["config"]["gradient_checkpointing"] and data["config"]["lora"]["r"] == 4
    assert data["peak_bytes"] == sum(data["categories"].values()) and data["flops"] > 0


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
