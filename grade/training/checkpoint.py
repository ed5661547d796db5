"""Checkpoints that are whole or not there: written beside, then moved in.

A checkpoint is the Trainer's: adapter, optimizer, schedule, generators, `trainer_state.json` with the history. Added
are the learner's state (value head, running baseline, scored completions), that of beta's controller, the seconds of
training so far and the figures since the last row of the log, so that a run resumed between two rows writes the same
second one. Noise needs no state: it is seeded by step and place.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Trainer
from transformers.trainer_utils import sort_checkpoints

from grade.errors import InputError, require_file
from grade.models.adapter import ADAPTER_FILES, BASE_FILE, check_saved, write_fingerprint

OPTIMIZER_FILE = "optimizer.pt"
STATE_FILE, LEARNER_FILE = "grade_state.json", "learner.safetensors"
_PARTIAL, _OLD, RESULTS_STAGING = ".partial", ".old", ".results"


class Saving(Trainer):
    """The part of `grade.training.trainer.GradeTrainer` that writes and reads checkpoints."""

    _staging: str | None = None

    def _get_output_dir(self, trial: Any) -> str:
        return self._staging or super()._get_output_dir(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        output, name = Path(self.args.output_dir), f"checkpoint-{self.state.global_step}"
        staging = output / _PARTIAL
        try:
            if self.args.should_save:
                clean(output)
                staging.mkdir(parents=True)
            self.together.wait()
            self._staging = str(staging)
            super()._save_checkpoint(model, trial)
            if self.args.should_save:
                self._save_own(staging / name)
                self._name_best(output, staging / name)
            self.together.wait()  # every process has written its generators
            if self.args.should_save:
                _move_in(staging / name, output / name)
                staging.rmdir()
                self._rotate(output)
        except (OSError, RuntimeError, SafetensorError) as error:
            shutil.rmtree(staging, ignore_errors=True)
            raise not_written(self.args.output_dir, error) from error
        finally:
            self._staging = None
        self.together.wait()

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:
            write_fingerprint(self.backbone.peft, output_dir or self.args.output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        check_saved(self.backbone.peft, resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _save_own(self, folder: Path) -> None:
        state = {"seconds": self.seconds, "window": self.window.state()}
        if self.kl_target is not None:
            state["kl_target"] = self.kl_target.state()
        if self.learner is not None:
            state["means"] = self.learner.means
            tensors = self.learner.tensors()
            if tensors:
                save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, folder / LEARNER_FILE)
        (folder / STATE_FILE).write_text(json.dumps(state) + "\n", encoding="utf-8")

    def _name_best(self, output: Path, folder: Path) -> None:
        """The best checkpoint by its final place: the Trainer has only seen the folder beside it."""
        if self.state.best_global_step:
            self.state.best_model_checkpoint = str(output / f"checkpoint-{self.state.best_global_step}")
            self.state.save_to_json(str(folder / "trainer_state.json"))

    def _rotate(self, output: Path) -> None:
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        if not limit or limit < 0:
            return
        folders = sort_checkpoints(str(output))
        kept = set(folders[-limit:]) | ({best} if best else set())
        for folder in folders:
            if folder not in kept:  # renamed first: a reader never sees half of one
                os.replace(folder, output / _OLD)
                shutil.rmtree(output / _OLD)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        try:
            state = json.loads((Path(checkpoint) / STATE_FILE).read_text(encoding="utf-8"))
            self.seconds = state["seconds"]
            self.window.restore(state["window"])
            if self.kl_target is not None:
                self.kl_target.restore(state["kl_target"])
                self.set_beta(self.kl_target.beta)
            if self.learner is not None:
                self.learner.means[:] = state["means"]
                if self.learner.tensors():
                    self.learner.load_tensors(load_file(Path(checkpoint) / LEARNER_FILE))
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            allowed = f"a checkpoint of GradeTrainer with this method ({type(error).__name__})"
            raise InputError("resume_from_checkpoint", checkpoint, allowed) from error


def not_written(output: str | Path, error: Exception) -> InputError:
    """The error for a folder that cannot be written.

    Args:
        output: The run's folder.
        error: What went wrong.
    """
    stands = last_checkpoint(output)
    what = f"{stands.name} stands" if stands else "no checkpoint was written yet"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return InputError("output_dir", str(output), f"a folder that can be written, with space left ({reason}); {what}")


def clean(output: str | Path) -> None:
    """Remove what a killed run left half written.

    Args:
        output: The run's folder.
    """
    for name in (_PARTIAL, _OLD, RESULTS_STAGING):
        shutil.rmtree(Path(output) / name, ignore_errors=True)


def last_checkpoint(output: str | Path) -> Path | None:
    """The newest checkpoint of a run, if there is one.

    Args:
        output: The run's folder.
    """
    folders = sort_checkpoints(str(output)) if Path(output).is_dir() else []
    return Path(folders[-1]) if folders else None


def _move_in(source: Path, target: Path) -> None:
    if target.exists():  # of a run that was resumed from an earlier one
        os.replace(target, target.with_name(_OLD))
    os.replace(source, target)
    shutil.rmtree(target.with_name(_OLD), ignore_errors=True)


def export_adapter(checkpoint: Path, folder: Path) -> None:
    """Copy adapter and optimizer state of a checkpoint.

    Args:
        checkpoint: Of the Trainer.
        folder: Is made; holds what PEFT loads, the base's fingerprint if there is one, and ``optimizer.pt``.
    """
    folder.mkdir(parents=True)
    older = () if (checkpoint / BASE_FILE).is_file() else (BASE_FILE,)
    for name in {*ADAPTER_FILES, BASE_FILE, OPTIMIZER_FILE}.difference(older):
        shutil.copy2(checkpoint / name, folder / name)


def load_optimizer(optimizer: torch.optim.Optimizer, path: str | Path) -> None:
    """Load a saved ``state_dict`` without executing code from the file.

    Args:
        optimizer: The optimizer of the adapter that was saved; unchanged if the file does not fit.
        path: The file.

    Raises:
        InputError: If it is missing, of another kind or of another adapter.
    """
    before = copy.deepcopy(optimizer.state_dict())
    try:
        with warnings.catch_warnings():
            # Of a pickle that torch did not write; it is refused below in a line.
            warnings.filterwarnings("ignore", message="Detected pickle protocol", category=UserWarning)
            state = torch.load(require_file(path), weights_only=True)
        optimizer.load_state_dict(state)
        for group in optimizer.param_groups:
            for p in group["params"]:
                for name, value in optimizer.state.get(p, {}).items():
                    if name != "step" and isinstance(value, Tensor) and value.shape != p.shape:
                        raise ValueError(f"{name} of shape {list(value.shape)} for {list(p.shape)}")
    except (
        OSError, EOFError, ValueError, LookupError, RuntimeError, TypeError, AttributeError, pickle.UnpicklingError
    ) as error:  # fmt: skip
        optimizer.load_state_dict(before)
        reason = str(error).splitlines()[0] if str(error) else error.__class__.__name__
        raise InputError("optimizer state", str(path), f"AdamW's state_dict for this adapter ({reason})") from None
