"""A training run from beginning to end: load, train or continue, write its files.

``<output_dir>`` holds ``checkpoint-<step>/`` (to continue from) while it trains; then ``adapter/`` (what PEFT loads,
with a model card), ``checkpoints/step-<step>/`` (adapters along the way), ``completions/`` (tables of text with
rewards), ``history.csv``, ``timings.csv``, ``metrics.json``, ``samples.json``, and one state file with its settings.
"""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from accelerate.utils import broadcast_object_list

from grade.errors import InputError
from grade.files import atomic, remove, write_json
from grade.gradients.methods import AUTO
from grade.models.adapter import ADAPTER_FILES, BASE_FILE
from grade.models.token_bias import BIAS_FILE
from grade.results import write_results
from grade.stats import Estimate
from grade.training.card import model_card
from grade.training.checkpoint import (
    OPTIMIZER_FILE,
    STATE_FILE,
    check_same,
    checkpoints_of,
    last_checkpoint,
    settings_of,
)
from grade.training.evaluate import Evaluation
from grade.training.load import Prompts, Task, load_task
from grade.training.logs import Lines, history_rows, write_log
from grade.training.loop import GradeTrainer

if TYPE_CHECKING:
    from grade.models.backbone import Backbone
    from grade.training.config import TrainConfig

SMALLEST_WIDTH = 1024
"""Hidden size from which threads help on a CPU: below, they wait for each other. SmolLM2 (576) trains no faster on two
cores than on one, and three times slower where two processes share them."""


@dataclass
class RunResult:
    """Results of a run."""

    # one row per optimizer step, with its evaluation if there is one
    history: list[dict[str, Any]] = field(default_factory=list)
    before: Evaluation | None = None  # evaluation of the untrained policy
    after: Evaluation | None = None  # evaluation of the trained policy
    evaluations: dict[int, Evaluation] = field(default_factory=dict)  # all evaluations of this process, by step
    seconds: float = 0.0  # training time without evaluations
    step: int = 0  # the last step
    kept: int = 0  # the step whose policy is the result: the last, or the best one
    method: str = ""  # the method that trained, which `auto` chose if the settings say so
    chosen: dict[str, str] = field(default_factory=dict)  # what was chosen in the run, and why
    rewards: list[str] = field(default_factory=list)  # names of the rewards


def train(
    config: TrainConfig, log: Callable[[str], None] | None = print, resume: Literal["no", "yes", "auto"] = "no",
    overwrite: bool = False,
) -> RunResult | None:  # fmt: skip
    """Train one policy, or continue an interrupted run, and write its files to ``config.output_dir``.

    Args:
        config: The run.
        log: Receives one line per row of the log; None: a progress bar.
        resume: ``yes``: continue, with the same settings; ``auto``: continue if they are the same, else start over.
        overwrite: Start over where there is a run.

    Returns:
        History and evaluations; None if the run had finished before, and was left as it is.

    Raises:
        InputError: For bad input, or a reward or loss that is not finite. The last checkpoint stands.
    """
    main, output = config.process_index == 0, Path(config.output_dir)
    begin = [_beginning(config, resume, overwrite) if main else None]
    if config.world_size > 1:
        broadcast_object_list(begin)
    if begin[0] == "finished":
        return None
    task = load_task(config, config.device)
    if config.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1 if task.backbone.hidden_size < SMALLEST_WIDTH else os.cpu_count() or 1)
    if main and begin[0] is None:
        _clear(output)
    result = run_training(config, task, log, output, begin[0])
    if main:
        write_run(output, config, task, result)
        _finish(config)
    return result


def _beginning(
    config: TrainConfig, resume: Literal["no", "yes", "auto"], overwrite: bool = False
) -> Path | None | Literal["finished"]:
    """Where a run begins: at a checkpoint, at the start (None), or nowhere, because it has finished.

    ``resume`` continues what is in the folder, if it has the same settings; ``auto`` starts over if it has others. A
    run that is there already is otherwise an `InputError`, unless ``overwrite`` starts over.
    """
    output, checkpoint = Path(config.output_dir), last_checkpoint(config.output_dir)
    finished = all((output / name).is_file() for name in (STATE_FILE, "metrics.json"))
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


def _clear(output_dir: str | Path) -> None:
    """Remove what an earlier run left to continue from; its results stand until there are others."""
    for name in (STATE_FILE, "completions"):
        remove(Path(output_dir, name))
    _remove_checkpoints(output_dir)


def _finish(config: TrainConfig) -> None:
    """Note that the results are complete; checkpoints to continue from are no longer needed."""
    write_json(Path(config.output_dir, STATE_FILE), {"settings": settings_of(config)})
    _remove_checkpoints(config.output_dir)


def _remove_checkpoints(output_dir: str | Path) -> None:
    for folder in checkpoints_of(output_dir):
        shutil.rmtree(folder)


def run_training(
    config: TrainConfig, task: Task, log: Callable[[str], None] | None = None, output_dir: Path | None = None,
    checkpoint: Path | None = None,
) -> RunResult:  # fmt: skip
    """Evaluate, train from the beginning or a checkpoint, evaluate again.

    ``log`` receives one line per row of the log. Without ``output_dir`` no checkpoints and tables of text are written.
    """
    with tempfile.TemporaryDirectory() if output_dir is None else nullcontext(str(output_dir)) as place:
        saved = {} if output_dir or config.metric_for_best_model else {"save_strategy": "no"}
        trainer = _trainer(config, task, task.train_prompts, place, **saved)
        if log is not None or output_dir is None:
            trainer.remove_callback(Lines)
        if log is not None:
            trainer.add_callback(Lines(trainer.evaluations, log))
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        state = trainer.state
        result = RunResult(
            history_rows(state.log_history), seconds=trainer.seconds, step=state.global_step, kept=trainer.kept_step,
            method=trainer.config.method, chosen=trainer.chosen, evaluations=trainer.evaluations,
            rewards=trainer.rewards.names,
        )  # fmt: skip
        if trainer.eval_dataset is not None:
            result.before, result.after = trainer.saved_ends()
        return result


def evaluate_task(config: TrainConfig, task: Task, n: int) -> Evaluation:
    """Evaluate a task's policy on its first n held-out prompts, as its training run does; KL is to the bare base."""
    with tempfile.TemporaryDirectory() as place:
        once = dict(final_eval_prompts=n, save_strategy="no", metric_for_best_model=None, report_to="none")
        trainer = _trainer(config, task, [], place, **once)
        trainer.remove_callback(Lines)
        trainer.backbone.set_reference({})  # or the policy would be measured against itself
        trainer.evaluate()
    return trainer.evaluations[0]


def _trainer(config: TrainConfig, task: Task, prompts: Prompts, output_dir: str, **changes: Any) -> GradeTrainer:
    args = config.replace(output_dir=output_dir, **changes)
    train, held_out = (
        [{"prompt": p} for p in given] if len(given) and isinstance(given[0], str) else given or None
        for given in (prompts, task.validation_prompts)
    )
    return GradeTrainer(task.backbone, task.reward_model, args, train, held_out, judge=task.judge)


def write_run(output_dir: str | Path, config: TrainConfig, task: Task, result: RunResult) -> None:
    """Write a finished run's files beside its checkpoints; its earlier results are replaced."""
    output, name = Path(output_dir), Path(config.output_dir).resolve().name
    others = {path.name: path for path in output.glob("checkpoint-*/")}
    kept = others.pop(f"checkpoint-{result.kept}", None)
    rewards = [config.reward] if isinstance(config.reward, str) else config.reward
    card = model_card(
        config, result.before, result.after, name=name, base=config.base_name or config.model,
        method=result.method or config.method, rewards=rewards or result.rewards,
        prompts=config.train_dataset, steps=result.step, chosen=result.chosen,
    )  # fmt: skip
    with atomic(output / "adapter") as adapter:
        task.backbone.save_adapter(adapter)
        if kept is not None:
            _copy(kept, adapter, [OPTIMIZER_FILE])
        (adapter / "README.md").write_text(card, encoding="utf-8")  # over PEFT's empty one
    with atomic(output / "checkpoints") as checkpoints:
        checkpoints.mkdir()
        for other in others.values():
            step = other.name.removeprefix("checkpoint-")
            _copy(other, checkpoints / f"step-{step}", [*ADAPTER_FILES, BIAS_FILE, BASE_FILE, OPTIMIZER_FILE])
    write_log(output, result.history)
    write_json(output / "samples.json", _samples(config, result))
    write_results(output / "metrics.json", run_metrics(config, result, task.backbone))


def _copy(source: Path, target: Path, names: list[str]) -> None:
    target.mkdir(exist_ok=True)
    for name in names:
        if (source / name).is_file():  # save_only_model leaves out the optimizer
            shutil.copy2(source / name, target / name)


def run_metrics(config: TrainConfig, result: RunResult, backbone: Backbone) -> dict[str, Any]:
    """Flat metrics of a finished run: before, after, and the paired gain with its standard error."""
    before, after, flat = result.before, result.after, {}
    for name, evaluation in (("before", before), ("after", after)):
        flat |= {f"{name}/{k}": v for k, v in evaluation.metrics().items()} if evaluation else {}
    if before and after and len(before.reward) == len(after.reward):
        for name in ("reward", "gold"):
            difference = getattr(after, name) - getattr(before, name)
            if len(difference := difference[np.isfinite(difference)]):
                flat |= Estimate.of(difference).metrics(f"gain/{name}")
    if before:
        flat["before/val/kl_max"] = before.kl_max
    if config.method == AUTO:
        flat["method_chosen"] = result.method
    return flat | {
        "method": config.method,
        "seed": config.seed,
        "steps": result.step,
        "samples": result.history[-1]["samples"],
        "seconds": result.seconds,
        "seconds_per_step": result.seconds / result.step,
        "peak_memory_bytes": _peak_memory(backbone.device),
        "dtype": str(backbone.dtype).removeprefix("torch."),
    }


def _peak_memory(device: torch.device) -> int:
    """Peak memory so far, in bytes: what was allocated on a CUDA device, else the resident set with libraries."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _samples(config: TrainConfig, result: RunResult) -> list[dict[str, Any]]:
    texts = []
    if result.before is None or result.after is None:
        return texts
    for i in range(min(config.samples, len(result.before.prompts))):
        text: dict[str, Any] = {"prompt": result.before.prompts[i]}
        for name, evaluation in (("before", result.before), ("after", result.after)):
            text[name] = evaluation.completions[i]
            for part in ("reward", "gold"):
                if np.isfinite(value := getattr(evaluation, part)[i]):
                    text[f"{name}_{part}"] = round(float(value), 4)
        texts.append(text)
    return texts
