"""A run's folder: where a run begins in it, and the settings with which it may be continued.

A run leaves ``checkpoint-<step>`` while it trains, each with a state file (`STATE_FILE`) beside those of the Trainer.
When it has finished, its results take their place, and one state file with its settings.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from transformers.trainer_utils import get_last_checkpoint

from grade.errors import InputError
from grade.files import read_json, remove, write_json

if TYPE_CHECKING:
    from grade.training.config import GradeConfig, TrainConfig

OPTIMIZER_FILE, STATE_FILE, RESULTS_FILE = "optimizer.pt", "grade_state.json", "metrics.json"
Resume = Literal["no", "yes", "auto"]

_FREE = ("output_dir", "run_name", "report_to", "project", "disable_tqdm", "base_name", "samples", "log_completions",
         "dataloader_num_workers", "ddp_timeout", "sampler", "sampler_timeout", "sampler_folder", "eval_on_start",
         "local_rank", "resume_from_checkpoint")  # fmt: skip
_FREE_PREFIXES = ("save_", "hub_", "push_", "log_", "trackio_")
"""Settings that change no result: they may differ when a run is continued."""


def settings_of(config: GradeConfig) -> dict[str, Any]:
    """Settings that decide a run's result, as JSON."""
    names = [field.name for field in fields(config) if field.init]
    kept = [name for name in names if name not in _FREE and not name.startswith(_FREE_PREFIXES)]
    settings = json.loads(json.dumps({name: getattr(config, name) for name in kept}, default=_plain))
    return settings | {"gradient_accumulation_steps": config.microbatches}  # on however many processes


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else str(getattr(value, "value", value))


def check_same(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse settings that are not those of a checkpoint, or of a finished run; the error names the first."""
    before = read_json(folder / STATE_FILE)["settings"]
    for name, value in settings.items():
        if before.get(name, value) != value:
            raise InputError(name, value, f"{before[name]!r}, as in {folder}, to continue it")


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest checkpoint of a run, if there is one."""
    folder = get_last_checkpoint(str(output_dir)) if Path(output_dir).is_dir() else None
    return folder and Path(folder)


def beginning(config: TrainConfig, resume: Resume, overwrite: bool = False) -> Path | None | Literal["finished"]:
    """Where a run begins: at a checkpoint, at the start (None), or nowhere, because it has finished.

    ``resume`` continues what is in the folder, if it has the same settings; ``auto`` starts over if it has others. A
    run that is there already is otherwise an `InputError`, unless ``overwrite`` starts over.
    """
    output, checkpoint = Path(config.output_dir), last_checkpoint(config.output_dir)
    finished = all((output / name).is_file() for name in (STATE_FILE, RESULTS_FILE))
    if overwrite or not (checkpoint or finished):
        return None
    if resume == "no":
        raise InputError("output_dir", str(output), "--resume to continue the run that is there, or --overwrite")
    try:
        check_same(checkpoint or output, settings_of(config))
    except InputError:
        if resume == "auto":
            return None
        raise
    return checkpoint or "finished"


def clear(output_dir: str | Path) -> None:
    """Remove what an earlier run left to continue from; its results stand until there are others."""
    for place in (STATE_FILE, "completions"):
        remove(Path(output_dir, place))
    _remove_checkpoints(output_dir)


def finish(config: TrainConfig) -> None:
    """Note that the results are complete; checkpoints to continue from are no longer needed."""
    write_json(Path(config.output_dir, STATE_FILE), {"settings": settings_of(config)})
    _remove_checkpoints(config.output_dir)


def _remove_checkpoints(output_dir: str | Path) -> None:
    while folder := last_checkpoint(output_dir):
        shutil.rmtree(folder)
