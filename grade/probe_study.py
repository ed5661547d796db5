"""The entropy probe on a real policy: predicted against true change over step sizes and over training steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from pydantic import Field

from grade.adapter import LoraSettings
from grade.arithmetic import Problems
from grade.backbone import Backbone
from grade.checkpoint import OPTIMIZER_FILE, load_optimizer
from grade.engines.base import RewardScope
from grade.entropy.forward import directional
from grade.entropy.functional import scores_at
from grade.entropy.probe import EntropyProbe
from grade.entropy.relaxed import reward_gradient
from grade.entropy.report import ProbeReport
from grade.entropy.samples import Samples
from grade.entropy.settings import ProbeConfig
from grade.entropy.snis import prefix_change
from grade.errors import InputError
from grade.evaluate import score
from grade.prompts import PromptBatch, encode_prompts, prompt_text
from grade.results import Estimate
from grade.reviews import load_reviews
from grade.reward import load_reward
from grade.toy import toy_task
from grade.train_config import TrainConfig


class ProbeRunConfig(ProbeConfig):
    """A probe, and the policy, task and optimizer that it is run on."""

    backbone: str = Field("models/backbone", description="folder or Hugging Face id of the base model")
    dtype: Literal["float32", "bfloat16", "float64"] = Field(
        "float32", description="type of the base; small steps drown in the rounding of narrow ones"
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="where to run")
    lora: LoraSettings = Field(LoraSettings(), description="the adapter, if none is given")
    task: Literal["reviews", "arithmetic"] = Field(
        "reviews", description="reviews and a reward model, or sums and a verifier (extra: arithmetic)"
    )
    reward: str = Field("models/reward/bag", description="folder of a trained reward model (task reviews)")
    reward_scope: RewardScope = Field("prompt_and_completion", description="what the reward scores")
    reviews: str = Field("data/reviews", description="folder of the review splits")
    max_prompt_tokens: int = Field(12, ge=1, description="prompts are cut to this many tokens, P")
    learning_rate: float = Field(2e-3, gt=0, description="AdamW learning rate, over a saved state's own")
    weight_decay: float = Field(0.0, ge=0, description="AdamW weight decay")
    follow: list[str] = Field(
        [], description="YAML files of a training run: the update follows its relaxed loss, not a policy gradient"
    )


def probe_task(config: ProbeRunConfig, policy: Backbone) -> tuple[PromptBatch, dict[str, Any]]:
    """Prompts, and what the update follows.

    Args:
        config: Names of the files.
        policy: Its tokenizer and embeddings are used.

    Returns:
        Prompts of both batches, and the other arguments of `EntropyProbe.run`.
    """
    number = config.batch_config.B * (1 if config.probe_config.one_batch else 2)
    if config.task == "arithmetic":
        problems = Problems.make(number, config.seed)
        prompts = problems.prompts(policy.tokenizer, config.max_prompt_tokens)
        return prompts, {"reward": lambda p, ids, mask: problems.reward(policy.tokenizer, p, ids, mask)}
    texts = [prompt_text(r.text) for r in load_reviews(config.reviews, "validation")][:number]
    prompts = encode_prompts(policy.tokenizer, texts, config.max_prompt_tokens)
    reward_model = load_reward(config.reward, policy).to(policy.device)
    if config.follow:
        return prompts, {"gradient": reward_gradient(policy, reward_model, TrainConfig.load(config.follow))}
    return prompts, {
        "reward": lambda p, ids, mask: score(reward_model, policy, p, ids, mask, config.reward_scope)
    }  # fmt: skip


def checkpoints(run_dir: str | Path) -> dict[int, Path | None]:
    """The adapters that a run kept, by step: none (a new one) at step 0, its checkpoints, the trained one.

    Args:
        run_dir: Folder of a run, as written by training.

    Returns:
        Step to folder.

    Raises:
        InputError: If the run has no trained adapter with its optimizer's state.
    """
    run = Path(run_dir)
    if not (run / "adapter" / OPTIMIZER_FILE).is_file():
        raise InputError("run_dir", str(run_dir), f"a run with adapter/{OPTIMIZER_FILE}, as written by training")
    found: dict[int, Path | None] = {0: None}
    found |= {int(folder.name.removeprefix("step-")): folder for folder in (run / "checkpoints").glob("step-*")}
    state = torch.load(run / "adapter" / OPTIMIZER_FILE, weights_only=True)["state"]
    found[int(state[0]["step"])] = run / "adapter"
    return dict(sorted(found.items()))


def make_optimizer(config: ProbeRunConfig, policy: Backbone, state: str | Path | None) -> torch.optim.AdamW:
    """AdamW of the policy's adapter, with the config's learning rate and weight decay.

    Args:
        config: Settings.
        policy: The policy.
        state: A saved state; None: it has not stepped yet.

    Returns:
        The optimizer.
    """
    optimizer = torch.optim.AdamW(policy.trainable_parameters())
    if state is not None:
        load_optimizer(optimizer, state)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = config.learning_rate, config.weight_decay
    return optimizer


def probe_adapter(config: ProbeRunConfig, folder: str | Path | None, state: str | Path | None = None) -> ProbeReport:
    """One probe of an adapter and its optimizer.

    Args:
        config: Settings.
        folder: The adapter; None: a new one.
        state: The optimizer's state; None: what is saved with the adapter, if anything.

    Returns:
        The report.
    """
    policy = Backbone.load(config.backbone, config.dtype, None if folder else config.lora, folder, config.device)
    if state is None and folder and (Path(folder) / OPTIMIZER_FILE).is_file():
        state = Path(folder) / OPTIMIZER_FILE
    prompts, update = probe_task(config, policy)
    optimizer = make_optimizer(config, policy, state)
    return EntropyProbe(policy, optimizer, config, allow_fresh=state is None).run(prompts, **update)


def toy_report(config: ProbeRunConfig, dtype: str = "float32") -> tuple[ProbeReport, Backbone]:
    """A probe of the toy task, for want of a trained run.

    Args:
        config: Settings of the probe; its files are not used.
        dtype: Type of the base.

    Returns:
        The report and its policy.
    """
    task = toy_task(dtype=dtype)
    optimizer = make_optimizer(config, task.backbone, None)
    prompts = encode_prompts(task.backbone.tokenizer, task.validation_prompts[: 2 * config.batch_config.B], 8)
    probe = EntropyProbe(task.backbone, optimizer, config, allow_fresh=True)
    report = probe.run(
        prompts, lambda p, ids, mask: score(task.reward_model, task.backbone, p, ids, mask, "prompt_and_completion")
    )
    return report, task.backbone


def sweep_table(reports: dict[int, ProbeReport], learning_rate: float) -> pd.DataFrame:
    """Every step size of every report.

    Args:
        reports: Training step to report.
        learning_rate: Which a multiple of 1 stands for.

    Returns:
        Columns ``step``, ``learning_rate`` and those of `ProbeReport.sweep`.
    """
    rows = [{"step": step, "learning_rate": learning_rate * row["multiple"], **row}
            for step, report in reports.items() for row in report.sweep]  # fmt: skip
    return pd.DataFrame(rows)


def precision_table(
    policies: dict[str, Backbone], samples: Samples, step: torch.Tensor, multiples: Sequence[float]
) -> pd.DataFrame:
    """True and predicted change of the same step on the same samples, in several types of the base.

    Args:
        policies: The same policy by the name of its type; the first is the reference that predicts.
        samples: Completions.
        step: ``delta theta`` [P].
        multiples: Step sizes.

    Returns:
        Columns dtype, multiple, predicted, delta_h, delta_h_stderr.
    """
    predicted = float(directional(next(iter(policies.values())), samples, step).per_sequence().mean())
    rows = []
    for name, policy in policies.items():
        old = scores_at(policy, samples)
        for multiple in multiples:
            new = scores_at(policy, samples, step, multiple)
            change = Estimate.of(prefix_change(old.logps, new.logps, old.entropies, new.entropies).mean(1))
            rows.append({"dtype": name, "multiple": multiple, "predicted": multiple * predicted,
                         "delta_h": change.mean, "delta_h_stderr": change.stderr})  # fmt: skip
    return pd.DataFrame(rows)
