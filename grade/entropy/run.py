"""A probe from a config: of a trained adapter, with its optimizer's state and its reward."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field

from grade.config_files import load_config
from grade.data.reviews import load_reviews, prompt_text
from grade.entropy.probe import EntropyProbe, Gradient, ProbeConfig, ProbeReport
from grade.errors import InputError
from grade.gradients.methods import Rate
from grade.gradients.objective import Objective
from grade.memory.settings import Device, require_device
from grade.models.adapter import ADAPTER_WEIGHTS, LoraSettings
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch, encode_examples, encode_prompts
from grade.models.token_bias import BIAS_FILE
from grade.rewards.functions import FunctionReward
from grade.rewards.model import RewardModel, load_reward
from grade.training.checkpoint import OPTIMIZER_FILE
from grade.training.config import TrainConfig

_EXAMPLES = "2 + 3 = 5\n7 - 4 = 3\n6 + 1 = 7\n"
"""Shown before each problem of the task arithmetic: a base model completes what it sees."""


def _reward_gradient(policy: Backbone, reward_model: RewardModel, config: TrainConfig) -> Gradient:
    """A function that leaves the gradient of a run's loss in ``.grad``, from prompts and a generator.

    With the run's method, KL weight, microbatch size and relaxation.
    """
    if not config.relaxed:
        raise InputError("method", config.method, "one that relaxes tokens; without follow it is a policy gradient")
    engine, relaxation = config.engine(), config.relaxation()
    objective = Objective(reward_model, config.beta, config.reward_scope)

    def run(prompts: PromptBatch, generator: torch.Generator) -> None:
        for start in range(0, len(prompts), config.per_device_train_batch_size):
            rows = slice(start, start + config.per_device_train_batch_size)
            part = prompts[rows]
            engine(policy, part, objective, relaxation, generator, len(part) / len(prompts))

    return run


class ProbeRunConfig(ProbeConfig):
    """A probe, and the policy, task and optimizer that it is run on."""

    backbone: str = Field("models/backbone", description="folder or Hugging Face id of the base model")
    device: Device = Field("cpu", description="where to run")
    task: Literal["reviews", "arithmetic"] = Field(
        "reviews", description="reviews and a reward model, or sums, whose answers are checked (extra: arithmetic)"
    )
    reward: str = Field("models/reward/backbone/bag", description="folder of a trained reward model (task reviews)")
    reviews: str = Field("data/reviews", description="folder of the review splits")
    max_prompt_tokens: int = Field(12, ge=1, description="prompts are cut to this many tokens, P")
    learning_rate: Rate = Field(2e-3, description="AdamW learning rate, over a saved state's own")
    follow: list[str] = Field(
        [], description="YAML files of a training run: the update follows its relaxed loss, not a policy gradient"
    )


def _probe_task(config: ProbeRunConfig, policy: Backbone) -> tuple[PromptBatch, dict[str, Any]]:
    """Prompts of both batches, and the other arguments of `EntropyProbe.run`."""
    number = 2 * config.batch_config.B
    if config.task == "arithmetic":
        prompts, reward = _sums(number, config.seed, policy, config.max_prompt_tokens)
        return prompts, {"reward": partial(reward.score, policy)}
    texts = [prompt_text(r.text) for r in load_reviews(config.reviews, "validation")][:number]
    prompts = encode_prompts(policy.tokenizer, texts, config.max_prompt_tokens)
    reward_model = load_reward(config.reward, policy).to(policy.device)
    if config.follow:
        return prompts, {"gradient": _reward_gradient(policy, reward_model, load_config(TrainConfig, config.follow))}
    return prompts, {"reward": partial(Objective(reward_model).score, policy)}


def _sums(number: int, seed: int, policy: Backbone, most: int) -> tuple[PromptBatch, FunctionReward]:
    """Sums and differences of two digits, after worked examples; 1 where a completion's first number is the answer.

    Problems and the check of answers are reasoning-gym's (Stojanovski et al. 2025, arXiv:2505.24760).
    """
    import reasoning_gym  # the extra: arithmetic

    problems = reasoning_gym.create_dataset(
        "chain_sum", size=number, seed=seed, min_terms=2, max_terms=2, min_digits=1, max_digits=1
    )
    rows = [{"entry": entry, "prompt": f"{_EXAMPLES}{entry['metadata']['expression']} ="} for entry in problems]

    def verified(completions: Sequence[str], entry: Sequence[dict[str, Any]], **_: Any) -> list[float]:
        found = [re.search(r"-?\d+", text) for text in completions]
        pairs = zip(found, entry, strict=True)
        return [float(problems.score_answer(match and match[0], problem) == 1) for match, problem in pairs]

    return encode_examples(policy.tokenizer, rows, most, warn_raw=False), FunctionReward(verified)


def make_optimizer(config: ProbeRunConfig, policy: Backbone, state: str | Path | None) -> torch.optim.AdamW:
    """AdamW of the policy's adapter, with the config's learning rate; from a saved state, if given.

    `InputError`, with the file's name, where that is no state of this optimizer.
    """
    optimizer = torch.optim.AdamW(policy.trainable_parameters(), weight_decay=0.0)
    if state is not None:
        try:
            optimizer.load_state_dict(torch.load(state, weights_only=True))
        except Exception as error:  # torch's own names no file, and advises against weights_only
            allowed = f"AdamW's of this adapter, as torch saves it ({type(error).__name__})"
            raise InputError("optimizer state", str(state), allowed) from error
        for p, values in optimizer.state.items():  # torch would broadcast moments of another shape
            for name, value in values.items():
                if name != "step" and value.shape != p.shape:
                    shapes = f"{name} has shape {list(value.shape)}, its parameter {list(p.shape)}"
                    raise InputError("optimizer state", str(state), f"AdamW's of this adapter: {shapes}")
    for group in optimizer.param_groups:
        group["lr"] = config.learning_rate
    return optimizer


def asked_of(config: ProbeRunConfig, folder: str | Path | None, state: str | Path | None = None) -> dict[str, Any]:
    """What a report is of, as plain values: the settings, and the adapter by a hash of its weights and token bias."""
    files = [Path(folder) / name for name in (ADAPTER_WEIGHTS, BIAS_FILE)] if folder else []
    weights = b"".join(file.read_bytes() for file in files if file.is_file())
    digest = hashlib.sha256(weights).hexdigest() if folder else None
    return {"config": config.model_dump(mode="json"), "adapter_sha256": digest, "optimizer_state": state and str(state)}


def probe_adapter(config: ProbeRunConfig, folder: str | Path | None, state: str | Path | None = None) -> ProbeReport:
    """Probe an adapter (None: a new one) and its optimizer.

    ``state`` is a file with the optimizer's state; None: the one saved with the adapter, if there is one.
    """
    require_device(config.device)
    policy = Backbone.load(config.backbone, "float32", None if folder else LoraSettings(), folder, config.device)
    if state is None and folder and (Path(folder) / OPTIMIZER_FILE).exists():
        state = Path(folder) / OPTIMIZER_FILE
    prompts, update = _probe_task(config, policy)
    optimizer = make_optimizer(config, policy, state)
    return EntropyProbe(policy, optimizer, config).run(prompts, **update)
