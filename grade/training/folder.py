"""A run's folder: one run at a time, what it was started with, whether it may be continued, its checkpoints.

A checkpoint is a folder with a manifest, which is written last; what a kill or a damaged disk left is passed over.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from transformers.trainer import TRAINER_STATE_NAME

import grade
from grade.errors import InputError, reading
from grade.files import (
    LOCK,
    MANIFEST,
    checkpoints_of,
    claimed,
    damaged_file,
    hashed,
    read_json,
    remove,
    sha256_of,
    write_json,
    write_manifest,
    writing,
)
from grade.models.server import is_address
from grade.training.card import command_of
from grade.training.config import GradeConfig, TrainConfig

logger = logging.getLogger(__name__)

RUN_FILE, RESULTS_FILE, OPTIMIZER_FILE = "run.json", "metrics.json", "optimizer.pt"
RESULTS = (RESULTS_FILE, "timings.json", "samples.json", "history.csv", "timings.csv")
"""What a finished run has beside its adapter, its checkpoints and its tables of completions."""
ADAPTER_MANIFEST = f"adapter/{MANIFEST}"
STATE_FILE = "grade_state.json"
"""What a checkpoint has beside the Trainer's own files, written last before its manifest."""
Resume = Literal["no", "yes", "auto"]

_FREE = ("output_dir", "run_name", "report_to", "project", "disable_tqdm", "base_name", "samples", "log_completions",
         "dataloader_num_workers", "ddp_timeout", "sampler_timeout", "sampler_folder", "eval_on_start", "local_rank",
         "resume_from_checkpoint")  # fmt: skip
_FREE_PREFIXES = ("save_", "hub_", "push_", "log_", "trackio_")
"""Settings that change no result."""
_REPLACED = ("adapter", "checkpoint-*", "checkpoints", "completions", "README.md")
"""What a run replaces and others could have made. Tables of numbers are left out: a checkout may hold them alone."""


class RunFolder:
    """The folder of a run from the command line, and the note in it on what the run is (``run.json``)."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.path = config, Path(config.output_dir)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder, which is made; the lock goes with the process, however it ends.

        Files that a run does not write may be in it, and stay. `InputError` if another run has it, it cannot be
        written, it is no place for a run (see `grade.files.claimed`), or it holds what a run replaces, of something
        else than a run.
        """
        inputs = [place for spec in _inputs(self.config).values() for place in _places(spec)]
        with claimed(self.config.output_dir, (), inputs=inputs, option="output_dir", shared=True) as output:
            if not (output.path / RUN_FILE).exists():
                foreign = sorted({path.name for pattern in _REPLACED for path in output.path.glob(pattern)})
                if foreign:
                    allowed = f"a folder without {foreign[0]!r}, which a run would replace: it has no {RUN_FILE}"
                    raise InputError("output_dir", self.config.output_dir, allowed)
            yield

    def start(self, resume: Resume, overwrite: bool = False) -> Path | None | Literal["finished"]:
        """Where a run begins: at a checkpoint, at the beginning (None), or nowhere, because it has finished.

        Nothing is changed yet, see `begin`. An interrupted run is continued by ``resume`` (yes: the same settings and
        data; auto: also the same code, or else it starts over). Only ``overwrite`` replaces a run, finished or not.
        """
        if overwrite and resume != "no":
            raise InputError("resume", resume, "no, beside overwrite: one continues a run, the other starts over")
        self.about = now = _about(self.config)
        if overwrite:
            return None
        before, checkpoint = self._read(), last_checkpoint(self.path)
        # Both: an earlier run's results stay until they are replaced, and DVC removes results that it is to make again.
        finished = bool(before.get("finished")) and (self.path / RESULTS_FILE).is_file()
        whole = finished and self._whole()
        begun = finished or checkpoint or any(self.path.glob(f"checkpoint-*/{STATE_FILE}"))
        if not before or not begun:  # nothing was trained: a bad start may be mended
            return None
        changed, replaced = (
            [name for name in now[part] if before[part].get(name) != now[part][name]] for part in ("settings", "inputs")
        )
        if resume == "auto" and (changed or before["inputs"] != now["inputs"] or before["code"] != now["code"]):
            return None
        if not whole and not checkpoint:
            allowed = "--overwrite to start over: no checkpoint of this run is there and whole; nothing was deleted"
            raise InputError("output_dir", str(self.path), allowed)
        if resume != "no":
            for name in changed:
                allowed = f"{before['settings'].get(name)!r}, as the run was started with, to continue it"
                raise InputError(name, now["settings"][name], allowed)
            for name in replaced:
                raise InputError(name, "another content than before", "what the run was started with, to continue it")
            return "finished" if whole else checkpoint
        resumed = f"--resume to continue the interrupted run at {checkpoint and checkpoint.name}, or"
        way = "this run has finished;" if finished else resumed
        raise InputError("output_dir", str(self.path), f"{way} --overwrite to start over")

    def begin(self, resumed: bool) -> None:
        """Note what this run is, once its inputs are read; remove an earlier one's checkpoints and tables."""
        self.made = not self.path.exists()
        with writing(self.path, "output_dir"):
            if resumed:
                self._write({**self._read(), "finished": False})
                return
            for checkpoint in checkpoints_of(self.path):
                shutil.rmtree(checkpoint)
            remove(self.path / "completions")
            about = {"id": uuid.uuid4().hex[:12], "mark": hashed(self.about), "command": command_of(self.config)}
            self._write(self.about | about)

    def forget(self) -> None:
        """Remove the note on a run that ended before it wrote anything else, such as one whose reward fails at once."""
        if {path.name for path in self.path.iterdir()} <= {RUN_FILE, MANIFEST, LOCK}:
            for name in (MANIFEST, RUN_FILE):
                remove(self.path / name)
            if self.made:
                self.path.rmdir()

    def continue_trackers(self, resumed: bool) -> None:
        """Let trackers go on with their run where this one is resumed; the user's own environment comes first."""
        variables = {"TENSORBOARD_LOGGING_DIR": str(self.path / "tensorboard"), "WANDB_RESUME": "allow",
                     "WANDB_RUN_ID": self._read().get("id"), "DVCLIVE_RESUME": "true" if resumed else ""}  # fmt: skip
        for name, value in variables.items():
            if value:
                os.environ.setdefault(name, value)

    def finish(self) -> None:
        """Note that the run has finished: its files are complete."""
        with writing(self.path, "output_dir"):
            tables = (str(path.relative_to(self.path)) for path in sorted(self.path.glob("completions/*.parquet")))
            self._write(self._read() | {"finished": True}, [*RESULTS, ADAPTER_MANIFEST, *tables])

    def _whole(self) -> bool:
        """Whether the results of a finished run are what was written; tables of completions are no longer needed."""
        for folder, names in ((self.path, (*RESULTS, ADAPTER_MANIFEST)), (self.path / "adapter", ("*",))):
            if (folder / MANIFEST).exists() and (damaged := damaged_file(folder, names)):
                logger.warning(f"{folder / damaged} is damaged: the run's results are written again")
                return False
        return True

    def _write(self, run: dict[str, Any], results: Iterable[str] = ()) -> None:
        """Replace the note and the manifest of note and results; a process killed between them leaves no manifest."""
        remove(self.path / MANIFEST)
        write_json(self.path / RUN_FILE, run, sort_keys=True)
        write_manifest(self.path, [RUN_FILE, *results])

    def _read(self) -> dict[str, Any]:
        """The note; empty where there is none."""
        path = self.path / RUN_FILE
        if not path.exists():
            return {}
        with reading("output_dir", path, "the note of a run, or --overwrite to start over"):
            if (self.path / MANIFEST).exists() and damaged_file(self.path, (RUN_FILE,)):
                raise ValueError(f"it is not what {MANIFEST} says")
            content = read_json(path)
            return {name: dict(content[name]) for name in ("settings", "inputs")} | {"code": content["code"]} | content


def run_mark(output_dir: str | Path) -> str | None:
    """What its checkpoints and tables have of the run in a folder: a hash of its note, None where there is none."""
    path = Path(output_dir) / RUN_FILE
    with reading("output_dir", path, "the note of a run"):
        return read_json(path).get("mark") if path.is_file() else None


def last_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest whole checkpoint of a run, if there is one."""
    return next(whole_checkpoints(output_dir), None)


def whole_checkpoints(output_dir: str | Path) -> Iterator[Path]:
    """Checkpoints of the run that began last, the newest first, then those of runs before it, as of a script.

    What is damaged, or not of the folder's run where that has a note, is passed over with a warning.
    """
    mark = run_mark(output_dir)
    for folder in sorted(reversed(checkpoints_of(Path(output_dir))), key=_began, reverse=True):
        damaged = damaged_file(folder)
        if damaged is None:
            with reading("output_dir", folder, "checkpoints that this library wrote"):
                ours, theirs = (
                    {**read_json(folder / name)} if (folder / name).is_file() else {}
                    for name in (STATE_FILE, TRAINER_STATE_NAME)
                )
            if ours.get("run", mark) != mark:
                logger.warning(f"{folder} is another run's: it is not used")
            elif theirs and folder.name != f"checkpoint-{theirs.get('global_step')}":
                logger.warning(f"{folder} is of step {theirs.get('global_step')}: it is not used")
            else:
                yield folder
        elif (folder / damaged).exists() or damaged != MANIFEST:  # a checkpoint without one was never finished
            logger.warning(f"{folder / damaged} is damaged: {folder.name} is not used")


def _began(checkpoint: Path) -> float:
    """When its run began; infinite where nothing tells, so that it is come to, and what is damaged told of."""
    try:
        return float(read_json(checkpoint / STATE_FILE).get("began", 0.0))
    except Exception:
        return math.inf


@contextmanager
def writing_run(output_dir: str | Path) -> Iterator[None]:
    """Name the folder where something cannot be written, and the checkpoint that stands."""
    try:
        with writing(output_dir, "output_dir"):
            yield
    except InputError as error:
        stands = last_checkpoint(output_dir)
        what = f"{stands.name} stands" if stands else "no checkpoint was written yet"
        raise InputError(error.field, error.value, f"{error.allowed}; {what}") from error


def _about(config: TrainConfig) -> dict[str, Any]:
    """Settings that decide a run's result, and hashes of its inputs and of this package's code."""
    package = Path(grade.__file__).parent
    others = {"experiments", "cli", "pipeline"}
    sources = [p for p in sorted(package.rglob("*.py")) if p.relative_to(package).parts[0] not in others]
    inputs = {}
    for name, spec in _inputs(config).items():
        inputs[name] = _fingerprint(spec)
    return {"settings": settings_of(config), "inputs": inputs, "code": _digest(sources, package)}


def settings_of(config: GradeConfig) -> dict[str, Any]:
    """Settings that decide a run's result, as JSON."""
    names = [field.name for field in fields(config) if field.init]
    kept = [name for name in names if name not in _FREE and not name.startswith(_FREE_PREFIXES)]
    settings = json.loads(json.dumps({name: getattr(config, name) for name in kept}, default=_plain))
    for name in ("teacher", "sampler"):  # whose model is in the teacher's fingerprint, whose samples are compared
        if is_address(settings[name]):
            settings[name] = "a server"
    settings["gradient_accumulation_steps"] = config.microbatches  # on however many processes
    settings["tau_end"] = config.tau_end or config.tau_start  # null is that one
    return settings


def _inputs(config: TrainConfig) -> dict[str, str]:
    rewards = [config.reward] if isinstance(config.reward, str) else config.reward
    names = ("model", "train_dataset", "eval_dataset", "texts", "gold", "teacher")
    files = {name: getattr(config, name) or "" for name in names}
    if is_address(config.teacher):
        del files["teacher"]
    return files | {f"reward {i}": spec for i, spec in enumerate(rewards)}


def _places(spec: str) -> tuple[str, ...]:
    """The paths that an input may mean: all of it, or what stands before a function, a split or a label."""
    place = spec.removeprefix("hf:").partition("@")[0]
    return tuple(path for path in (place, place.rpartition(":")[0]) if path)


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else str(getattr(value, "value", value))


def _fingerprint(spec: str) -> str:
    """A hash of the files that an input names, or the name itself where it names none."""
    path = next((Path(place) for place in _places(spec) if Path(place).exists()), None)
    if path is None or not str(path).strip("."):
        return spec
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    return _digest(files, path)


def _digest(files: list[Path], root: Path) -> str:
    content = [f"{file.relative_to(root) if file != root else ''} {sha256_of(file)}\n" for file in files]
    return hashlib.sha256("".join(content).encode()).hexdigest()
