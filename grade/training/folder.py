"""A run's folder: where a run begins in it, and what is left when it has finished.

A run leaves ``checkpoint-<step>`` while it trains. When it has finished, its results take their place, with one state
file that has its settings.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from grade.errors import InputError
from grade.files import remove, write_json
from grade.training.checkpoint import STATE_FILE, check_same, checkpoints_of, settings_of

if TYPE_CHECKING:
    from grade.training.config import TrainConfig

RESULTS_FILE = "metrics.json"
Resume = Literal["no", "yes", "auto"]


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest checkpoint of a run, if there is one."""
    return (checkpoints_of(output_dir) or [None])[-1]


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
    for name in (STATE_FILE, "completions"):
        remove(Path(output_dir, name))
    _remove_checkpoints(output_dir)


def finish(config: TrainConfig) -> None:
    """Note that the results are complete; checkpoints to continue from are no longer needed."""
    write_json(Path(config.output_dir, STATE_FILE), {"settings": settings_of(config)})
    _remove_checkpoints(config.output_dir)


def _remove_checkpoints(output_dir: str | Path) -> None:
    for folder in checkpoints_of(output_dir):
        shutil.rmtree(folder)
