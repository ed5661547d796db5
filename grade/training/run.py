"""A training run from beginning to end: load, train or continue, write its files.

``<output_dir>`` then holds ``adapter/`` (what PEFT loads), ``checkpoint-<step>/`` (to continue from), ``completions/``
(tables of text with rewards), ``history.csv``, ``timings.csv``, ``metrics.json``, ``samples.json`` and a model card.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from accelerate.utils import broadcast_object_list
from transformers import PrinterCallback

from grade.errors import InputError
from grade.files import OutputFolder, writing
from grade.gradients.methods import AUTO
from grade.results import is_timed, peak_memory, write_history, write_results
from grade.stats import Estimate
from grade.training import folder
from grade.training.callbacks import Lines, StopOnSignal
from grade.training.card import write_card
from grade.training.checkpoint import (
    OPTIMIZER_FILE,
    export_adapter,
    last_checkpoint,
    not_written,
)
from grade.training.evaluate import Evaluation
from grade.training.load import load_task
from grade.training.policy import name_base
from grade.training.task import Task, rows
from grade.training.threads import use_fastest_threads
from grade.training.trainer import GradeTrainer

if TYPE_CHECKING:
    from grade.models.backbone import Backbone
    from grade.training.config import TrainConfig

TRAIN_COLUMNS = {
    "train/reward": "reward", "train/kl": "kl", "train/loss": "loss", "train/tau": "tau",
    "train/grad_norm": "grad_norm", "train/residual": "residual", "train/length": "completions/mean_length",
    "train/learning_rate": "learning_rate",
}  # fmt: skip
"""Columns of ``history.csv``, and what the Trainer's log calls them."""
METHOD_COLUMNS = {
    "train/clip_fraction": "clip_fraction", "train/value_loss": "value_loss", "train/beta": "beta",
    "train/residual_weight": "residual_weight", "train/sampler_mean_ratio": "sampler/mean_ratio",
    "train/sampler_largest_difference": "sampler/largest_difference",
}  # fmt: skip
"""Columns that only some methods or settings have; besides, whatever the log has below ``distilled/``."""


RESULTS = ("adapter/", "checkpoints/", "history.csv", "timings.csv", "samples.json", "metrics.json", "timings.json",
           "README.md")  # fmt: skip
"""What `write_run` writes."""


@dataclass
class RunResult:
    """Results of a run.

    Attributes:
        history: One row per optimizer step, with its evaluation if there is one.
        before: Evaluation of the untrained policy.
        after: Evaluation of the trained policy.
        seconds: Training time without evaluations.
        interrupted: The signal that stopped the run before its end.
        step: The last step.
        method: The method that trained, which `auto` chose if the settings say so.
    """

    history: list[dict[str, Any]] = field(default_factory=list)
    before: Evaluation | None = None
    after: Evaluation | None = None
    seconds: float = 0.0
    interrupted: int | None = None
    step: int = 0
    method: str = ""


def train(
    config: TrainConfig, log: Callable[[str], None] | None = print, resume: folder.Resume = "no",
    overwrite: bool = False,
) -> RunResult | None:  # fmt: skip
    """Train one policy, or continue an interrupted run, and write its files to ``config.output_dir``.

    Args:
        config: The run.
        log: Receives one line per row of the log; None: a progress bar.
        resume: See `grade.training.folder.start`.
        overwrite: Start over where there is an interrupted run.

    Returns:
        History and evaluations; None if the run had finished before, and was left as it is.

    Raises:
        InputError: For bad input, or a reward or loss that is not finite; the last checkpoint stands.
    """
    main = config.process_index == 0
    with folder.locked(config.output_dir, folder.inputs(config)) if main else nullcontext():
        begin = [folder.start(config, resume, overwrite) if main else None]
        if config.world_size > 1:
            broadcast_object_list(begin)
        begin = begin[0]
        if begin == "finished":
            return None
        task = load_task(config, config.device)
        if config.device.type == "cpu":
            use_fastest_threads(task.backbone.hidden_size)
        name_base(task.backbone, config.base_name)
        if main and begin is None:
            folder.begin(config)
        if config.trackers:
            folder.continue_trackers(config.output_dir, begin is not None)
        try:
            result = run_training(config, task, log, Path(config.output_dir), begin)
            if main and result.interrupted is None:
                write_run(config.output_dir, config, task, result)
                folder.finish(config.output_dir)
        except InputError:
            if main:
                folder.forget(config.output_dir)
            raise
        except OSError as error:
            raise not_written(config.output_dir, error) from error
    return result


def run_training(
    config: TrainConfig, task: Task, log: Callable[[str], None] | None = None, output_dir: Path | None = None,
    checkpoint: Path | None = None,
) -> RunResult:  # fmt: skip
    """Evaluate, train, evaluate again.

    Args:
        config: The run.
        task: What to train.
        log: Receives one line per row of the log.
        output_dir: Folder of checkpoints and tables of text; None: none are written.
        checkpoint: Where to continue.

    Returns:
        History and evaluations.
    """
    with tempfile.TemporaryDirectory() if output_dir is None else nullcontext(str(output_dir)) as place:
        args = copy.copy(config)
        args.output_dir = place
        if output_dir is None:
            args.save_strategy = "no"
        args.disable_tqdm = log is not None or output_dir is None
        held_out = rows(task.validation_prompts) if len(task.validation_prompts) else None
        trainer = GradeTrainer(
            task.backbone, task.reward_model, args, rows(task.train_prompts), held_out, judge=task.judge
        )
        trainer.remove_callback(PrinterCallback)
        if log is not None:
            trainer.add_callback(Lines(log, _line))
        stop = StopOnSignal(trainer) if output_dir is not None else None
        if stop is not None:
            trainer.add_callback(stop)
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            if stop is not None:
                stop.restore()
        return _result(trainer, stop, Path(place))


def _result(trainer: GradeTrainer, stop: StopOnSignal | None, place: Path) -> RunResult:
    result = RunResult(
        history_rows(trainer.state.log_history), seconds=trainer.seconds, step=trainer.state.global_step,
        method=trainer.args.method,
    )  # fmt: skip
    if stop is not None and stop.received is not None and trainer.state.global_step < trainer.state.max_steps:
        result.interrupted = int(stop.received)
        return result
    if trainer.eval_dataset is not None:
        ends = []
        for step in (0, trainer.state.global_step):
            table = place / "completions" / f"eval_{step:05d}.parquet"
            if step not in trainer.evaluations and table.is_file():  # of the part before the interruption
                trainer.evaluations[step] = Evaluation.of_table(pd.read_parquet(table))
            ends.append(trainer.evaluations.get(step))
        result.before, result.after = ends
    return result


def evaluate_task(config: TrainConfig, task: Task, n: int) -> Evaluation:
    """Evaluate a task's policy as its training run does.

    Args:
        config: The run.
        task: Policy, reward, judge, held-out prompts.
        n: Prompts, from the first.

    Returns:
        The values, prompt by prompt.
    """
    with tempfile.TemporaryDirectory() as place:
        args = copy.copy(config)
        args.output_dir, args.save_strategy, args.final_eval_prompts, args.disable_tqdm = place, "no", n, True
        args.report_to = []
        trainer = GradeTrainer(task.backbone, task.reward_model, args, None, rows(task.validation_prompts),
                               judge=task.judge)  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.evaluate()
    return trainer.evaluations[0]


def history_rows(log_history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of ``history.csv`` from the Trainer's log, one for each step that was logged.

    Args:
        log_history: ``trainer.state.log_history``.

    Returns:
        Step, samples, seconds, figures of the training batch and of the evaluation.
    """
    table: dict[int, dict[str, Any]] = {}
    for logged in log_history:
        if "loss" in logged:
            row = {"step": logged["step"], "samples": logged["num_samples"], "seconds": logged["seconds"]}
            row |= {column: logged.get(name) for column, name in TRAIN_COLUMNS.items()}
            row |= {column: logged[name] for column, name in METHOD_COLUMNS.items() if name in logged}
            # Sorted, as rows of a checkpoint are.
            row |= {f"train/{name}": logged[name] for name in sorted(logged) if name.startswith("distilled/")}
            row["train/seconds"] = logged["step_time"]
        elif "eval_reward" in logged:
            row = {} if logged["step"] else {"step": 0, "samples": 0, "seconds": 0.0}
            for name in ("reward", "gold", "kl"):
                key = "val/kl" if name == "kl" else f"val/{name}_mean"
                row |= {column: logged[f"eval_{part}"] for column, part in
                        ((key, name), (f"val/{name}_stderr", f"{name}_stderr"), (f"val/{name}_n", f"{name}_n"))
                        if f"eval_{part}" in logged}  # fmt: skip
        else:
            continue
        table[logged["step"]] = table.get(logged["step"], {}) | row
    return [table[step] for step in sorted(table)]


def write_run(output_dir: str | Path, config: TrainConfig, task: Task, result: RunResult) -> None:
    """Write a finished run's files and move them in when all are complete.

    Args:
        output_dir: Holds the checkpoints; its earlier results are replaced.
        config: The run.
        task: Holds the adapter.
        result: The run's results.
    """
    output, last = Path(output_dir), last_checkpoint(output_dir)
    folder = OutputFolder(output, RESULTS, "output_dir", shared=True)
    with writing(output_dir, "output_dir"), folder.replacement() as staging:
        (staging / "checkpoints").mkdir()
        task.backbone.save_adapter(staging / "adapter")
        if last is not None:
            shutil.copy2(last / OPTIMIZER_FILE, staging / "adapter")
        for earlier in sorted(set(output.glob("checkpoint-*")) - {last}):
            export_adapter(earlier, staging / "checkpoints" / f"step-{earlier.name.removeprefix('checkpoint-')}")
        for file, timed in (("history.csv", False), ("timings.csv", True)):
            parts = [{k: v for k, v in row.items() if k == "step" or is_timed(k) == timed} for row in result.history]
            write_history(staging / file, parts)
        (staging / "samples.json").write_text(json.dumps(_samples(config, result), indent=1) + "\n", encoding="utf-8")
        write_results(staging / "metrics.json", run_metrics(config, result, task.backbone))
        write_card(staging, config, result)


def run_metrics(config: TrainConfig, result: RunResult, backbone: Backbone) -> dict[str, Any]:
    """Flat metrics of a finished run: before, after, and the paired gain with its standard error.

    Args:
        config: The run.
        result: The run's results.
        backbone: For device and type.

    Returns:
        Metric names to values.
    """
    before, after, flat = result.before, result.after, {}
    for name, evaluation in (("before", before), ("after", after)):
        flat |= {f"{name}/{k}": v for k, v in evaluation.metrics().items()} if evaluation else {}
    if before and after and len(before.reward) == len(after.reward):
        for name in ("reward", "gold"):
            difference = getattr(after, name) - getattr(before, name)
            if np.isfinite(difference).all():
                gain = Estimate.of(difference)
                flat |= {f"gain/{name}": gain.mean, f"gain/{name}_stderr": gain.stderr, f"gain/{name}_n": gain.n}
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
        "peak_memory_bytes": peak_memory(backbone.device),
        "dtype": str(backbone.dtype).removeprefix("torch."),
    }


def _samples(config: TrainConfig, result: RunResult) -> list[dict[str, Any]]:
    texts = []
    if result.before is None or result.after is None:
        return texts
    for i in range(min(config.samples, len(result.before.prompts))):
        text: dict[str, Any] = {"prompt": result.before.prompts[i]}
        for name, evaluation in (("before", result.before), ("after", result.after)):
            text[name] = evaluation.completions[i]
            text[f"{name}_reward"] = round(float(evaluation.reward[i]), 4)
            if np.isfinite(evaluation.gold[i]):
                text[f"{name}_gold"] = round(float(evaluation.gold[i]), 4)
        texts.append(text)
    return texts


def _line(state: Any, row: dict[str, Any]) -> str:
    names = ("reward", "kl", "grad_norm", "eval_reward", "eval_gold", "eval_kl")
    figures = "  ".join(f"{name} {row[name]:.4g}" for name in names if row.get(name) is not None)
    seconds = f"  {row['seconds']:7.1f} s" if "seconds" in row else " " * 11
    return f"step {state.global_step:>4}/{state.max_steps}{seconds}  {figures}" if figures else ""
