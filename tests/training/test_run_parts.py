"""A run's settings, folder, checkpoints and results, one function at a time."""

import json
import os
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from grade.errors import InputError
from grade.models.adapter import LoraSettings
from grade.training import checkpoint, folder, run
from grade.training import config as module
from grade.training.checkpoint import Saving, clean, last_checkpoint, load_optimizer, not_written
from grade.training.config import GradeConfig, TrainConfig
from grade.training.evaluate import Evaluation
from grade.training.run import RunResult, _line, _samples, history_rows, run_metrics

# ---- settings ----
MORE = {
    "sampler": "own", "sampler_max_difference": 1.0, "sampler_timeout": 600.0, "sampler_folder": None,
    "importance_sampling": "none", "importance_sampling_cap": 2.0, "gradient_checkpointing": False, "bf16": False,
}  # fmt: skip
OUTSIDE = {
    "sampler_max_difference": [0.0, -1.0], "sampler_timeout": [0.0], "importance_sampling_cap": [0.0],
    "importance_sampling": ["tokens"], "sampler": ["mine"], "reward_scope": ["prompt"], "truncation": ["middle"],
    "eval_steps": [0, -1], "save_steps": [0], "logging_steps": [-0.5], "temperature": [-1.0], "beta": [-1e-9],
    "optim": ["adam"], "eval_strategy": ["never"], "save_strategy": ["never"], "logging_strategy": ["x"],
}  # fmt: skip
INSIDE = {
    "sampler_max_difference": 1e-9, "importance_sampling_cap": 0.5, "eval_steps": 0.5, "save_steps": 1,
    "final_eval_prompts": 2, "eval_noise_block": 1, "max_steps": 1, "per_device_eval_batch_size": 1, "beta": 0.0,
    "dataloader_num_workers": 0, "warmup_steps": 0.5, "data_seed": 2**32 - 1,
}  # fmt: skip


def settings(tmp_path, **changes):
    return GradeConfig(output_dir=str(tmp_path), use_cpu=True, **changes)


def test_defaults_of_the_other_settings():
    assert {name: GradeConfig.default_of(name) for name in MORE} == MORE
    assert TrainConfig.default_of("lora") == LoraSettings()


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in OUTSIDE.items() for value in values])
def test_what_is_out_of_range_is_refused_by_name(name, value, tmp_path):
    with pytest.raises(InputError, match=f"^{name}: got"):
        settings(tmp_path, **{name: value})


@pytest.mark.parametrize("name", INSIDE)
def test_what_is_just_in_range_is_taken(name, tmp_path):
    assert getattr(settings(tmp_path, **{name: INSIDE[name]}), name) == INSIDE[name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(per_device_train_batch_size=6, method="rloo", num_generations=4), "num_generations: got 4; .* = 6"),
        (dict(per_device_train_batch_size=6, method="grpo", num_generations=3, minibatches=4), "minibatches: got 4"),
        (dict(max_steps=2, warmup_steps=2), "warmup_steps: got 2; allowed: less than max_steps = 2"),
        (dict(max_steps=2, warmup_steps=1), None), (dict(max_steps=-1, warmup_steps=7), None),
        (dict(deepspeed={"a": 1}), "deepspeed: got"), (dict(target_kl=1.0, beta=0.1), None),
        (dict(remove_unused_columns=True), "remove_unused_columns: got True"),
        (dict(sampler="shared", method="rloo"), None), (dict(sampler="shared", method="ste"), None),
        (dict(sampler="shared", method="gumbel"), "method: got 'gumbel'; allowed: .*ste.*sampler = shared"),
        (dict(sampler="shared", method="ste_legacy"), "method: got 'ste_legacy'"),
        (dict(sampler="shared", method="rloo", importance_sampling="token"), None),
        (dict(sampler="shared", method="distilled", importance_sampling="token"),
         "importance_sampling: got 'token'; allowed: none with distilled; token or sequence with"),
        (dict(method="rloo", importance_sampling="sequence"), "none with sampler = own"),
    ],
)  # fmt: skip
def test_settings_that_must_fit_each_other(changes, message, tmp_path):
    if message is None:
        settings(tmp_path, **changes)
        return
    with pytest.raises(InputError, match=message):
        settings(tmp_path, **changes)


def test_which_relaxed_methods_take_tokens_of_another_sampler():
    taken = {name for name in module.RELAXED if module._replays_given(name)}
    assert "ste" in taken and not taken & {"gumbel", "gumbel_legacy", "ste_legacy"}


def test_layers_are_recomputed_by_the_engines(tmp_path):
    for changes, recompute in (({}, False), ({"gradient_checkpointing": True}, True)):
        made = settings(tmp_path, **changes)
        assert made.gradient_checkpointing is recompute and not made.activation_checkpointing
    assert settings(tmp_path, activation_checkpointing=True).gradient_checkpointing is True


def test_trackers_are_those_that_are_named_and_installed(tmp_path, monkeypatch):
    assert settings(tmp_path, report_to="none").trackers == [] == settings(tmp_path, report_to=[]).trackers
    monkeypatch.setattr(module, "_is_installed", lambda name: True)
    assert settings(tmp_path, report_to=["tensorboard", "none"]).trackers == ["tensorboard"]
    assert settings(tmp_path, report_to="tensorboard").trackers == ["tensorboard"]
    monkeypatch.setattr(module, "_is_installed", lambda name: name == "wandb")
    with pytest.raises(InputError, match="report_to: got 'mlflow'; .*pip install mlflow"):
        settings(tmp_path, report_to=["wandb", "mlflow"])
    monkeypatch.undo()
    monkeypatch.setattr(module.integration_utils, "is_comet_available", lambda: False, raising=False)
    assert module._is_installed("comet_ml") is False and module._is_installed("no_such_function") is True


def test_a_strategy_may_be_written_without_quotes(tmp_path):
    values = {"output_dir": str(tmp_path), "use_cpu": True, "save_strategy": False, "eval_on_end": False}
    made = TrainConfig.parse(values)
    assert made.save_strategy == "no" and made.eval_on_end is False


@pytest.mark.parametrize(
    ("method", "changes", "prompts", "completions"),
    [("remax", {}, 8, 16), ("rloo", {"num_generations": 2}, 4, 8), ("gumbel", {}, 8, 8), ("distilled", {}, 1, 8)],
)
def test_completions_of_a_microbatch(method, changes, prompts, completions, tmp_path):
    made = settings(tmp_path, method=method, **changes)
    assert (made.batch_prompts, made.batch_completions) == (prompts, completions)
    assert made.sharded is False


def test_without_held_out_prompts_nothing_is_evaluated(tmp_path):
    for name, on in (("", False), ("held.jsonl", True)):
        made = TrainConfig(output_dir=str(tmp_path), use_cpu=True, eval_dataset=name)
        assert made.eval_on_start is on and made.eval_on_end is on


# ---- a run's folder ----
@pytest.mark.parametrize(
    ("spec", "places"),
    [
        ("a/b", ("a/b",)), ("a.py:f", ("a.py:f", "a.py")), ("hf:a/b@GOOD", ("a/b",)), ("hf:a:b@C", ("a:b", "a")),
        ("", ()), (":x", (":x",)), ("a@b@c", ("a",)),
    ],
)  # fmt: skip
def test_paths_that_an_input_may_mean(spec, places):
    assert folder._places(spec) == places


def test_an_inputs_hash_is_of_its_names_sizes_and_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_text("one")
    (tmp_path / "a" / "sub").mkdir()
    (tmp_path / "a" / "sub" / "y").write_text("two")
    known = folder._fingerprint("a")
    assert known == folder._fingerprint(str(tmp_path / "a")) != "a" and len(known) == 64
    assert folder._fingerprint("a/x") == folder._fingerprint("a/x:train") == folder._fingerprint("hf:a/x@GOOD") != known
    assert folder._fingerprint("nothing/here:f") == "nothing/here:f"
    assert folder._fingerprint("") == "" and folder._fingerprint(".") == "." and folder._fingerprint("..") == ".."
    (tmp_path / "a" / "x").write_text("eno")
    other = folder._fingerprint("a")
    assert other != known
    (tmp_path / "a" / "x").write_text("one")
    os.replace(tmp_path / "a" / "x", tmp_path / "a" / "z")
    assert folder._fingerprint("a") not in (known, other)
    copy = tmp_path / "b"
    copy.write_text("one")
    os.replace(tmp_path / "a" / "z", tmp_path / "a" / "x")
    assert folder._fingerprint("b") == folder._fingerprint("a/x")  # of a file its name does not count


@pytest.mark.parametrize(("size", "seen"), [(64, True), (65, False)])
def test_of_very_large_files_beginning_and_end_are_read(size, seen, tmp_path, monkeypatch):
    """In units of 1 byte instead of MiB."""
    assert folder._HASHED_BYTES == 2**20
    monkeypatch.setattr(folder, "_HASHED_BYTES", 1)
    file, digests = tmp_path / "weights", []
    for place in (None, 0, 1, size - 2, size - 1):
        content = bytearray(size)
        if place is not None:
            content[place] = 1
        file.write_bytes(content)
        digests.append(folder._digest([file], file))
    assert len({digests[0], digests[1], digests[4]}) == 3  # the first byte and the last one count
    assert (digests[2] != digests[0]) is seen and (digests[3] != digests[0]) is seen


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(InputError, match="input: got '.*gone'; allowed: a file that can be read .No such file"):
        folder._digest([tmp_path / "gone"], tmp_path)


def a_run(tmp_path, **changes):
    return TrainConfig(output_dir=str(tmp_path / "run"), method="ste", use_cpu=True, **changes)


def test_which_settings_decide_a_run(tmp_path):
    known = folder.about(a_run(tmp_path))
    free = dict(run_name="x", disable_tqdm=True, base_name="b", samples=1, log_completions=True, save_steps=3,
                hub_token="t", push_to_hub=False, log_level="error", eval_on_start=False, ddp_timeout=9)  # fmt: skip
    again = folder.about(a_run(tmp_path, **free))
    assert again["settings"] == known["settings"] and again["code"] == known["code"] and len(known["code"]) == 64
    assert not set(free) & set(known["settings"]) and "output_dir" not in known["settings"]
    for name, value in (("beta", 0.5), ("seed", 1), ("lora", {"r": 2}), ("gradient_accumulation_steps", 2)):
        changed = folder.about(TrainConfig.parse({"output_dir": str(tmp_path), "method": "ste", "use_cpu": True,
                                                  name: value}))["settings"]  # fmt: skip
        assert [key for key in changed if changed[key] != known["settings"][key]] == [name]
    assert known["settings"]["lora"] == LoraSettings().model_dump()
    assert json.loads(json.dumps(known)) == known
    assert {field.name for field in fields(TrainConfig) if field.init} > set(known["settings"])


def test_microbatches_count_on_all_processes_and_each_reward_is_an_input(tmp_path, monkeypatch):
    config = a_run(tmp_path, reward=["a.py:f", "hf:some/judge"], gradient_accumulation_steps=3)
    monkeypatch.setattr(type(config), "world_size", property(lambda self: 2))
    found = folder.about(config)
    assert found["settings"]["gradient_accumulation_steps"] == 6
    assert {name: text for name, text in found["inputs"].items() if name.startswith("reward")} == {
        "reward 0": "a.py:f", "reward 1": "hf:some/judge"
    }  # fmt: skip
    assert set(found["inputs"]) == {"model", "train_dataset", "eval_dataset", "gold", "reward 0", "reward 1"}
    assert {"a.py:f", "a.py", "some/judge"} <= set(folder.inputs(config))


def test_a_finished_run_is_finished_while_its_results_are_there(tmp_path):
    assert folder._finished(tmp_path, {"finished": True}) is False
    (tmp_path / folder.RESULTS_FILE).write_text("{}")
    assert folder._finished(tmp_path, {"finished": True}) is True
    assert folder._finished(tmp_path, {}) is False


def test_a_run_is_noted_with_an_id_and_its_end(tmp_path):
    config = a_run(tmp_path)
    (tmp_path / "run" / "checkpoint-2").mkdir(parents=True)
    folder.begin(config)
    note = json.loads((tmp_path / "run" / folder.RUN_FILE).read_text())
    assert len(note.pop("id")) == 12 and note == folder.about(config)
    assert [path.name for path in (tmp_path / "run").iterdir()] == [folder.RUN_FILE]
    folder.finish(config.output_dir)
    text = (tmp_path / "run" / folder.RUN_FILE).read_text()
    ended = json.loads(text)
    assert ended.pop("finished") is True and len(ended.pop("id")) == 12 and ended == note
    assert text == json.dumps(json.loads(text), indent=1, sort_keys=True) + "\n"


@pytest.mark.parametrize("resumed", [False, True])
def test_trackers_continue_a_run_that_is_resumed(resumed, tmp_path, monkeypatch):
    names = ("TENSORBOARD_LOGGING_DIR", "WANDB_RESUME", "WANDB_RUN_ID", "DVCLIVE_RESUME")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    folder._write(tmp_path, {"settings": {}, "inputs": {}, "code": "", "id": "abc"})
    folder.continue_trackers(tmp_path, resumed)
    assert [os.environ.get(name) for name in names] == [
        str(tmp_path / "tensorboard"), "allow", "abc", "true" if resumed else None
    ]  # fmt: skip
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    folder.continue_trackers(tmp_path / "none", resumed)
    assert os.environ["WANDB_RUN_ID"] == "mine"


# ---- checkpoints ----
def checkpoints(folder, *steps):
    for step in steps:
        (folder / f"checkpoint-{step}").mkdir(parents=True)
        (folder / f"checkpoint-{step}" / "x").write_text(str(step))


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_checkpoint_is_that_of_the_most_steps(tmp_path):
    assert last_checkpoint(tmp_path / "none") is None and last_checkpoint(tmp_path) is None
    checkpoints(tmp_path, 9, 10, 2)
    assert last_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    assert last_checkpoint(str(tmp_path)) == tmp_path / "checkpoint-10"


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (None, None, [1, 2, 3, 10]), (0, None, [1, 2, 3, 10]), (-1, None, [1, 2, 3, 10]), (1, None, [10]),
        (2, None, [3, 10]), (2, 1, [1, 3, 10]), (2, 10, [3, 10]), (4, None, [1, 2, 3, 10]), (9, 1, [1, 2, 3, 10]),
    ],
)  # fmt: skip
def test_the_last_checkpoints_and_the_best_are_kept(limit, best, kept, tmp_path):
    checkpoints(tmp_path, 1, 2, 3, 10)
    state = SimpleNamespace(best_model_checkpoint=best and str(tmp_path / f"checkpoint-{best}"))
    Saving._rotate(SimpleNamespace(args=SimpleNamespace(save_total_limit=limit), state=state), tmp_path)
    assert left(tmp_path) == sorted(f"checkpoint-{step}" for step in kept)


@pytest.mark.parametrize("best", [None, 0, 4])
def test_the_best_checkpoint_has_its_final_place(best, tmp_path):
    saved = []
    state = SimpleNamespace(best_global_step=best, best_model_checkpoint="staged", save_to_json=saved.append)
    Saving._name_best(SimpleNamespace(state=state), tmp_path / "run", tmp_path / "staging")
    if best:
        assert state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-4")
        assert saved == [str(tmp_path / "staging" / "trainer_state.json")]
    else:
        assert state.best_model_checkpoint == "staged" and saved == []


def test_a_checkpoint_moves_in_whole_and_what_was_half_written_goes(tmp_path):
    checkpoints(tmp_path / "new", 3)
    checkpoint._move_in(tmp_path / "new" / "checkpoint-3", tmp_path / "checkpoint-3")
    assert left(tmp_path / "new") == [] and (tmp_path / "checkpoint-3" / "x").is_file()
    checkpoints(tmp_path / "new", 3)
    (tmp_path / "new" / "checkpoint-3" / "y").write_text("")
    checkpoint._move_in(tmp_path / "new" / "checkpoint-3", tmp_path / "checkpoint-3")  # of a run that was resumed
    assert left(tmp_path / "checkpoint-3") == ["x", "y"] and left(tmp_path) == ["checkpoint-3", "new"]
    for name in (".partial", ".old", ".results", "mine"):
        (tmp_path / name).mkdir()
    clean(tmp_path)
    assert left(tmp_path) == ["checkpoint-3", "mine", "new"]
    clean(tmp_path / "none")


@pytest.mark.parametrize(
    ("error", "reason"),
    [(OSError("no space\nmore"), "no space"), (OSError(" "), "OSError"), (RuntimeError(), "RuntimeError")],
)
def test_a_folder_that_cannot_be_written_says_what_stands(error, reason, tmp_path):
    text = f"a folder that can be written, with space left ({reason}); "
    assert not_written(tmp_path, error).allowed == text + "no checkpoint was written yet"
    checkpoints(tmp_path, 4)
    assert not_written(tmp_path, error).allowed == text + "checkpoint-4 stands"


def test_an_optimizers_state_fits_its_adapter(tmp_path):
    def made(*shapes):
        parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        for p in parameters:
            p.grad = torch.full_like(p, 2.0)
        return optimizer

    done = made((2, 3), (4,))
    done.step()
    torch.save(done.state_dict(), tmp_path / "state.pt")
    again = made((2, 3), (4,))
    load_optimizer(again, tmp_path / "state.pt")
    for p, q in zip(done.param_groups[0]["params"], again.param_groups[0]["params"], strict=True):
        assert all(torch.equal(value, again.state[q][name]) for name, value in done.state[p].items())
    for shapes, reason in ((((3, 2), (4,)), r"exp_avg of shape \[2, 3\] for \[3, 2\]"), (((2, 3),), "parameter group")):
        other = made(*shapes)
        with pytest.raises(InputError, match=f"optimizer state: got .*{reason}"):
            load_optimizer(other, tmp_path / "state.pt")
        assert not other.state
    with pytest.raises(InputError, match="state.pt2"):
        load_optimizer(made((2, 3)), tmp_path / "state.pt2")


# ---- results ----
def evaluation(n, reward=0.0, gold=np.nan, kl=(0.5,)):
    values = np.arange(n) + reward
    return Evaluation([f"p{i}" for i in range(n)], [f"c{i}" for i in range(n)], values, np.full(n, gold),
                      np.array(kl), 0.75)  # fmt: skip


def logged(step, **more):
    values = {"loss": 1.0, "num_samples": 8 * step, "seconds": 2.0 * step, "step_time": 0.5, "reward": 3.0, "kl": 0.1,
              "grad_norm": 2.0, "completions/mean_length": 5.0, "learning_rate": 0.01}  # fmt: skip
    return {"step": step} | values | more


def test_rows_of_a_history_are_by_step_with_their_evaluations():
    rows = history_rows([
        {"step": 0, "eval_reward": 1.0, "eval_reward_stderr": 0.1, "eval_reward_n": 4, "eval_kl": 0.0},
        logged(2, **{"distilled/r2": 0.5, "distilled/a": 1, "tau": 0.9, "beta": 0.2, "clip_fraction": 0.0}),
        {"step": 2, "eval_reward": 2.0, "eval_b_reward": 9.0}, {"step": 2, "train_runtime": 1.0}, logged(1),
    ])  # fmt: skip
    assert rows[0] == {
        "step": 0, "samples": 0, "seconds": 0.0, "val/reward_mean": 1.0, "val/reward_stderr": 0.1, "val/reward_n": 4,
        "val/kl": 0.0,
    }  # fmt: skip
    plain = {"step": 1, "samples": 8, "seconds": 2.0, "train/reward": 3.0, "train/kl": 0.1, "train/loss": 1.0,
             "train/tau": None, "train/grad_norm": 2.0, "train/residual": None, "train/length": 5.0,
             "train/learning_rate": 0.01, "train/seconds": 0.5}  # fmt: skip
    assert rows[1] == plain
    assert rows[2] == plain | {
        "step": 2, "samples": 16, "seconds": 4.0, "train/tau": 0.9, "train/beta": 0.2, "train/clip_fraction": 0.0,
        "train/distilled/r2": 0.5, "train/distilled/a": 1, "val/reward_mean": 2.0,
    }  # fmt: skip
    names = list(rows[2])
    assert names.index("train/distilled/a") < names.index("train/distilled/r2") < names.index("train/seconds")
    assert history_rows([]) == [] and len(rows) == 3


def test_metrics_of_a_finished_run(tmp_path):
    result = RunResult([{"samples": 0}, {"samples": 24}], evaluation(2), evaluation(2, 1.0), 6.0, None, 3, "ste")
    backbone = SimpleNamespace(device=torch.device("cpu"), dtype=torch.bfloat16)
    found = run_metrics(a_run(tmp_path, seed=5), result, backbone)
    assert "peak_memory_bytes" in found and found.pop("peak_memory_bytes") is not True
    assert found == {
        "before/val/reward_mean": 0.5, "before/val/reward_stderr": 0.5, "before/val/reward_n": 2,
        "before/val/kl": 0.5, "before/val/kl_stderr": None, "before/val/kl_n": 1, "before/val/kl_max": 0.75,
        "after/val/reward_mean": 1.5, "after/val/reward_stderr": 0.5, "after/val/reward_n": 2, "after/val/kl": 0.5,
        "after/val/kl_stderr": None, "after/val/kl_n": 1, "gain/reward": 1.0, "gain/reward_stderr": 0.0,
        "gain/reward_n": 2, "method": "ste", "seed": 5, "steps": 3, "samples": 24, "seconds": 6.0,
        "seconds_per_step": 2.0, "dtype": "bfloat16",
    }  # fmt: skip
    judged = RunResult([{"samples": 1}], evaluation(2, 0, 0.25), evaluation(2, 0, 0.75), 1.0, None, 1, "ste")
    found = run_metrics(a_run(tmp_path), judged, backbone)
    assert (found["gain/gold"], found["gain/gold_n"], found["gain/reward"]) == (0.5, 2, 0.0)


def test_samples_are_the_first_prompts_before_and_after(tmp_path):
    result = RunResult([], evaluation(3), evaluation(3, 1 / 3, 0.123456))
    texts = _samples(a_run(tmp_path, samples=2), result)
    assert texts == [
        {"prompt": f"p{i}", "before": f"c{i}", "before_reward": float(i), "after": f"c{i}",
         "after_reward": round(i + 1 / 3, 4), "after_gold": 0.1235} for i in range(2)
    ]  # fmt: skip
    assert len(_samples(a_run(tmp_path), result)) == 3 and _samples(a_run(tmp_path, samples=0), result) == []
    for missing in (RunResult([], None, evaluation(1)), RunResult([], evaluation(1), None)):
        assert _samples(a_run(tmp_path), missing) == []


@pytest.mark.parametrize(
    ("row", "line"),
    [
        ({"reward": 1.23456, "kl": 0.0, "seconds": 12.34}, "step    3/12     12.3 s  reward 1.235  kl 0"),
        ({"eval_reward": 2.0, "eval_gold": None, "eval_kl": 0.5}, f"step    3/12{' ' * 13}eval_reward 2  eval_kl 0.5"),
        ({"seconds": 1.0, "epoch": 2}, ""), ({}, ""), ({"grad_norm": 1e-9}, f"step    3/12{' ' * 13}grad_norm 1e-09"),
    ],
)  # fmt: skip
def test_a_line_of_the_log(row, line):
    assert _line(SimpleNamespace(global_step=3, max_steps=12), row) == line


def test_a_result_is_empty_to_begin_with():
    assert RunResult() == RunResult([], None, None, 0.0, None, 0, "")


@pytest.mark.parametrize(
    ("received", "step", "interrupted"), [(None, 3, None), (15, 3, 15), (15, 5, None), (15, 6, None), (None, 5, None)]
)
def test_a_run_is_interrupted_if_a_signal_came_before_its_end(received, step, interrupted, tmp_path):
    state = SimpleNamespace(log_history=[], global_step=step, max_steps=5)
    made = SimpleNamespace(state=state, seconds=2.5, args=SimpleNamespace(method="ste"), eval_dataset=None,
                           evaluations={})  # fmt: skip
    found = run._result(made, SimpleNamespace(received=received), tmp_path)
    assert (found.interrupted, found.step, found.seconds, found.method) == (interrupted, step, 2.5, "ste")
    assert found.before is None and found.after is None


# ---- evaluations ----
def test_a_summary_has_the_trainers_names():
    made = Evaluation(["a", "b"], ["c", "d"], np.array([1.0, 3.0]), np.array([np.nan] * 2), np.array([0.5]), 0.75,
                      {"x": np.array([1.0, np.nan]), "y": np.array([np.nan] * 2)})  # fmt: skip
    assert made.summary(0.5, "p") == {
        "p_reward": 2.0, "p_reward_stderr": 1.0, "p_reward_n": 2, "p_kl": 0.5, "p_kl_stderr": None, "p_kl_n": 1,
        "p_rewards/x/mean": 1.0, "p_loss": 0.5 * 0.5 - 2.0,
    }  # fmt: skip
    plain = Evaluation(["a"], ["c"], np.array([1.0]), np.array([0.25]), np.zeros(0), 0.0)
    assert plain.summary(0.5) == {
        "eval_reward": 1.0, "eval_reward_stderr": None, "eval_reward_n": 1, "eval_gold": 0.25,
        "eval_gold_stderr": None, "eval_gold_n": 1, "eval_loss": -1.0,
    }  # fmt: skip
    first = made.first(1)
    assert (first.prompts, first.completions, first.reward.tolist()) == (["a"], ["c"], [1.0])
    assert first.kl.tolist() == [0.5] and first.kl_max == 0.75 and first.parts["x"].tolist() == [1.0]
    table = made.table()
    assert list(table.columns) == ["prompt", "completion", "reward", "rewards/x", "rewards/y", "gold", "kl", "kl_max"]
    assert table["kl"][0] == 0.5 and pd.isna(table["kl"][1]) and table["kl_max"].tolist() == [0.75] * 2
