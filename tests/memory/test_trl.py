"""Traces of TRL's trainers against their own steps, and files that ``grade memory --trl`` takes or refuses."""

import importlib.util
import json

import pytest

from grade.cli.main import main
from grade.errors import InputError

pytestmark = pytest.mark.skipif(not importlib.util.find_spec("trl"), reason="the extra peers is not installed")
SFT = "model_name_or_path: tiny\nmax_length: 24\nper_device_train_batch_size: 2\n"
SCRIPT = """
import sys, torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

name = "tiny"
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
args = DPOConfig(max_length=20, per_device_train_batch_size=2, learning_rate=float(sys.argv[1]))
DPOTrainer(model=model, args=args, train_dataset=sys.exit("never executed"), peft_config=LoraConfig(r=4)).train()
"""


def written(folder, text, name="run.yaml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


CASES = {
    "grpo": {"trainer": "grpo", "max_completion_length": 6, "num_generations": 2, "beta": 0.1, "use_peft": True},
    "grpo, kept": {"trainer": "grpo", "max_completion_length": 6, "num_generations": 2,
                   "gradient_checkpointing": False, "gradient_accumulation_steps": 2},
    "sft": {"trainer": "sft", "max_length": 80, "use_peft": True, "gradient_checkpointing": False},
    "dpo": {"trainer": "dpo", "max_length": 40, "bf16": False},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_traced_peak_is_that_of_trls_own_step_on_a_deeper_model(case):
    from grade.experiments.trl_traces import trl_traces

    (row,) = trl_traces({case: CASES[case]}, "tiny", 5).itertuples()
    assert row.traced == pytest.approx(row.tracked, rel=1e-4)


def test_passes_that_are_left_out_change_neither_peaks_nor_operations():
    from grade.memory.trl import TrlStep, trace_trl

    values = {"model_name_or_path": "tiny", "max_completion_length": 40, "per_device_train_batch_size": 2}
    step = TrlStep(trainer="grpo", values=values | {"num_generations": 2}, prompt_tokens=4)
    full, short = (trace_trl(step, all_layers=every) for every in (True, False))
    assert full.phases.keys() == short.phases.keys() and full.peak == short.peak
    rollout, shorter = (sum(traced.phases["rollout"].values()) for traced in (full, short))
    assert shorter == pytest.approx(rollout, rel=0.01) and short.flops == pytest.approx(full.flops, rel=0.01)


def test_a_yaml_is_traced_with_what_fits_and_what_saves_and_liger_is_said_to_be_left_out(tmp_path, capsys):
    path = written(tmp_path, SFT + "use_liger_kernel: true\nassistant_only_loss: false\n")
    assert main(["memory", "--trl", path, "--prompt-tokens", "4", "--fits", "6MiB", "--overhead", "0"]) == 0
    out = capsys.readouterr().out
    for text in ("TRL's SFTTrainer: B=2 P=4 T=20", "per_device_train_batch_size", "max_length", "half the batch",
                 "use_liger_kernel: traced without it", "settings that fit 6.00 MiB"):  # fmt: skip
        assert text in out


def test_a_script_is_read_and_not_executed(tmp_path, capsys):
    assert main(["memory", "--trl", written(tmp_path, SCRIPT, "run.py"), "--prompt-tokens", "4", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["config"]["values"] == {"model_name_or_path": "tiny", "dtype": "bfloat16", "use_peft": True,
                                        "lora_r": 4, "max_length": 20, "per_device_train_batch_size": 2}  # fmt: skip
    assert data["notes"] == ["run.py:9: learning_rate is no constant; TRL's default is taken"]
    assert data["categories"]["adapter"] > 0


def test_a_colocated_vllm_takes_its_share_of_the_card(tmp_path, capsys):
    text = "model_name_or_path: tiny\nnum_generations: 2\nper_device_train_batch_size: 2\nuse_vllm: true\n"
    path = written(tmp_path, text + "max_completion_length: 4\nvllm_gpu_memory_utilization: 0.25\n")
    assert main(["memory", "--trl", path, "--prompt-tokens", "4", "--fits", "4MiB", "--overhead", "0", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["overhead_bytes"] == 2**20 and "rollout" not in data["phases"]
    assert data["notes"] == ["vLLM on the same card takes 0.25 of it beside the trace"]


@pytest.mark.parametrize(
    "text, files, named",
    [
        (SFT + "assistant_only_loss: false\nmax_lenth: 9\n", [], "max_lenth: got 9; allowed: a setting of trl sft ("),
        (SFT, [], "sft or dpo before the file"),
        (SFT, ["kto"], "--trl: got 'kto'; allowed: grpo, sft, dpo"),
        (SFT + "load_in_4bit: true\n", ["sft"], "load_in_4bit: got True"),
        (SFT + "per_device_train_batch_size_: [\n", ["sft"], "a readable YAML file"),
        ("- 1\n", ["sft"], "a mapping of TRL's settings"),
        ("max_length: 64\n", ["sft"], "model_name_or_path: got None"),
        ("num_generations: 3\nmodel_name_or_path: tiny\n", [], "divisible"),
    ],
)
def test_what_cannot_be_traced_is_one_line(tmp_path, text, files, named, capsys):
    assert main(["memory", "--trl", *files, written(tmp_path, text)]) == 2
    line = capsys.readouterr().err
    assert named in line and line.count("\n") == 1


def test_a_script_for_another_trainer_a_missing_file_and_our_own_settings_are_refused(tmp_path, capsys):
    for files, named in (
        ([written(tmp_path, "from trl import KTOConfig\nKTOConfig(beta=1)\n", "kto.py")], "'KTOConfig'"),
        ([str(tmp_path / "none.yaml")], "No such file"),
        ([written(tmp_path, SFT), "--hops", "3"], "hops: got 3"),
    ):
        assert main(["memory", "--trl", *files]) == 2
        assert named in capsys.readouterr().err


def test_without_trl_it_is_said_how_to_install_it(monkeypatch):
    from grade.memory import trl_file

    monkeypatch.setattr(trl_file, "have_trl", lambda: False)
    with pytest.raises(InputError, match="peers"):
        trl_file.read_trl("run.yaml")
