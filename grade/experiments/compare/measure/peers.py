"""A peer on the same task: TRL's GRPOTrainer, with this project's model, prompts, reward, evaluation and sizes.

Its code path is its own (tokenising, generating with transformers, loss, optimizer loop); its arguments are in
`settings`. With ``black_box`` both trainers get the same reward function, of which only values can be seen. TRL is an
optional extra: ``pip install -e ".[peers]"``. Each contestant runs in a fresh process of one thread, so that seconds
and peak memory are its own; evaluations do not count.

What cannot be made equal: TRL estimates KL from the sampled token (k3) where ours is exact, and its advantages are of
the reward alone where ours are of the penalised return. Its loss is a mean over tokens where ours is a sum, so its
beta is ours divided by T (AdamW does not see the common factor).
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import pandas as pd
import torch
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from pydantic import Field, model_validator

from grade.config import SEEDS, Config
from grade.errors import InputError
from grade.experiments.compare.measure.runs import CURVES, Run, Shared, run_config, train_once
from grade.experiments.training_runs import FIXED, judged_by
from grade.gradients.methods import MethodName
from grade.gradients.objective import Objective
from grade.models.backbone import Backbone, load_pretrained
from grade.models.prompts import PromptBatch, encode_prompts
from grade.results import peak_memory
from grade.rewards.base import Reward
from grade.rewards.functions import FunctionReward
from grade.rewards.gold import GoldJudge
from grade.rewards.model import load_reward
from grade.training.config import TrainConfig
from grade.training.load import Task
from grade.training.run import evaluate_task

PEER = "trl_grpo"
SAME = (
    "learning_rate", "weight_decay", "max_grad_norm", "max_steps", "per_device_train_batch_size",
    "gradient_accumulation_steps", "max_completion_length", "temperature", "top_p", "top_k", "epsilon", "scale_rewards",
    "gradient_checkpointing", "bf16", "use_cpu", "seed",
)  # fmt: skip
"""Settings of `TrainConfig` that TRL's GRPOConfig has by the same name."""
MISSING = "the package trl, installed: pip install -e '.[peers]'"


class PeersConfig(Config):
    """The contest: folders, the run, and who takes part."""

    model: str = Field("models/tiny", description="folder of the base model")
    reward: str = Field(
        "models/reward/tiny/bag", description="folder of the reward model; with black_box also a judge's file (.npz)"
    )
    black_box: bool = Field(False, description="ours get the reward as a function too, of which only values are seen")
    gold: str = Field("models/gold/judge.npz", description="the gold judge; empty for none")
    reviews: str = Field("data/reviews", description="folder of the review splits")
    methods: list[MethodName] = Field(
        ["grpo", "ste"], min_length=1, description="ours; the first is the peer's match, the last is compared with it"
    )
    learning_rates: list[float] = Field([2e-3, 2e-3], min_length=1, description="of each; the peer has the first")
    beta: float = Field(0.1, ge=0, description="weight beta of KL, in reward per nat and token")
    seed: int = Field(0, ge=0, lt=SEEDS, description="seed of adapter, prompt order and noise")
    max_prompt_length: int = Field(12, ge=1, description="P")
    max_completion_length: int = Field(24, ge=1, description="T; completions have this length")
    gumbel_topk: int = Field(64, ge=0, description="size K of a relaxed token's support")
    per_device_train_batch_size: int = Field(32, ge=4, description="completions a step")
    max_steps: int = Field(40, ge=2, description="optimizer steps")
    eval_steps: int = Field(5, ge=1, description="evaluate every so many steps")
    eval_prompts: int = Field(256, ge=2, description="held-out prompts of an evaluation")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.methods[0] != "grpo":
            raise InputError("methods", self.methods, "grpo first: the peer's is that method")
        if len(self.methods) != len(self.learning_rates):
            raise InputError("learning_rates", self.learning_rates, f"one for each of {len(self.methods)} methods")
        if self.reward.endswith(".npz") and not self.black_box:
            raise InputError("black_box", False, f"true: a judge ({self.reward}) has no gradient")
        return self


@dataclass(frozen=True)
class BlackBox(Shared):
    """What all runs have in common; the reward is a function that TRL's trainer takes too.

    Attributes:
        reward_dir: Folder of a reward model, or the file of a judge.
    """

    def reward(self, backbone: Backbone) -> FunctionReward:
        """The function as a reward: `FunctionReward.function` is what the peer gets."""
        if self.reward_dir.endswith(".npz"):
            return FunctionReward(judged_by(GoldJudge.load(self.reward_dir)))
        lengths = (self.values["max_prompt_length"], self.values["max_completion_length"])
        return FunctionReward(scored_by(load_reward(self.reward_dir, backbone), backbone, *lengths))


def scored_by(reward: Reward, backbone: Backbone, prompt_length: int, length: int) -> Callable[..., list[float]]:
    """A reward of token ids as a function with TRL's signature.

    Args:
        reward: The reward.
        backbone: The policy.
        prompt_length: P, prompts are cut to so many tokens.
        length: T, the most tokens of a completion.
    """

    @torch.no_grad()
    def score(prompts: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        batch = encode_prompts(backbone.tokenizer, prompts, prompt_length)
        return Objective(reward).score(backbone, batch, *_padded(completion_ids, length)).tolist()

    return score


def have_peer() -> bool:
    """Whether TRL is installed."""
    return importlib.util.find_spec("trl") is not None


def settings(config: TrainConfig) -> dict[str, Any]:
    """Every setting that TRL's GRPOConfig is given, for a run of our `grpo`.

    Args:
        config: The run that it is compared with.

    Returns:
        Keyword arguments; all others keep TRL's defaults.
    """
    return {name: getattr(config, name) for name in SAME} | {
        "lr_scheduler_type": config.lr_scheduler_type.value,
        "num_generations": config.group,
        "num_iterations": config.passes,
        "generation_kwargs": {"min_new_tokens": config.min_completion_length},
        "beta": config.beta / config.max_completion_length,
        "loss_type": "grpo",
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def train_peer(shared: Shared, run: Run) -> list[dict[str, Any]]:
    """Train TRL's GRPOTrainer as `grade.experiments.compare.measure.runs.train_once` trains ours.

    Args:
        shared: Model, reward, judge, prompts, sizes.
        run: A run of ``grpo``.

    Returns:
        Rows of `CURVES`, the untrained policy first.

    Raises:
        InputError: If TRL is not installed.
    """
    if not have_peer():
        raise InputError("peer", PEER, MISSING)
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    config, task = run_config(run, shared.values), shared.task(run.seed)
    # A copy of the base: two adapters on one base would wrap each other's layers.
    model, tokenizer = load_pretrained(shared.backbone_dir, task.backbone.dtype)
    tokenizer.padding_side = "left"
    lora = LoraConfig(r=config.lora.r, lora_alpha=config.lora.alpha, lora_dropout=0.0,
                      target_modules=config.lora.target_modules, task_type="CAUSAL_LM")  # fmt: skip

    reward = task.reward_model
    if not isinstance(reward, FunctionReward):
        lengths = (config.max_prompt_length, config.max_completion_length)
        reward = FunctionReward(scored_by(reward, task.backbone, *lengths))

    rows, clock = [], {"seconds": 0.0, "start": 0.0}

    class Evaluator(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            clock["start"] = time.perf_counter()

        def on_step_end(self, args, state, control, model=None, **kwargs):
            clock["seconds"] += time.perf_counter() - clock["start"]
            if state.global_step % config.eval_steps == 0 or state.global_step == config.max_steps:
                set_peft_model_state_dict(task.backbone.peft, get_peft_model_state_dict(model))
                rows.append(_row(config, run, task, state.global_step, clock["seconds"]))

    # Named, because hashing the table's content fails with some versions of pyarrow.
    texts = [_cut(task, text, config.max_prompt_length) for text in task.train_prompts]
    prompts = InMemoryTable.from_pydict({"prompt": texts})
    dataset = Dataset(prompts, fingerprint="prompts")
    rows.append(_row(config, run, task, 0, 0.0))
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model, reward_funcs=reward.function, args=GRPOConfig(output_dir=folder, **settings(config)),
            train_dataset=dataset, processing_class=tokenizer, peft_config=lora,
            callbacks=[Evaluator()],
        )  # fmt: skip
        trainer.train()
    return rows


def _row(config: TrainConfig, run: Run, task: Task, step: int, seconds: float) -> dict[str, Any]:
    n = config.final_eval_prompts if step in (0, config.max_steps) else config.eval_prompts
    with torch.random.fork_rng(devices=[]):  # a Trainer seeds torch, whose generator the peer samples with
        evaluation = evaluate_task(config, task, n)
    m = config.eval_prompts  # one n for the whole curve, as in `grade.training.trainer`
    samples = step * config.per_device_train_batch_size * config.gradient_accumulation_steps
    values = (PEER, run.beta, run.seed, step, samples, seconds, evaluation.reward[:m].mean(),
              evaluation.gold[:m].mean(), evaluation.kl.mean() * config.max_completion_length)  # fmt: skip
    return dict(zip(CURVES, values, strict=True))


def _padded(rows: Sequence[Sequence[int]], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
    return ids, mask


def _cut(task: Task, text: str, max_prompt_tokens: int) -> str:
    batch: PromptBatch = encode_prompts(task.backbone.tokenizer, [text], max_prompt_tokens)
    return task.backbone.tokenizer.decode(batch.ids[0][batch.mask[0].bool()].tolist(), skip_special_tokens=True)


def compare_peers(config: PeersConfig) -> tuple[pd.DataFrame, pd.DataFrame, dict[str, Any]]:
    """Run the contest.

    Args:
        config: Folders, the run, and who takes part.

    Returns:
        `CURVES` of all runs, the costs of `contest`, and TRL's settings as metrics ``peer/settings/...``.

    Raises:
        InputError: If TRL is not installed, or something does not fit; nothing is run then.
    """
    if not have_peer():
        raise InputError("peer", PEER, MISSING)
    names = ("max_prompt_length", "max_completion_length", "gumbel_topk", "per_device_train_batch_size", "max_steps",
             "eval_steps", "eval_prompts")  # fmt: skip
    values = FIXED | {name: getattr(config, name) for name in names}
    values |= {"min_completion_length": config.max_completion_length, "final_eval_prompts": config.eval_prompts,
               "kl_eval_prompts": config.eval_prompts}  # fmt: skip
    kind = BlackBox if config.black_box else Shared
    shared = kind(config.model, config.reward, config.gold, config.reviews, values)
    pairs = zip(config.methods, config.learning_rates, strict=True)
    runs = [Run(method, config.beta, config.seed, rate) for method, rate in pairs]
    for run in runs:
        run_config(run, values)
    curves, costs = contest(shared, runs, runs[0])
    theirs = settings(run_config(runs[0], values)).items()
    return curves, costs, {f"peer/settings/{k}": v if isinstance(v, int | float) else str(v) for k, v in theirs}


def contest(shared: Shared, runs: Sequence[Run], peer_run: Run) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Our runs and the peer's, one after the other, each in a fresh process of one thread.

    Args:
        shared: What all have in common.
        runs: Ours.
        peer_run: The run of ``grpo`` that the peer repeats.

    Returns:
        `CURVES` of all, and a table ``method``, ``seconds_per_sample`` (the median step would hide a slow first one: it
        is the mean), ``peak_bytes`` of the process and ``start_bytes``, its memory before training.
    """
    curves, costs = [], []
    for run, peer in [*((run, False) for run in runs), (peer_run, True)]:
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, context) as pool:
            rows, start, peak = pool.submit(_alone, shared, run, peer).result()
        curves += rows
        last = rows[-1]
        costs.append((last["method"], last["seconds"] / last["samples"], peak, start))
    columns = ["method", "seconds_per_sample", "peak_bytes", "start_bytes"]
    return pd.DataFrame(curves), pd.DataFrame(costs, columns=columns)


def _alone(shared: Shared, run: Run, peer: bool) -> tuple[list[dict[str, Any]], int, int]:
    torch.set_num_threads(1)
    if peer:
        import trl.trainer.grpo_trainer  # noqa: F401  its imports are not training
    shared.task(run.seed)
    start = peak_memory(torch.device("cpu"))
    rows = train_peer(shared, run) if peer else train_once(shared, run)[0]
    return rows, start, peak_memory(torch.device("cpu"))
