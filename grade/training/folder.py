"""A run's folder: one run at a time, what it was started with, and whether it may be continued."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import grade
from grade.errors import InputError
from grade.outputs import LOCK, claimed, writing
from grade.results import replacing
from grade.training.checkpoint import clean, last_checkpoint
from grade.training.config import TrainConfig

RUN_FILE, RESULTS_FILE = "run.json", "metrics.json"
Resume = Literal["no", "yes", "auto"]

_FREE = ("output_dir", "run_name", "report_to", "project", "disable_tqdm", "base_name", "samples", "log_completions",
         "dataloader_num_workers", "ddp_timeout", "eval_on_start", "local_rank")  # fmt: skip
_FREE_PREFIXES = ("save_", "hub_", "push_", "log_", "trackio_")
_HASHED_BYTES = 2**20
_SIGNS = ("run.json", "history.csv")
"""One of these is in every folder that a run has begun or finished in."""
_REPLACED = ("adapter", "checkpoint-*", "checkpoints", "completions", "README.md")
"""What a run replaces and others could have made. Tables of numbers are left out: a checkout may hold them alone."""


@contextmanager
def locked(output_dir: str | Path, inputs: Iterable[str] = ()) -> Iterator[None]:
    """Hold a run's folder; the lock goes with the process, however it ends.

    Args:
        output_dir: The folder; it is made. Files that a run does not write may be in it, and stay.
        inputs: Paths that the run reads.

    Raises:
        InputError: If another run has it, it cannot be written, it is no place for a run (see `grade.outputs.claimed`),
            or it holds what a run replaces, of something else than a run.
    """
    with claimed(output_dir, (), inputs=inputs, option="output_dir", shared=True) as output:
        if not any((output.path / name).exists() for name in _SIGNS):
            foreign = sorted({path.name for pattern in _REPLACED for path in output.path.glob(pattern)})
            if foreign:
                allowed = f"a folder without {foreign[0]!r}, which a run would replace and no run wrote"
                raise InputError("output_dir", str(output_dir), allowed)
        yield


def inputs(config: TrainConfig) -> list[str]:
    """Paths that a run reads; what is no path may be among them.

    Args:
        config: The run.
    """
    return [place for spec in _inputs(config).values() for place in _places(spec)]


def start(config: TrainConfig, resume: Resume, overwrite: bool = False) -> Path | None | Literal["finished"]:
    """Decide where a run begins. Nothing is changed yet: see `begin`.

    Args:
        config: The run.
        resume: ``no``; ``yes``: continue, which needs the same settings and data; ``auto``: continue if settings, data
            and code are the same, otherwise start over.
        overwrite: Start over where there is an interrupted run.

    Returns:
        A checkpoint to continue from, None to start from the beginning, or "finished".

    Raises:
        InputError: If there is an interrupted run and neither ``resume`` nor ``overwrite``, or the settings changed.
    """
    folder, now = Path(config.output_dir), about(config)
    clean(folder)
    before, checkpoint = _read(folder / RUN_FILE), last_checkpoint(folder)
    if before is not None and checkpoint is None and not _finished(folder, before):
        before = None  # nothing was trained: a bad start may be mended
    changed = next((name for name in now["settings"] if before["settings"].get(name) != now["settings"][name]), None) \
        if before else None  # fmt: skip
    same = before is not None and changed is None and before["inputs"] == now["inputs"]
    if resume == "auto" and not (same and before["code"] == now["code"]):
        resume, overwrite = "no", True
    if resume != "no" and before is not None:
        if changed is not None:
            allowed = f"{before['settings'].get(changed)!r}, as the run was started with, to continue it"
            raise InputError(changed, now["settings"][changed], allowed)
        if not same:
            name = next(name for name in now["inputs"] if before["inputs"].get(name) != now["inputs"][name])
            raise InputError(name, "another content than before", "what the run was started with, to continue it")
        return "finished" if _finished(folder, before) else checkpoint
    if checkpoint and before and not _finished(folder, before) and not overwrite:
        allowed = f"--resume to continue the interrupted run at {checkpoint.name}, or --overwrite to start over"
        raise InputError("output_dir", str(folder), allowed)
    return None


def begin(config: TrainConfig) -> None:
    """Remove an earlier run's checkpoints, and note what this run is: once its inputs are known to be good.

    Args:
        config: The run.
    """
    folder = Path(config.output_dir)
    remove_checkpoints(folder)
    _write(folder, about(config) | {"id": uuid.uuid4().hex[:12]})


def forget(output_dir: str | Path) -> None:
    """Remove the note on a run that ended before it wrote anything else, such as one with a reward that fails at once.

    Args:
        output_dir: The run's folder.
    """
    folder = Path(output_dir)
    if {path.name for path in folder.iterdir()} <= {RUN_FILE, LOCK}:
        (folder / RUN_FILE).unlink(missing_ok=True)


def continue_trackers(output_dir: str | Path, resumed: bool) -> None:
    """Let trackers go on with their run where this one is resumed; what the user's environment says comes first.

    Args:
        output_dir: The run's folder.
        resumed: Whether this run goes on from a checkpoint.
    """
    run = _read(Path(output_dir) / RUN_FILE) or {}
    wanted = {"TENSORBOARD_LOGGING_DIR": str(Path(output_dir) / "tensorboard"), "WANDB_RESUME": "allow",
              "WANDB_RUN_ID": run.get("id", ""), "DVCLIVE_RESUME": "true" if resumed else ""}  # fmt: skip
    for name, value in wanted.items():
        if value:
            os.environ.setdefault(name, value)


def finish(output_dir: str | Path) -> None:
    """Note that a run has finished: its files are complete.

    Args:
        output_dir: The run's folder.
    """
    _write(Path(output_dir), _read(Path(output_dir) / RUN_FILE) | {"finished": True})


def _finished(folder: Path, run: dict[str, Any]) -> bool:
    # Both: an earlier run's results stay until they are replaced, and DVC removes results that it is to make again.
    return bool(run.get("finished")) and (folder / RESULTS_FILE).is_file()


def _write(folder: Path, run: dict[str, Any]) -> None:
    with writing(folder, "output_dir"), replacing(folder / RUN_FILE) as file:
        file.write(json.dumps(run, indent=1, sort_keys=True) + "\n")


def remove_checkpoints(folder: Path) -> None:
    """Remove a run's checkpoints, each in one step."""
    with writing(folder, "output_dir"):
        while (checkpoint := last_checkpoint(folder)) is not None:
            checkpoint.rename(folder / ".old")
            shutil.rmtree(folder / ".old")


def about(config: TrainConfig) -> dict[str, Any]:
    """Settings that decide a run's result, and hashes of its inputs and of this package's code.

    Args:
        config: The run.
    """
    names = [field.name for field in fields(config) if field.init]
    kept = [name for name in names if name not in _FREE and not name.startswith(_FREE_PREFIXES)]
    settings = {name: json.loads(json.dumps(getattr(config, name), default=_plain)) for name in kept}
    settings["gradient_accumulation_steps"] *= config.world_size  # microbatches in a step, on however many processes
    package = Path(grade.__file__).parent
    others = {"experiments", "cli", "pipeline"}
    sources = [p for p in sorted(package.rglob("*.py")) if p.relative_to(package).parts[0] not in others]
    return {
        "settings": settings,
        "inputs": {name: _fingerprint(value) for name, value in _inputs(config).items()},
        "code": _digest(sources, package),
    }


def _inputs(config: TrainConfig) -> dict[str, str]:
    rewards = [config.reward] if isinstance(config.reward, str) else config.reward
    return {"model": config.model, "train_dataset": config.train_dataset, "eval_dataset": config.eval_dataset,
            "gold": config.gold} | {f"reward {i}": spec for i, spec in enumerate(rewards)}  # fmt: skip


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
    digest = hashlib.sha256()
    for file in files:
        try:
            _add_file(digest, file, root)
        except OSError as error:
            raise InputError("input", str(file), f"a file that can be read ({error.strerror})") from None
    return digest.hexdigest()


def _add_file(digest: Any, file: Path, root: Path) -> None:
    size = file.stat().st_size
    digest.update(f"{file.relative_to(root) if file != root else ''} {size}\n".encode())
    with open(file, "rb") as content:
        if size <= 64 * _HASHED_BYTES:
            digest.update(content.read())
        else:  # weights of gigabytes: beginning and end
            digest.update(content.read(_HASHED_BYTES))
            content.seek(-_HASHED_BYTES, 2)
            digest.update(content.read())


def _read(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return content if {"settings", "inputs", "code"} <= set(content) else None
    except (OSError, ValueError, TypeError):
        return None
