"""Interrupted runs: what stands, what is refused, and that a resumed run ends with the same bits."""

import json
import os
import re
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from fresh_process import script
from safetensors.torch import load_file
from training.runs import in_child, settings, toy_project, wait

from grade.errors import InputError
from grade.files import write_manifest
from grade.gradients.methods import METHODS
from grade.training import folder
from grade.training.folder import last_checkpoint
from grade.training.run import train
from grade.training.trainer import GradeTrainer

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    return toy_project(tmp_path_factory.mktemp("project")) | {"max_steps": 4, "eval_strategy": "no"}


def silent(_):
    pass


def test_killed_runs_resume_to_the_same_bits(tmp_path):
    """One kill for each kind of state, one of each other signal."""
    methods = METHODS if os.environ.get("GRADE_ALL_CASES") == "1" else ("gumbel", "reinforce", "ppo", "distilled")
    done, errors = script(HERE / "interrupted.py", tmp_path, *methods)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:] + errors


class Stop(Exception):
    pass


def interrupted(common, output, monkeypatch, method="ste", after=2, overwrite=False):
    """A run that dies after a step, with its checkpoint on disk."""

    def die(self, *args, plain=GradeTrainer.training_step):
        if self.state.global_step == after:
            raise Stop
        return plain(self, *args)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(GradeTrainer, "training_step", die)
        train(settings(method, common, output), silent, overwrite=overwrite)


@pytest.mark.parametrize(
    ("method", "options", "after"),
    [
        ("ste", {"target_kl": 0.5}, 2),
        ("ste", {"eval_strategy": "epoch"}, 2),  # a pass ends with this step
        ("rloo", {"target_kl": 0.5}, 2),
        ("distilled", {"distil_window": 24, "substitutions": 2}, 2),
        ("auto", {}, 2),
        ("offline", {"target_kl": 0.3}, 2),
        ("auto", {"texts": True, "target_kl": 0.3}, 1),
        ("auto", {"texts": True, "target_kl": 0.3}, 3),
    ],
)
def test_what_a_run_has_learned_goes_on_where_it_was(common, tmp_path, monkeypatch, method, options, after):
    """All that was scored, the fits, what they predicted, the blend: the last checkpoints have the same bytes."""
    if "texts" in options:
        options = options | {"texts": str(Path(common["train_dataset"]).with_name("texts.jsonl"))}
    values = common | options | {"max_steps": 5, "save_total_limit": None, "logging_steps": 2}
    train(settings(method, values, tmp_path / "whole"), silent)
    interrupted(values, tmp_path / "again", monkeypatch, method, after=after)
    assert not (tmp_path / "again" / "checkpoint-5").exists()
    assert train(settings(method, values, tmp_path / "again"), silent, "yes").step == 5
    whole, again = (tmp_path / name / "checkpoint-5" for name in ("whole", "again"))
    for name in ("adapter_model.safetensors", "../history.csv", "../metrics.json"):
        assert (whole / name).read_bytes() == (again / name).read_bytes(), name
    states = [json.loads((folder / "grade_state.json").read_text()).get("kl_budget") for folder in (whole, again)]
    assert states[0] == states[1]
    if method in ("ste", "rloo"):  # no tensors
        return
    assert (whole / "learner.safetensors").read_bytes() == (again / "learner.safetensors").read_bytes()
    state = load_file(again / "learner.safetensors")
    kept = {"steering", "own/0"} if method == "offline" else {"blend", "level", "residual"}
    kept |= {"kept/prior", "transfer/3", "steering"} if "texts" in options else set()
    assert kept <= set(state) and (method == "offline" or any(name.startswith("fit/") for name in state))


@pytest.mark.parametrize(
    ("failing", "options"),
    [
        (2, {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 4}),  # in the middle, where none is saved
        (4, {"save_steps": 3}),
        (4, {"eval_strategy": "epoch", "load_best_model_at_end": True, "save_strategy": "epoch"}),
    ],
)
def test_an_evaluation_that_failed_loses_no_step_and_is_made_up(common, tmp_path, monkeypatch, failing, options):
    """By a mistake in the reward, say: what a mended run ends with has the same bytes."""
    values = common | {"save_total_limit": None} | options
    train(settings("distilled", values, tmp_path / "whole"), silent)

    def fail(self, *args, plain=GradeTrainer.evaluation_loop, **kwargs):
        if self.state.global_step == failing:
            raise Stop
        return plain(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(GradeTrainer, "evaluation_loop", fail)
        for resume in ("no", "yes"):
            with pytest.raises(Stop):
                train(settings("distilled", values, tmp_path / "again"), silent, resume)
    assert last_checkpoint(tmp_path / "again") == tmp_path / "again" / f"checkpoint-{failing}"
    train(settings("distilled", values, tmp_path / "again"), silent, "yes")
    whole, again = (tmp_path / name / "checkpoint-4" for name in ("whole", "again"))
    for name in ("../history.csv", "../metrics.json", "adapter_model.safetensors", "learner.safetensors"):
        assert (whole / name).read_bytes() == (again / name).read_bytes(), name
    states = [json.loads((folder / "trainer_state.json").read_text()) for folder in (whole, again)]
    assert states[0]["best_metric"] == states[1]["best_metric"]


def terminated(common, output, monkeypatch, step):
    """A run that SIGTERM ends after a step."""

    def work(self, *args, plain=GradeTrainer.training_step):
        if self.state.global_step == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(GradeTrainer, "training_step", work)
        assert train(settings("ste", common, output), silent).step == step


def test_a_run_that_was_stopped_within_a_pass_evaluates_as_if_it_was_not(common, tmp_path, monkeypatch):
    values = common | {"per_device_train_batch_size": 4, "eval_strategy": "epoch", "save_strategy": "epoch"}
    train(settings("ste", values, tmp_path / "whole"), silent)
    terminated(values, tmp_path / "again", monkeypatch, 1)
    assert train(settings("ste", values, tmp_path / "again"), silent, "yes").step == 4
    assert len({(tmp_path / name / "history.csv").read_bytes() for name in ("whole", "again")}) == 1


def test_a_run_that_was_stopped_keeps_its_newest_checkpoint_beside_the_best(common, tmp_path, monkeypatch):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "reward"}
    values = common | best | {"eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1}
    terminated(values, tmp_path, monkeypatch, 3)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-3"}
    assert train(settings("ste", values, tmp_path), silent, "yes").step == 4


def test_an_interrupted_run_is_not_overwritten_by_mistake(common, tmp_path, monkeypatch):
    interrupted(common, tmp_path, monkeypatch)
    with pytest.raises(InputError, match="--resume to continue the interrupted run at checkpoint-2, or --overwrite"):
        train(settings("ste", common, tmp_path), silent)
    assert (tmp_path / "checkpoint-2").is_dir()
    for resume in ("yes", "auto"):
        with pytest.raises(InputError, match=f"resume: got '{resume}'; allowed: no, beside overwrite"):
            train(settings("ste", common, tmp_path), silent, resume, overwrite=True)
    assert train(settings("ste", common, tmp_path), silent, overwrite=True).step == 4


def test_other_settings_cannot_continue_a_run(common, tmp_path, monkeypatch):
    interrupted(common, tmp_path, monkeypatch)
    with pytest.raises(InputError, match=r"beta: got 0.2; allowed: 0.1, as the run was started with"):
        train(settings("ste", common | {"beta": 0.2}, tmp_path), silent, "yes")
    assert train(settings("ste", common | {"save_steps": 3, "tau_end": 2.0}, tmp_path), silent, "yes").step == 4


def test_a_bad_start_can_be_mended(common, tmp_path):
    with pytest.raises(InputError, match="reward"):
        train(settings("ste", common | {"reward": "no/such/folder"}, tmp_path), silent)
    assert train(settings("ste", common, tmp_path), silent, "yes").step == 4


def test_a_run_that_is_refused_before_its_first_step_leaves_no_folder_of_its_own(common, tmp_path):
    for output in (tmp_path / "new", tmp_path / "made"):
        (tmp_path / "made").mkdir(exist_ok=True)
        with pytest.raises(InputError, match="optim_args"):
            train(settings("ste", common | {"optim_args": "no=1"}, output), silent)
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_other_prompts_cannot_continue_a_run(common, tmp_path, monkeypatch):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(Path(common["train_dataset"]).read_text())
    interrupted(common | {"train_dataset": str(prompts)}, tmp_path / "run", monkeypatch)
    prompts.write_text(prompts.read_text() + '{"prompt": "One more"}\n')
    with pytest.raises(InputError, match="train_dataset: got 'another content than before'"):
        train(settings("ste", common | {"train_dataset": str(prompts)}, tmp_path / "run"), silent, "yes")


def test_a_checkpoint_of_another_run_or_step_is_passed_over(common, tmp_path, monkeypatch, caplog):
    interrupted(common, tmp_path / "run", monkeypatch)
    train(settings("ste", common | {"learning_rate": 1e-3}, tmp_path / "other"), silent)
    shutil.copytree(tmp_path / "other" / "checkpoint-4", tmp_path / "run" / "checkpoint-3")
    shutil.copytree(tmp_path / "run" / "checkpoint-2", tmp_path / "run" / "checkpoint-9")
    begun = []
    monkeypatch.setattr("grade.training.run.run_training", lambda *args: begun.append(args[-1]) or _stop())
    with pytest.raises(Stop):
        train(settings("ste", common, tmp_path / "run"), silent, "yes")
    assert begun == [tmp_path / "run" / "checkpoint-2"] and "checkpoint-3 is another run's" in caplog.text
    assert "checkpoint-9 is of step 2: it is not used" in caplog.text


@pytest.mark.parametrize(
    ("changes", "code", "begins"),
    [({}, None, "checkpoint-2"), ({"beta": 0.5}, None, None), ({}, "other code", None)],
    ids=["same", "other settings", "other code"],
)
def test_auto_continues_what_is_the_same_and_starts_over_otherwise(
    common, tmp_path, monkeypatch, changes, code, begins
):
    interrupted(common, tmp_path, monkeypatch)
    if code:
        digest = folder._digest
        monkeypatch.setattr(folder, "_digest", lambda files, root: code if len(files) > 20 else digest(files, root))
    begun = []
    monkeypatch.setattr("grade.training.run.run_training", lambda *args: begun.append(args[-1]) or _stop())
    with pytest.raises(Stop):
        train(settings("ste", common | changes, tmp_path), silent, "auto")
    assert begun == [begins and tmp_path / begins]
    assert (tmp_path / "checkpoint-2").is_dir() == bool(begins)


def _stop():
    raise Stop


def test_a_run_killed_in_a_finished_runs_folder_is_not_taken_for_finished(common, tmp_path, monkeypatch):
    assert train(settings("ste", common, tmp_path), silent).step == 4
    other = common | {"beta": 0.3}
    interrupted(other, tmp_path, monkeypatch, overwrite=True)
    assert (tmp_path / "metrics.json").is_file()  # the earlier run's results stand until there are others
    assert train(settings("ste", other, tmp_path), silent, "yes").step == 4
    assert train(settings("ste", other, tmp_path), silent, "yes") is None


def test_trackers_go_on_with_the_same_run(common, tmp_path, monkeypatch):
    names = ("TENSORBOARD_LOGGING_DIR", "WANDB_RUN_ID", "WANDB_RESUME")
    seen = []
    record = lambda *_: seen.append([os.environ[name] for name in names]) or _stop()  # noqa: E731
    monkeypatch.setattr("grade.training.run.run_training", record)
    monkeypatch.setattr("grade.training.config._is_installed", lambda tracker: True)
    for resume in ("no", "yes", "no"):
        for name in names:
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(Stop):
            tracked = settings("ste", common | {"report_to": ["wandb"]}, tmp_path)
            train(tracked, silent, resume, overwrite=resume == "no")
        (tmp_path / "checkpoint-1").mkdir(exist_ok=True)
        (tmp_path / "checkpoint-1" / "weights").touch()
        write_manifest(tmp_path / "checkpoint-1")
    first, resumed, other = seen
    assert first == resumed and first[0] == str(tmp_path / "tensorboard") and first[2] == "allow"
    assert other[1] != first[1]


@pytest.mark.parametrize("missing", [6000, 1])
def test_a_full_disk_is_one_line_and_the_last_checkpoint_stands(common, tmp_path, missing):
    log = tmp_path / "error.log"

    def work():
        # No file may grow beyond this: the optimizer's state of the second checkpoint does not fit.
        def limit(self, *args, plain=GradeTrainer.training_step):
            if self.state.global_step == 3:
                size = (tmp_path / "checkpoint-2" / "optimizer.pt").stat().st_size - missing
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            return plain(self, *args)

        GradeTrainer.training_step = limit
        torch.set_num_threads(1)  # threads of the parent's pool do not survive a fork
        try:
            train(settings("ste", common, tmp_path), silent)
        except InputError as error:
            log.write_text(str(error))

    wait(in_child(work))
    assert re.fullmatch("output_dir: got .*a folder that can be written .*; checkpoint-2 stands", log.read_text())
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert train(settings("ste", common, tmp_path), silent, "yes").step == 4
