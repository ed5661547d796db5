"""Checkpoints: one folder with everything that continues a run with the same bits.

``checkpoint-<step>/`` holds the adapter as PEFT writes it, the token bias if there is one, ``optimizer.pt`` and
``scheduler.pt`` (tensors and numbers alone), ``trainer_state.json`` with the log, ``learner.safetensors`` with what the
method keeps between steps, ``reference.safetensors`` where the reference is not the bare base, and ``grade_state.json``
with the settings and all other numbers. It is written beside its place and renamed, so a folder of that name is whole.
Noise needs no state: it is seeded by step and microbatch.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from torch.optim.lr_scheduler import LambdaLR
from transformers.trainer_callback import ExportableState, TrainerState

from grade.errors import InputError
from grade.files import atomic, read_json, write_json
from grade.training.evaluate import Evaluation

if TYPE_CHECKING:
    from grade.training.config import GradeConfig

OPTIMIZER_FILE, SCHEDULER_FILE, LEARNER_FILE = "optimizer.pt", "scheduler.pt", "learner.safetensors"
REFERENCE_FILE = "reference.safetensors"
LOG_FILE, STATE_FILE = "trainer_state.json", "grade_state.json"
FREE = {
    "output_dir", "report_to", "base_name", "samples", "log_completions", "use_cpu",
    "save_strategy", "save_steps", "save_total_limit", "sampler", "sampler_folder", "sampler_max_difference",
}  # fmt: skip
"""Settings that change no result: they may differ when a run is continued."""
LENGTH = ("max_steps", "num_train_epochs")
"""Settings that may differ where a checkpoint is continued by name."""


def checkpoints_of(folder: str | Path) -> list[Path]:
    """Checkpoints in a run's folder, by step."""
    found = [path for path in Path(folder).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=_step_of)


def last_checkpoint(folder: str | Path) -> Path | None:
    """The newest checkpoint of a run, if there is one."""
    return (checkpoints_of(folder) or [None])[-1]


def _step_of(checkpoint: str | Path) -> int:
    """The step after which a checkpoint was written."""
    return int(Path(checkpoint).name.rpartition("-")[2])


def settings_of(config: GradeConfig) -> dict[str, Any]:
    """Settings that decide a run's result, as JSON."""
    settings = config.model_dump(mode="json", exclude=FREE, fallback=str)
    return settings | {"gradient_accumulation_steps": config.microbatches}  # on however many processes


def check_same(folder: Path, settings: Mapping[str, Any], free: Sequence[str] = ()) -> None:
    """Refuse settings that are not those of a checkpoint, or of a finished run; the error names the first."""
    before = read_json(folder / STATE_FILE)["settings"]
    for name in {**settings, **before}:
        if before.get(name) != settings.get(name) and name not in free:
            raise InputError(name, settings.get(name), f"{before.get(name)!r}, as in {folder}, to continue it")


def save_checkpoint(trainer: Any) -> None:
    """Write ``checkpoint-<step>`` below the ``output_dir`` of a `GradeTrainer`; older ones go as its settings say."""
    state = trainer.state
    folder = Path(trainer.config.output_dir) / f"checkpoint-{state.global_step}"
    if state.best_global_step:
        best = folder.with_name(f"checkpoint-{state.best_global_step}")
        state.best_model_checkpoint = str(best) if best == folder or best.is_dir() else state.best_model_checkpoint
    if trainer.config.process_index == 0:
        callbacks = [cb for cb in trainer.callback_handler.callbacks if isinstance(cb, ExportableState)]
        state.stateful_callbacks = {type(callback).__name__: callback.state() for callback in callbacks}
        with atomic(folder) as new:
            trainer.backbone.save_adapter(new)
            torch.save(trainer.optimizer.state_dict(), new / OPTIMIZER_FILE)
            torch.save(trainer.lr_scheduler.state_dict(), new / SCHEDULER_FILE)
            state.save_to_json(str(new / LOG_FILE))
            tensors = {name: value.detach().cpu().contiguous() for name, value in trainer.method.tensors().items()}
            save_file(tensors, new / LEARNER_FILE)
            if given := trainer.backbone.given:
                save_file(
                    {name: value.detach().cpu().contiguous() for name, value in given.items()}, new / REFERENCE_FILE
                )
            write_json(new / STATE_FILE, {
                "settings": settings_of(trainer.given), "rewards": trainer.rewards.names, "rows": trainer.rows,
                "seconds": trainer.seconds,
                "evaluations": sorted(trainer.evaluations), "chosen": trainer.chosen, "means": trainer.method.means,
                "kl_budget": trainer.steering and trainer.steering.budget.state(),
            })  # fmt: skip
    trainer.accelerator.wait_for_everyone()
    _remove_older(folder, trainer.config.save_total_limit, state.best_model_checkpoint)


def load_checkpoint(trainer: Any, folder: Path) -> None:
    """Let a `GradeTrainer` continue where a checkpoint was written.

    Raises:
        InputError: If the run has other settings, rewards or rows, or fewer steps.
    """
    check_same(folder, settings_of(trainer.given), LENGTH)
    saved = read_json(folder / STATE_FILE)
    for name, value in (("rewards", trainer.rewards.names), ("rows", trainer.rows)):
        if value != saved[name]:
            raise InputError(name, value, f"{saved[name]}, as in {folder}, to continue it")
    trainer.backbone.restore(folder)
    # The run's, not the policy that this trainer was given: that may have been trained since the run began.
    reference = folder / REFERENCE_FILE
    trainer.backbone.set_reference(load_file(reference) if reference.is_file() else {})
    trainer.optimizer.load_state_dict(torch.load(folder / OPTIMIZER_FILE, "cpu", weights_only=True))
    trainer.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_FILE, weights_only=True))
    if isinstance(schedule := trainer.lr_scheduler, LambdaLR):  # the run may be longer than it was
        rates = zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
        schedule._last_lr = [base * rate(schedule.last_epoch) for base, rate in rates]
        for group, rate in zip(trainer.optimizer.param_groups, schedule._last_lr, strict=True):
            group["lr"] = rate
    trainer.state = state = TrainerState.load_from_json(str(folder / LOG_FILE))
    if state.best_model_checkpoint:  # beside this one, where the run may have been moved
        state.best_model_checkpoint = str(folder.with_name(Path(state.best_model_checkpoint).name))
    if state.global_step > trainer.config.max_steps:
        raise InputError("max_steps", trainer.config.max_steps, f"at least {state.global_step}, the step of {folder}")
    for callback in trainer.callback_handler.callbacks:
        if (values := state.stateful_callbacks.get(type(callback).__name__)) and isinstance(callback, ExportableState):
            vars(callback).update(values["args"] | values["attributes"])
    trainer.seconds, trainer.method.means[:] = saved["seconds"], saved["means"]
    trainer.chosen |= saved["chosen"]
    for step in saved["evaluations"]:
        table = trainer.table_path(f"eval_{step:05d}")
        if table.is_file():
            trainer.evaluations[step] = Evaluation.of_table(pd.read_parquet(table))
    trainer.method.load_tensors(load_file(folder / LEARNER_FILE))
    if trainer.steering is not None:
        trainer.steering.budget.restore(saved["kl_budget"])


def _remove_older(folder: Path, limit: int | None, best: str | None) -> None:
    """Keep the newest ``limit`` checkpoints, and the best one among them."""
    if limit is None:
        return
    kept = {folder, Path(best or folder)}
    older = [path for path in checkpoints_of(folder.parent) if path not in kept and _step_of(path) < _step_of(folder)]
    for path in older[: max(0, len(older) - max(0, limit - len(kept)))]:
        shutil.rmtree(path, ignore_errors=True)
