"""The training loop: prompts in, adapter and results out.

One optimizer step is `gradient_accumulation_steps` microbatches of `batch_size` completions on each process; every
microbatch adds ``1/N`` of its gradient, so N of them give the gradient of the whole batch (losses are means over
sequences, see `grade.gradients.objective`). With several passes or minibatches (ppo, grpo) a step samples once and
updates several times. A microbatch's noise is seeded by its place in the step, not by the process that runs it: with
Accelerate, two processes give the gradients of one process with both batches.

Accelerate provides devices, processes and trackers. Only the adapter's gradients are averaged over processes; the base
is replicated. Left out: sharding the base, resuming a run.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from grade.errors import InputError
from grade.gradients.engines import make_engine
from grade.gradients.estimators import tau_at
from grade.gradients.methods import RELAXED
from grade.gradients.objective import Objective, sequence_mean
from grade.gradients.policy_gradient import PolicyGradient, StepContext
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch, encode_prompts
from grade.results import is_timed, peak_memory, write_history, write_results
from grade.stats import Estimate
from grade.training.checkpoint import Checkpoint
from grade.training.config import TrainConfig
from grade.training.evaluate import Evaluation, evaluate
from grade.training.load import load_task
from grade.training.task import Task
from grade.training.threads import use_fastest_threads


@dataclass
class RunResult:
    """Results of a run; `train` writes them to files.

    Attributes:
        history: One row per optimizer step, with its evaluation if there is one.
        before: Evaluation of the untrained policy.
        after: Evaluation of the trained policy.
        seconds: Training time without evaluations.
        checkpoints: Adapter and optimizer state by step, the last step's included.
    """

    history: list[dict[str, Any]] = field(default_factory=list)
    before: Evaluation | None = None
    after: Evaluation | None = None
    seconds: float = 0.0
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)


def train(config: TrainConfig, output_dir: str | Path, log: Callable[[str], None] = print) -> RunResult:
    """Train one policy and write ``adapter/``, ``checkpoints/``, ``history.csv``, ``metrics.json``, ``samples.json``.

    Results appear in ``output_dir`` only when the run is complete.

    Args:
        config: The run.
        output_dir: Target folder.
        log: Receives one line per step.

    Returns:
        History and evaluations.

    Raises:
        InputError: For bad input, or a reward or loss that is not finite; nothing is written then.
    """
    accelerator = Accelerator(cpu=config.device == "cpu", log_with=config.trackers or None, project_dir=str(output_dir))
    if config.device == "cuda" and accelerator.device.type != "cuda":
        raise InputError("device", "cuda", "cpu: this machine has no CUDA device")
    set_seed(config.seed)
    task = load_task(config, accelerator.device)
    if accelerator.device.type == "cpu":
        use_fastest_threads(task.backbone.hidden_size)
    if config.trackers:
        accelerator.init_trackers("grade", config=_flat(config.model_dump()))
    result = run_training(config, task, accelerator, log if accelerator.is_main_process else _silent)
    if accelerator.is_main_process:
        write_run(output_dir, config, task, result)
    accelerator.end_training()
    return result


def run_training(config: TrainConfig, task: Task, accelerator: Accelerator, log: Callable[[str], None]) -> RunResult:
    """Evaluate, train, evaluate again.

    Args:
        config: The run.
        task: What to train.
        accelerator: Device and processes.
        log: Receives one line per step.

    Returns:
        History and evaluations.
    """
    backbone, result = task.backbone, RunResult()
    learner = None if config.relaxed else PolicyGradient(config, backbone)
    groups: list[dict[str, Any]] = [{"params": backbone.trainable_parameters()}]
    if learner and learner.parameters():
        groups.append({"params": learner.parameters(), "lr": config.value_learning_rate})
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, weight_decay=config.weight_decay)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / (config.warmup_steps + 1)))
    prompts = _prompt_stream(config, task, accelerator)
    result.before = _evaluate(config, task, config.final_eval_prompts)
    result.history.append({"step": 0, "samples": 0, "seconds": 0.0, **_subset(config, result.before).metrics()})
    log(_line(config, result.history[-1]))
    for step in range(1, config.max_steps + 1):
        start = time.perf_counter()
        row = _optimizer_step(config, task, accelerator, optimizer, prompts, step, learner)
        warmup.step()
        row["train/seconds"] = time.perf_counter() - start
        result.seconds += row["train/seconds"]
        if step == config.max_steps or (config.checkpoint_every and step % config.checkpoint_every == 0):
            result.checkpoints[step] = Checkpoint.of(backbone, optimizer)
        samples = step * config.batch_completions * config.gradient_accumulation_steps * accelerator.num_processes
        row = {"step": step, "samples": samples, "seconds": result.seconds, **row}
        if step == config.max_steps:
            result.after = _evaluate(config, task, config.final_eval_prompts)
            row |= _subset(config, result.after).metrics()
        elif config.eval_every and step % config.eval_every == 0:
            row |= _evaluate(config, task, config.eval_prompts).metrics()
        result.history.append(row)
        if config.trackers:
            accelerator.log({k: v for k, v in row.items() if k != "step" and v is not None}, step=step)
        log(_line(config, row))
    return result


def _optimizer_step(
    config: TrainConfig, task: Task, accelerator: Accelerator, optimizer: torch.optim.Optimizer,
    prompts: Iterator[PromptBatch], step: int, learner: PolicyGradient | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Sample, accumulate and update; returns the row of metrics."""
    objective = Objective(task.reward_model, config.kl_coef, config.reward_scope)
    local, total = config.gradient_accumulation_steps, config.gradient_accumulation_steps * accelerator.num_processes
    norms: list[float] = []
    optimizer.zero_grad(set_to_none=True)

    def microbatches() -> Iterator[tuple[PromptBatch, torch.Generator]]:
        for i in range(local):
            place = accelerator.process_index * local + i
            seed = np.random.SeedSequence([config.seed, step, place]).generate_state(1, np.uint64)[0]
            yield next(prompts), torch.Generator(task.backbone.device).manual_seed(int(seed >> 1))

    def apply() -> None:
        norms.append(_apply(accelerator, optimizer, config.max_grad_norm, step))

    tau, extra = None, {}
    if config.relaxed:
        engine_name = RELAXED[config.method].engine
        engine = make_engine(engine_name, config.hops, config.hop_tolerance, config.gradient_checkpointing)
        tau = tau_at(step - 1, config.tau_start, config.tau_end, config.tau_anneal_steps)
        relaxation = config.relaxation(tau)
        parts = [engine(task.backbone, p, objective, relaxation, g, 1 / total) for p, g in microbatches()]
        apply()
    else:
        learner = learner or PolicyGradient(config, task.backbone)
        parts = learner.step(microbatches(), objective, StepContext(total, apply, partial(_sum, accelerator)))
        extra = {f"train/{name}": _mean(accelerator, values) for name, values in learner.figures.items()}
    residuals = [float(p.residual) for p in parts if p.residual is not None]
    return {
        "train/reward": _mean(accelerator, [p.reward.mean() for p in parts]),
        "train/kl": _mean(accelerator, [sequence_mean(p.kl, p.completion_mask).mean() for p in parts]),
        "train/loss": _mean(accelerator, [p.loss for p in parts]),
        "train/tau": tau,
        "train/grad_norm": float(np.mean(norms)),
        "train/residual": float(np.mean(residuals)) if residuals else None,
        "train/length": _mean(accelerator, [p.completion_mask.sum(-1).double().mean() for p in parts]),
        "train/learning_rate": optimizer.param_groups[0]["lr"],
        **extra,
    }


def _apply(accelerator: Accelerator, optimizer: torch.optim.Optimizer, max_grad_norm: float, step: int) -> float:
    """Sum over processes, clip each group of parameters, step; the policy's norm."""
    norms = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = _sum(accelerator, p.grad)
        norms.append(torch.nn.utils.clip_grad_norm_(group["params"], max_grad_norm))
        if not torch.isfinite(norms[-1]):
            raise InputError("gradient norm", float(norms[-1]), f"a finite number; step {step} was not taken")
    optimizer.step()
    return float(norms[0])


def _sum(accelerator: Accelerator, value: torch.Tensor) -> torch.Tensor:
    return accelerator.reduce(value, reduction="sum") if accelerator.num_processes > 1 else value


def _mean(accelerator: Accelerator, values: list[torch.Tensor]) -> float:
    mean = torch.stack([v.detach().float() for v in values]).mean()
    return float(accelerator.reduce(mean, reduction="mean")) if accelerator.num_processes > 1 else float(mean)


def _prompt_stream(config: TrainConfig, task: Task, accelerator: Accelerator) -> Iterator[PromptBatch]:
    """Microbatches of this process: shuffled passes over the prompts, dealt out in order of place in the step."""
    rng = np.random.default_rng([config.seed, 1])
    local, total = config.gradient_accumulation_steps, config.gradient_accumulation_steps * accelerator.num_processes
    order: list[int] = []
    while True:
        while len(order) < total * config.batch_prompts:
            order += rng.permutation(len(task.train_prompts)).tolist()
        step, order = order[: total * config.batch_prompts], order[total * config.batch_prompts :]
        for place in range(accelerator.process_index * local, (accelerator.process_index + 1) * local):
            rows = step[place * config.batch_prompts : (place + 1) * config.batch_prompts]
            texts = [task.train_prompts[row] for row in rows]
            yield encode_prompts(task.backbone.tokenizer, texts, config.max_prompt_tokens).to(task.backbone.device)


def _evaluate(config: TrainConfig, task: Task, n: int) -> Evaluation:
    return evaluate(
        task.backbone, task.validation_prompts[:n], task.reward_model, task.judge,
        max_new_tokens=config.max_new_tokens, max_prompt_tokens=config.max_prompt_tokens,
        min_new_tokens=config.min_new_tokens, scope=config.reward_scope, batch_size=config.eval_batch_size,
        kl_prompts=config.kl_eval_prompts,
    )  # fmt: skip


def _subset(config: TrainConfig, evaluation: Evaluation) -> Evaluation:
    """The first prompts of a large evaluation, so that one curve has one n (the noise of a batch is the same)."""
    n = config.eval_prompts
    parts = (evaluation.prompts[:n], evaluation.completions[:n], evaluation.reward[:n], evaluation.gold[:n])
    return Evaluation(*parts, evaluation.kl, evaluation.kl_max)


def write_run(output_dir: str | Path, config: TrainConfig, task: Task, result: RunResult) -> None:
    """Write a run's files beside ``output_dir`` and move them in when all are complete.

    Args:
        output_dir: Target folder; its earlier results are replaced.
        config: The run.
        task: Holds the adapter.
        result: The run's results.
    """
    output = Path(output_dir)
    staging = output.with_name(output.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    for step, checkpoint in result.checkpoints.items():
        last = step == config.max_steps
        checkpoint.save(task.backbone, staging / ("adapter" if last else f"checkpoints/step-{step}"))
    (staging / "checkpoints").mkdir(exist_ok=True)
    for file, timed in (("history.csv", False), ("timings.csv", True)):
        rows = [{k: v for k, v in row.items() if k == "step" or is_timed(k) == timed} for row in result.history]
        write_history(staging / file, rows)
    write_results(staging / "metrics.json", run_metrics(config, result, task.backbone))
    (staging / "samples.json").write_text(json.dumps(_samples(config, result), indent=1) + "\n", encoding="utf-8")
    output.mkdir(parents=True, exist_ok=True)
    for item in staging.iterdir():
        target = output / item.name
        if target.is_dir():
            shutil.rmtree(target)
        item.replace(target)
    staging.rmdir()


def run_metrics(config: TrainConfig, result: RunResult, backbone: Backbone) -> dict[str, Any]:
    """Flat metrics of a finished run: before, after, and the paired gain with its standard error.

    Args:
        config: The run.
        result: The run's results.
        backbone: For device and type.

    Returns:
        Metric names to values.
    """
    before, after = result.before, result.after
    flat: dict[str, Any] = {f"before/{k}": v for k, v in before.metrics().items()}
    flat |= {f"after/{k}": v for k, v in after.metrics().items()}
    for name in ("reward", "gold"):
        difference = getattr(after, name) - getattr(before, name)
        if np.isfinite(difference).all():
            gain = Estimate.of(difference)
            flat |= {f"gain/{name}": gain.mean, f"gain/{name}_stderr": gain.stderr, f"gain/{name}_n": gain.n}
    last = result.history[-1]
    steps = len(result.history) - 1
    return flat | {
        "before/val/kl_max": before.kl_max,
        "method": config.method,
        "seed": config.seed,
        "steps": steps,
        "samples": last["samples"],
        "seconds": result.seconds,
        "seconds_per_step": result.seconds / steps,
        "peak_memory_bytes": peak_memory(backbone.device),
        "dtype": config.dtype,
    }


def _samples(config: TrainConfig, result: RunResult) -> list[dict[str, Any]]:
    rows = []
    for i in range(min(config.samples, len(result.before.prompts))):
        row: dict[str, Any] = {"prompt": result.before.prompts[i]}
        for name, evaluation in (("before", result.before), ("after", result.after)):
            row[name] = evaluation.completions[i]
            row[f"{name}_reward"] = round(float(evaluation.reward[i]), 4)
            if np.isfinite(evaluation.gold[i]):
                row[f"{name}_gold"] = round(float(evaluation.gold[i]), 4)
        rows.append(row)
    return rows


def _line(config: TrainConfig, row: dict[str, Any]) -> str:
    names = ("train/reward", "train/kl", "train/grad_norm", "val/reward_mean", "val/gold_mean", "val/kl")
    figures = "  ".join(f"{name} {row[name]:.4g}" for name in names if row.get(name) is not None)
    return f"step {row['step']:>4}/{config.max_steps}  {row['seconds']:7.1f} s  {figures}"


def _silent(_: str) -> None:
    pass


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return flat
