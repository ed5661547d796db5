"""A training run from beginning to end: load, train or continue, write its files.

``<output_dir>`` then holds ``adapter/`` (what PEFT loads), ``checkpoint-<step>/`` (to continue from), ``completions/``
(tables of text with rewards), ``history.csv``, ``timings.csv``, ``metrics.json``, ``samples.json`` and a model card.
"""

from __future__ import annotations

import copy
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

from grade.errors import InputError
from grade.files import atomic, write_json, write_manifest, write_text, writing
from grade.gradients.methods import AUTO
from grade.models.adapter import ADAPTER_FILES, BASE_FILE
from grade.results import is_timed, peak_memory, write_history, write_results
from grade.stats import Estimate
from grade.training.card import run_card
from grade.training.evaluate import Evaluation
from grade.training.folder import OPTIMIZER_FILE, Resume, RunFolder, whole_checkpoints
from grade.training.load import Prompts, Task, load_task
from grade.training.logs import Lines, history_rows
from grade.training.trainer import GradeTrainer

if TYPE_CHECKING:
    from grade.models.backbone import Backbone
    from grade.training.config import TrainConfig

UNSAVED = {"save_strategy": "no", "load_best_model_at_end": False}
"""Settings where there are no checkpoints."""
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
    received: int | None = None  # the signal that came while it trained, perhaps in its last step
    interrupted: bool = False  # whether that stopped it before its end
    step: int = 0  # the last step
    kept: int = 0  # the step whose policy is the result: the last, or the best one
    method: str = ""  # the method that trained, which `auto` chose if the settings say so
    chosen: dict[str, str] = field(default_factory=dict)  # what was chosen in the run, and why


def train(
    config: TrainConfig, log: Callable[[str], None] | None = print, resume: Resume = "no",
    overwrite: bool = False,
) -> RunResult | None:  # fmt: skip
    """Train one policy, or continue an interrupted run, and write its files to ``config.output_dir``.

    Args:
        config: The run.
        log: Receives one line per row of the log; None: a progress bar.
        resume: ``no``; ``yes``: continue, which needs the same settings and data; ``auto``: continue if settings, data
            and code are the same, otherwise start over.
        overwrite: Start over where there is an interrupted run.

    Returns:
        History and evaluations; None if the run had finished before, and was left as it is.

    Raises:
        InputError: For bad input, or a reward or loss that is not finite; the last checkpoint stands.
    """
    main, folder = config.process_index == 0, RunFolder(config)
    with folder.locked() if main else nullcontext():
        begin = [folder.start(resume, overwrite) if main else None]
        if config.world_size > 1:
            broadcast_object_list(begin)
        begin = begin[0]
        if begin == "finished":
            return None
        task = load_task(config, config.device)
        if config.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1 if task.backbone.hidden_size < SMALLEST_WIDTH else os.cpu_count() or 1)
        if main:
            folder.begin(resumed=begin is not None)
        if config.trackers:
            folder.continue_trackers(begin is not None)
        try:
            result = run_training(config, task, log, Path(config.output_dir), begin)
            if main and not result.interrupted:
                write_run(config.output_dir, config, task, result)
                folder.finish()
        except InputError:
            if main:
                folder.forget()
            raise
    return result


def run_training(
    config: TrainConfig, task: Task, log: Callable[[str], None] | None = None, output_dir: Path | None = None,
    checkpoint: Path | None = None,
) -> RunResult:  # fmt: skip
    """Evaluate, train from the beginning or a checkpoint, evaluate again.

    ``log`` receives one line per row of the log. Without ``output_dir`` no checkpoints and tables of text are written.
    """
    with tempfile.TemporaryDirectory() if output_dir is None else nullcontext(str(output_dir)) as place:
        saved = {} if output_dir else UNSAVED
        own_lines = log is None and output_dir is not None
        trainer = _trainer(config, task, task.train_prompts, place, disable_tqdm=not own_lines, **saved)
        if not own_lines:
            trainer.remove_callback(Lines)
        if log is not None:
            trainer.add_callback(Lines(trainer.evaluations, log))
        stop = _StopOnSignal(trainer)
        if output_dir is not None:
            trainer.add_callback(stop)
        try:
            trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        finally:
            stop.restore()
        state = trainer.state
        result = RunResult(
            history_rows(state.log_history), seconds=trainer.seconds, step=state.global_step, kept=trainer.kept_step,
            method=trainer.args.method, chosen=trainer.chosen, evaluations=trainer.evaluations, received=stop.received,
            interrupted=stop.received is not None and state.global_step < state.max_steps,
        )  # fmt: skip
        if not result.interrupted and trainer.eval_dataset is not None:
            result.before, result.after = trainer.saved_ends()
        return result


def evaluate_task(config: TrainConfig, task: Task, n: int) -> Evaluation:
    """Evaluate a task's policy on its first n held-out prompts, as its training run does."""
    with tempfile.TemporaryDirectory() as place:
        quiet = UNSAVED | {"disable_tqdm": True, "report_to": []}
        trainer = _trainer(config, task, [], place, final_eval_prompts=n, **quiet)
        trainer.remove_callback(Lines)
        trainer.evaluate()
    return trainer.evaluations[0]


def _trainer(config: TrainConfig, task: Task, prompts: Prompts, output_dir: str, **changes: Any) -> GradeTrainer:
    args = copy.copy(config)
    for name, value in ({"output_dir": output_dir} | changes).items():
        setattr(args, name, value)
    train, held_out = (
        [{"prompt": p} for p in given] if len(given) and isinstance(given[0], str) else given or None
        for given in (prompts, task.validation_prompts)
    )
    texts = config.texts or None if train else None  # an evaluation reads none
    return GradeTrainer(task.backbone, task.reward_model, args, train, held_out, judge=task.judge, texts=texts)


def write_run(output_dir: str | Path, config: TrainConfig, task: Task, result: RunResult) -> None:
    """Write a finished run's files beside its checkpoints; its earlier results are replaced."""
    output, name = Path(output_dir), Path(config.output_dir).resolve().name
    others = {path.name: path for path in whole_checkpoints(output)}
    own, lora = others.pop(f"checkpoint-{result.kept}", None), task.backbone.peft.active_peft_config
    outcome = lora, result.before, result.after, result.method, result.step, result.chosen
    with writing(output, "output_dir"):
        with atomic(output / "adapter") as adapter:
            task.backbone.save_adapter(adapter)
            if own is not None:
                _copy(own, adapter, [OPTIMIZER_FILE])
            write_manifest(adapter)
            card = run_card(config, f"{name}/adapter", ".", *outcome)  # over PEFT's empty one
            (adapter / "README.md").write_text(card, encoding="utf-8")
        with atomic(output / "checkpoints") as checkpoints:
            checkpoints.mkdir()
            for other in others.values():
                kept = checkpoints / f"step-{other.name.removeprefix('checkpoint-')}"
                _copy(other, kept, [*ADAPTER_FILES, BASE_FILE, OPTIMIZER_FILE])
                write_manifest(kept)
        for file, timed in (("history.csv", False), ("timings.csv", True)):
            parts = [{k: v for k, v in row.items() if k == "step" or is_timed(k) == timed} for row in result.history]
            write_history(output / file, parts)
        write_json(output / "samples.json", _samples(config, result))
        write_results(output / "metrics.json", run_metrics(config, result, task.backbone))
        write_text(output / "README.md", run_card(config, name, "adapter", *outcome))


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
            if np.isfinite(difference).all():
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
            for part in ("reward", "gold"):
                if np.isfinite(value := getattr(evaluation, part)[i]):
                    text[f"{name}_{part}"] = round(float(value), 4)
        texts.append(text)
    return texts


class _StopOnSignal(TrainerCallback):
    """SIGTERM or SIGINT: finish the step, write a checkpoint, stop. A second SIGINT stops at once."""

    def __init__(self, trainer: GradeTrainer) -> None:
        self.trainer, self.received = trainer, None
        self._before: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            self._before = {number: signal.signal(number, self._on) for number in (signal.SIGTERM, signal.SIGINT)}

    def _on(self, number: int, frame: Any) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Processes hear of it at different times; all must stop after the same step.
        accelerator = self.trainer.accelerator
        flag = torch.tensor(int(self.received is not None), device=accelerator.device)
        if accelerator.reduce(flag, reduction="sum"):
            self.received = self.received or signal.SIGTERM
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # The Trainer's loop ends here, within a pass or not.
        if self.received is not None and not self.trainer.ends_pass(state.global_step):
            control.should_log = control.should_evaluate = False

    def restore(self) -> None:
        """Put the handlers back that were there before training."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
