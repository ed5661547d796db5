"""What ends a run is one line, and a run that has ended leaves no note of itself behind unless it can be continued."""

import errno
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ToyReward

from grade.errors import InputError
from grade.gradients.methods import MethodConfig
from grade.gradients.objective import Objective
from grade.rewards.base import EmbeddingReward
from grade.rewards.functions import FunctionReward
from grade.rewards.rewards import Rewards
from grade.training import folder, run
from grade.training.checkpoint import load_optimizer
from grade.training.config import TrainConfig
from grade.training.evaluate import Evaluation
from grade.training.merge import _reason
from grade.training.method import choose_method
from grade.training.together import Together
from grade.training.toy import toy_task


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a run that does nothing but end with an error."""
    monkeypatch.setattr(run, "load_task", lambda *_: toy_task())
    config = TrainConfig(output_dir=str(tmp_path / "run"), method="ste", use_cpu=True)

    def begin(error):
        def ends(*_):
            assert (tmp_path / "run" / folder.RUN_FILE).is_file()
            raise error

        monkeypatch.setattr(run, "run_training", ends)
        return run.train(config, log=None)

    return begin


def test_a_disk_that_is_full_is_one_line(start):
    with pytest.raises(InputError, match="output_dir"):
        start(OSError(errno.ENOSPC, "No space left on device"))


def test_a_run_that_wrote_nothing_leaves_no_note(start, tmp_path):
    with pytest.raises(InputError, match="reward"):
        start(InputError("reward", "nan", "a finite number"))
    assert not (tmp_path / "run" / folder.RUN_FILE).exists()


def test_a_note_stays_beside_what_a_run_wrote(tmp_path):
    (tmp_path / folder.RUN_FILE).write_text("{}")
    (tmp_path / "checkpoint-1").mkdir()
    folder.forget(tmp_path)
    assert (tmp_path / folder.RUN_FILE).is_file()
    (tmp_path / "checkpoint-1").rmdir()
    folder.forget(tmp_path)
    assert not (tmp_path / folder.RUN_FILE).exists()


@pytest.mark.parametrize("content", [{}, {"settings": {}, "inputs": {}}, []])
def test_a_note_that_lacks_a_part_is_none(tmp_path, content):
    (tmp_path / "note").write_text(json.dumps(content))
    assert folder._read(tmp_path / "note") is None
    whole = {"settings": {}, "inputs": {}, "code": "x"}
    for more in ({}, {"id": "1"}):
        (tmp_path / "note").write_text(json.dumps(whole | more))
        assert folder._read(tmp_path / "note") == whole | more


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"\x80\x02."])
def test_an_optimizers_state_that_cannot_be_read_is_refused_and_changes_nothing(tmp_path, content):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    (tmp_path / "optimizer.pt").write_bytes(content)
    with pytest.raises(InputError, match="optimizer state"):
        load_optimizer(optimizer, tmp_path / "optimizer.pt")
    assert not optimizer.state


def test_the_folder_names_what_a_run_would_replace(tmp_path):
    (tmp_path / "checkpoint-7").mkdir()
    with pytest.raises(InputError, match="a folder without 'checkpoint-7'"), folder.locked(tmp_path, []):
        pass


def test_the_first_line_of_an_error_is_its_reason():
    assert _reason(ValueError("one\ntwo")) == "one" and _reason(ValueError()) == "ValueError"


def test_auto_names_the_first_reward_without_a_gradient():
    parts = [EmbeddingReward(ToyReward(4)), FunctionReward(print, "first"), FunctionReward(print, "second")]
    assert choose_method(MethodConfig(), Objective(Rewards(parts)))[1].startswith("reward 'first' gives values only")


def test_an_interrupted_run_is_continued_or_replaced_when_that_is_said_and_only_then(tmp_path):
    def config(**changes):
        return TrainConfig(output_dir=str(tmp_path), method="ste", use_cpu=True, model="m", **changes)

    (checkpoint := tmp_path / "checkpoint-3").mkdir()
    (tmp_path / folder.RUN_FILE).write_text(json.dumps(folder.about(config())))
    assert folder.start(config(), "yes") == folder.start(config(), "auto") == checkpoint
    with pytest.raises(InputError, match="--resume to continue the interrupted run at checkpoint-3"):
        folder.start(config(), "no")
    assert folder.start(config(), "no", overwrite=True) is None
    with pytest.raises(InputError, match="beta: got 0.5; allowed: 0.0, as the run was started with"):
        folder.start(config(beta=0.5), "yes")
    assert folder.start(config(beta=0.5), "auto") is None  # other settings: it starts over
    note = json.loads((tmp_path / folder.RUN_FILE).read_text())
    (tmp_path / folder.RUN_FILE).write_text(json.dumps(note | {"code": "another"}))
    assert folder.start(config(), "auto") is None and folder.start(config(), "yes") == checkpoint
    (tmp_path / folder.RUN_FILE).write_text(json.dumps(note | {"inputs": note["inputs"] | {"gold": "another"}}))
    assert folder.start(config(), "auto") is None
    with pytest.raises(InputError, match="gold: got 'another content than before'"):
        folder.start(config(), "yes")


def test_work_that_fails_on_one_process_fails_on_all(monkeypatch):
    together, others = Together(SimpleNamespace(num_processes=2)), []
    monkeypatch.setattr(together, "gather", lambda rows: [*rows, *others])
    mine, theirs = InputError("reward", 1, "mine"), ("reward", 2, "theirs")

    def fails():
        raise mine

    others[:] = [None]
    assert together(lambda: 3) == 3
    with pytest.raises(InputError) as error:
        together(fails)
    assert error.value is mine
    others[:] = [theirs]
    with pytest.raises(InputError, match="theirs"):
        together(lambda: 3)


def test_the_ends_of_a_run_are_its_evaluations_before_and_after(tmp_path):
    before, after = (Evaluation(["p"], ["c"], np.ones(1) * n, np.ones(1), np.ones(1), 1.0, {}) for n in (1, 2))
    state = SimpleNamespace(log_history=[], global_step=5, max_steps=5)
    trainer = SimpleNamespace(
        state=state,
        seconds=1.0,
        args=SimpleNamespace(method="ste"),
        eval_dataset=[1],
        evaluations={0: before, 5: after},
    )
    ended = run._result(trainer, None, tmp_path)
    assert ended.before is before and ended.after is after and ended.interrupted is None
    (tmp_path / "completions").mkdir()  # of the part before an interruption
    before.table().to_parquet(tmp_path / "completions" / "eval_00000.parquet")
    trainer.evaluations = {5: after}
    assert run._result(trainer, None, tmp_path).before.reward.tolist() == [1.0]
