"""Interrupted runs: what stands, what is refused, and that a resumed run ends with the same bits."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from fresh_process import script
from safetensors.torch import load_file
from training.runs import in_child, settings, toy_project, wait

from grade.errors import InputError
from grade.files import write_json
from grade.gradients.methods import METHODS
from grade.training import checkpoint
from grade.training.checkpoint import STATE_FILE, check_same, last_checkpoint
from grade.training.loop import GradeTrainer
from grade.training.run import train

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def common(tmp_path_factory):
    return toy_project(tmp_path_factory.mktemp("project")) | {"max_steps": 4, "eval_strategy": "no"}


def silent(_):
    pass


def test_killed_runs_resume_to_the_same_bits(tmp_path):
    """One kill for each kind of state."""
    methods = METHODS if os.environ.get("GRADE_ALL_CASES") == "1" else ("gumbel", "reinforce", "ppo")
    done, errors = script(HERE / "interrupted.py", tmp_path, *methods)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:] + errors


class Stop(Exception):
    pass


def interrupted(common, output, monkeypatch, method="ste", after=2):
    """A run that dies after a step, with its checkpoint on disk."""

    def die(self, plain=GradeTrainer.training_step):
        if self.state.global_step == after:
            raise Stop
        return plain(self)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(GradeTrainer, "training_step", die)
        train(settings(method, common, output), silent)


@pytest.mark.parametrize(
    ("method", "options", "after"),
    [
        ("ste", {"target_kl": 0.5}, 2),
        ("ppo", {}, 2),
        ("tilt", {"target_kl": 0.5, "then": "ppo"}, 4),
        ("auto", {"target_kl": 0.5}, 3),
        ("auto", {"target_kl": 0.5, "reward": f"{HERE / 'runs.py'}:noise"}, 3),
    ],
)
def test_what_a_run_has_learned_goes_on_where_it_was(common, tmp_path, monkeypatch, method, options, after):
    """The budget, the value head, the values of tokens: the last checkpoints have the same bytes."""
    monkeypatch.setattr("grade.training.run._finish", lambda config: None)  # which removes the checkpoints
    values = common | options | {"max_steps": 5, "save_total_limit": None, "logging_steps": 2}
    train(settings(method, values, tmp_path / "whole"), silent)
    interrupted(values, tmp_path / "again", monkeypatch, method, after=after)
    assert not (tmp_path / "again" / "checkpoint-5").exists()
    assert train(settings(method, values, tmp_path / "again"), silent, "yes").step == 5
    whole, again = (tmp_path / name / "checkpoint-5" for name in ("whole", "again"))
    bias = ["token_bias.safetensors"] if method in ("tilt", "auto") else []
    for name in ("adapter_model.safetensors", "optimizer.pt", "../history.csv", "../metrics.json", *bias):
        assert (whole / name).read_bytes() == (again / name).read_bytes(), name
    states = [json.loads((folder / STATE_FILE).read_text()).get("kl_budget") for folder in (whole, again)]
    assert states[0] == states[1]
    assert (whole / "learner.safetensors").read_bytes() == (again / "learner.safetensors").read_bytes()
    learned = load_file(again / "learner.safetensors")
    assert bool(learned) == (method in ("ppo", "tilt", "auto"))
    if method == "auto":
        assert bool(learned["trusted"]) == ("reward" not in options)


def test_a_checkpoint_is_there_when_it_is_complete(common, tmp_path):
    """Killed while it writes the second one, a run goes on from the first; the state file is written last."""
    config = settings("ste", common | {"save_steps": 1}, tmp_path)

    def die(path, content, plain=checkpoint.write_json):
        if "checkpoint-2" in str(path):
            os.kill(os.getpid(), signal.SIGKILL)
        plain(path, content)

    def work():
        checkpoint.write_json = die
        train(config, silent)

    assert wait(in_child(work)) == -9
    assert last_checkpoint(tmp_path).name == "checkpoint-1" and list(tmp_path.glob(".*.checkpoint-2/optimizer.pt"))
    assert train(config, silent, "yes").step == 4


def test_a_run_is_not_overwritten_by_mistake(common, tmp_path, monkeypatch):
    interrupted(common, tmp_path, monkeypatch)
    with pytest.raises(InputError, match="output_dir: .*--resume to continue the run that is there, or --overwrite"):
        train(settings("ste", common, tmp_path), silent)
    assert (tmp_path / "checkpoint-2").is_dir()
    assert train(settings("ste", common, tmp_path), silent, overwrite=True).step == 4
    with pytest.raises(InputError, match="--resume to continue the run that is there, or --overwrite"):
        train(settings("ste", common, tmp_path), silent)


def test_other_settings_cannot_continue_a_run_and_auto_starts_over(common, tmp_path, monkeypatch):
    interrupted(common, tmp_path, monkeypatch)
    with pytest.raises(InputError, match=r"beta: got 0.2; allowed: 0.1, as in .*checkpoint-2, to continue it"):
        train(settings("ste", common | {"beta": 0.2}, tmp_path), silent, "yes")
    begun = []
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr("grade.training.run.run_training", lambda *args: begun.append(args[-1]) or _stop())
        train(settings("ste", common | {"save_steps": 3}, tmp_path), silent, "auto")
    assert begun == [tmp_path / "checkpoint-2"]
    assert train(settings("ste", common | {"beta": 0.2}, tmp_path), silent, "auto").step == 4
    assert not list(tmp_path.glob("checkpoint-*"))


def _stop():
    raise Stop


def test_a_setting_that_has_gone_makes_another_run(tmp_path):
    write_json(tmp_path / STATE_FILE, {"settings": {"beta": 0.1, "teacher": "base"}})
    with pytest.raises(InputError, match="teacher: got None; allowed: 'base'"):
        check_same(tmp_path, {"beta": 0.1})


def test_a_finished_run_is_left_alone_unless_its_results_are_gone(common, tmp_path, monkeypatch):
    """DVC removes the results of a stage that is stale: what they were made of may have changed since."""
    assert train(settings("ste", common, tmp_path), silent).step == 4
    for resume in ("yes", "auto"):
        assert train(settings("ste", common, tmp_path), silent, resume) is None
    with pytest.raises(InputError, match="beta: got 0.3; allowed: 0.1"):
        train(settings("ste", common | {"beta": 0.3}, tmp_path), silent, "yes")
    (tmp_path / "metrics.json").unlink()
    shutil.rmtree(tmp_path / "adapter")
    begun = []
    monkeypatch.setattr("grade.training.run.run_training", lambda *args: begun.append(args[-1]) or _stop())
    with pytest.raises(Stop):
        train(settings("ste", common, tmp_path), silent, "auto")
    assert begun == [None]
