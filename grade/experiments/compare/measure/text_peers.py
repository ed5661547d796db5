"""What others do with scored text, and with samples, beside this project's methods: one reward, one evaluation.

Texts are N windows of reviews, or with ``reference:N`` completions that the reference samples once, `GROUP` of each
prompt. Each is scored once. A is the reward less what a ridge regression on the prompt's words says of it
for prompts that it has not seen.

| method | | ``strengths`` |
|---|---|---|
| ``offline``, ``auto_texts`` | this project's, with the texts | ``target_kl`` |
| ``awr`` | ``min(exp(A / (lambda sd(A))), 20)`` times log-likelihood (Peng et al. 2019, arXiv:1910.00177) | lambda |
| ``raft`` | log-likelihood of the best texts, by A (Dong et al. 2023, arXiv:2304.06767) | their share |
| ``policy_gradient`` | A times log-likelihood, less beta times the exact KL per token along the texts | beta |
| ``dpo`` | TRL's `DPOTrainer` on the best and the worst completion of each prompt | DPO's beta |
| ``trl_grpo`` | TRL's `GRPOTrainer`, which samples | beta |
| ``best_of_n`` | the best of n completions of the reference | n |
| ``prompted`` | the reference with a text before the prompt | the text |

KL of the best of n is ``log n - (n - 1) / n`` if no two rewards are equal, and less with ties: the best has n F^(n - 1)
times the reference's density, F being its reward's quantile (Beirami et al. 2024, arXiv:2401.01879). That of the
prompted reference is measured against the reference without the text, along what the prompted one writes.

Seconds are of training and, before it, of reading, sampling and scoring the texts; of ``best_of_n`` and ``prompted`` of
writing the evaluated completions. All runs take turns in one process of one thread.
"""

import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self, get_args

import numpy as np
import pandas as pd
import torch
from pydantic import Field, model_validator
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import cross_val_predict
from sklearn.pipeline import make_pipeline
from torch import Tensor
from transformers import TrainerCallback

from grade.config import LARGEST, Config
from grade.data.texts import read_texts, reference_texts, score_texts
from grade.errors import InputError
from grade.experiments.compare.measure.peers import train_beside, train_grpo
from grade.experiments.measured import Seeds, Several, Size
from grade.experiments.reward_runs import Grid, Rewards, make_run
from grade.experiments.rewards import GROUP, OWN, Models, RewardName, number_of_texts, source_values
from grade.experiments.text_quality import qualities
from grade.experiments.training_runs import QUIET, Run, best_of, fine_tune
from grade.experiments.trl_runs import require_peer
from grade.gradients.methods import MOST_ROWS, Rate
from grade.gradients.objective import Objective, sequence_mean
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch, ScoredTexts, encode_prompts, padded
from grade.models.scoring import hidden_logps, predicting_hidden, token_kl
from grade.rewards.rewards import make_rewards
from grade.training.evaluate import Evaluation
from grade.training.load import Task
from grade.training.run import evaluate_task
from grade.training.trainer import GradeTrainer

LARGEST_WEIGHT = 20.0
"""Of advantage-weighted regression, as published."""
RANGES = {"raft": (0, 1), "best_of_n": (1, MOST_ROWS), "policy_gradient": (0, LARGEST), "trl_grpo": (0, LARGEST)}
"""Of strengths; those of others are above 0, or texts."""
_Reward = Literal[tuple(name for name in get_args(RewardName) if name != "sums")]
PENALTIES = np.logspace(-1, 4, 6)
"""Of the ridge regression on prompts' words."""


class Contestant(Config):
    """Runs of one method with one source of texts."""

    method: Literal[
        "offline", "auto_texts", "awr", "raft", "policy_gradient", "dpo", "trl_grpo", "best_of_n", "prompted"
    ]
    texts: str = Field(OWN, pattern=r"^(reference:)?[1-9]\d*$|^own$")  # N, reference:N, or own for none
    strengths: list[float | str] = Field(min_length=1)  # one run each; see the module
    learning_rate: Rate = 6e-3  # AdamW's, falling to 0
    batch: Several = 32  # texts, pairs or completions a step
    steps: Size = 40  # optimizer steps
    eval_every: Size = 10  # steps between evaluations

    @model_validator(mode="after")
    def _check(self) -> Self:
        least, most = RANGES.get(self.method, (1e-6, LARGEST))
        for strength in self.strengths:
            text = isinstance(strength, str)
            if text != (self.method == "prompted") or not text and not least <= strength <= most:
                allowed = "texts" if self.method == "prompted" else f"numbers from {least:g} to {most:g}"
                raise InputError(f"strengths of {self.method}", strength, allowed)
        return self


class TextPeersConfig(Models):
    """The comparison: models, reward, and who takes part."""

    policy: Literal["tiny", "smollm2"] = Field("tiny", description="policy")
    reward: _Reward = Field("gold", description="reward")
    contestants: list[Contestant] = Field(
        [Contestant(method="prompted", strengths=["A good film."])], min_length=1,
        description="method, texts (N or reference:N), strengths, learning_rate, batch, steps, eval_every",
    )  # fmt: skip
    seeds: Seeds = Field([0], min_length=1, description="of texts, adapter, order and noise; one run each")
    eval_prompts: int = Field(64, ge=2, description="held-out prompts of an evaluation")


class _Clock(TrainerCallback):
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()


def compare_text_peers(config: TextPeersConfig) -> Iterator[pd.DataFrame]:
    """The table, a row for each evaluation of each run, as it is after each contestant."""
    if {each.method for each in config.contestants} & {"dpo", "trl_grpo"}:
        require_peer("dpo or trl_grpo")
        import trl.trainer.dpo_trainer
        import trl.trainer.grpo_trainer  # noqa: F401  its imports are not training
    torch.set_num_threads(1)
    bench, rows = Rewards.of(config, [config.policy]), []
    for seed in config.seeds:
        known: dict[str, Any] = {}
        for contestant in config.contestants:
            contest = _Contest(config, contestant, seed, bench, known, rows)
            for strength in contestant.strengths:
                _METHODS.get(contestant.method, _Contest.likelihood)(contest, strength)
            yield pd.DataFrame(rows)


@dataclass
class _Contest:
    """The runs of one contestant and seed, one for each call of a method."""

    config: TextPeersConfig
    contestant: Contestant
    seed: int
    bench: Rewards
    known: dict[str, Any]  # of this seed: scored texts with their seconds, the untrained policy's evaluation
    rows: list[dict[str, Any]]

    def _add(self, strength: Any, step: int, samples: int, seconds: float, evaluation: Evaluation) -> None:
        source, figures = self.contestant.texts, evaluation.metrics()
        texts = number_of_texts(source)
        self.rows.append({
            "policy": self.config.policy, "reward_name": self.config.reward, "method": self.contestant.method,
            "source": source, "strength": strength, "seed": self.seed, "step": step,
            "samples": samples + (0 if source.isdecimal() else texts), "texts": texts, "reward_calls": samples + texts,
            "seconds": seconds, "reward": figures["val/reward_mean"], "stderr": figures["val/reward_stderr"],
            "kl": figures["val/kl"] * self.config.new_tokens,
        } | qualities(evaluation.completions))  # fmt: skip

    def _evaluate(self, strength: Any, samples: int, before: float, task: Task, step: int, seconds: float) -> None:
        """Add the row of a policy that was trained for so many steps, of ``samples`` completions each."""
        known = None if step else self.known.get("untrained")
        evaluation = known or evaluate_task(self._run().config, task, self.config.eval_prompts)
        if step == 0:
            self.known["untrained"] = evaluation
        self._add(strength, step, step * samples, before + seconds, evaluation)

    def _run(self, method: str = "grpo", **values: Any) -> Run:
        """A run with this contestant's sizes; by default its settings of sizes and evaluation are what counts."""
        c, config = self.contestant, self.config
        grid = Grid(policy=config.policy, rewards=[config.reward], methods=["grpo"], completions=c.batch,
                    steps=c.steps, eval_every=c.eval_every, eval_prompts=config.eval_prompts)  # fmt: skip
        run = make_run(config, grid, config.reward, method, 1.0, self.seed, c.learning_rate)
        return replace(run, values=run.values | {"target_kl": None, "lr_scheduler_type": "linear"} | values)

    def _read(self, task: Task, encode: Callable[..., PromptBatch]) -> list[dict[str, Any]]:
        backbone, length, source = task.backbone, self.config.new_tokens, self.contestant.texts
        number = number_of_texts(source)
        if source.isdecimal():
            file = source_values(self.config, source)["texts"]
            return read_texts(file, backbone.tokenizer, self.config.prompt_tokens, length, number)
        prompts = list(task.train_prompts)
        if number > GROUP * len(prompts):
            raise InputError("texts", source, f"at most reference:{GROUP * len(prompts)}, {GROUP} of each prompt")
        prompts = random.Random(self.seed).sample(prompts, number // GROUP)
        return reference_texts([{"prompt": prompt} for prompt in prompts], number, backbone,
                               completion_tokens=length, encode=encode, seed=self.seed,
                               min_new_tokens=length)  # fmt: skip

    def _scored(self, task: Task) -> tuple[ScoredTexts, float]:
        """The texts with their rewards, and the seconds that they took."""
        if self.contestant.texts not in self.known:
            start, encode = time.perf_counter(), partial(self.config.encode, task.backbone)
            rewards = make_rewards(task.reward_model, task.backbone)
            texts = score_texts(self._read(task, encode), task.backbone, rewards, encode=encode,
                                completion_tokens=self.config.new_tokens)  # fmt: skip
            self.known[self.contestant.texts] = texts, time.perf_counter() - start
        return self.known[self.contestant.texts]

    def ours(self, target: float) -> None:
        texts = source_values(self.config, self.contestant.texts)
        run = self._run(self.contestant.method, **QUIET, **texts, target_kl=float(target))
        task, clock = self.bench.task(run), _Clock()
        prompts = [[{"prompt": text} for text in texts] for texts in (task.train_prompts, task.validation_prompts)]
        with tempfile.TemporaryDirectory() as folder:
            config, start = replace(run, values=run.values | {"output_dir": folder}).config, time.perf_counter()
            trainer = GradeTrainer(task.backbone, task.reward_model, config, *prompts, texts=config.texts,
                                   callbacks=[clock])  # fmt: skip
            trainer.train()
        log = {row["step"]: row for row in trainer.state.log_history if "num_samples" in row}
        for step, evaluation in sorted(trainer.evaluations.items()):
            samples, seconds = (log[step][name] if step else 0 for name in ("num_samples", "seconds"))
            self._add(target, step, int(samples), clock.began - start + seconds, evaluation)

    def likelihood(self, strength: float) -> None:
        c, task = self.contestant, self.bench.task(self._run())
        texts, before = self._scored(task)
        weights = likelihood_weights(c.method, advantages(texts), strength)
        beta = strength if c.method == "policy_gradient" else 0.0

        def loss(rows: Tensor) -> Tensor:
            return _loss(task.backbone, texts[rows], weights[rows], beta)

        self._evaluate(strength, 0, before, task, 0, 0.0)
        rows, generator = weights.nonzero().flatten(), torch.Generator().manual_seed(self.seed)
        for step, seconds in fine_tune(task.backbone, rows, loss, c.learning_rate, c.steps, c.batch, generator):
            if step % c.eval_every == 0 or step == c.steps:
                self._evaluate(strength, 0, before, task, step, seconds)

    def dpo(self, beta: float) -> None:
        from trl import DPOConfig, DPOTrainer

        class OnTokens(DPOTrainer):
            def _prepare_dataset(self, dataset: Any, *args: Any) -> Any:
                return dataset  # the tokens that were sampled and scored; of text it would make others

        c, run = self.contestant, self._run()
        texts, before = self._scored(self.bench.task(run))
        arguments = partial(
            DPOConfig, beta=float(beta), learning_rate=c.learning_rate, max_steps=c.steps, seed=self.seed,
            per_device_train_batch_size=c.batch, weight_decay=0.0, use_cpu=True, bf16=False, disable_tqdm=True,
            gradient_checkpointing=False, report_to="none", save_strategy="no", logging_strategy="no",
        )  # fmt: skip
        train_beside(self.bench, run, self.bench.task(run), OnTokens, arguments, preference_pairs(texts),
                     partial(self._evaluate, beta, 0, before))  # fmt: skip

    def grpo(self, beta: float) -> None:
        run = self._run(beta=float(beta))
        train_grpo(self.bench, run, partial(self._evaluate, beta, self.contestant.batch, 0.0))

    def reference(self, strength: Any) -> None:
        """The best of n completions of each held-out prompt; or one, with a text before the prompt."""
        prompted, length = self.contestant.method == "prompted", self.config.new_tokens
        task = self.bench.task(self._run())  # its adapter is new
        backbone, start, n = task.backbone, time.perf_counter(), 1 if prompted else int(strength)
        texts = list(task.validation_prompts)[: self.config.eval_prompts]
        prompts = encode_prompts(backbone.tokenizer, texts, self.config.prompt_tokens)
        before = backbone.tokenizer(strength)["input_ids"] if prompted else []
        asked = PromptBatch(*padded([before + row for row in prompts.rows()], side="left"))
        generator = torch.Generator().manual_seed(self.seed + 1)  # 0: that of the texts

        def score(rows: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
            return Objective(task.reward_model).score(backbone, prompts[rows], ids, mask)

        rewards, ids = best_of(backbone, asked, n, length, generator, score)
        seconds = time.perf_counter() - start
        with torch.no_grad():
            states = [predicting_hidden(backbone, each, ids) for each in (asked, prompts)]
            kl = token_kl(backbone, *states, torch.ones_like(ids)).mean(1).double().numpy()
        bound = np.full(len(texts), (math.log(n) - (n - 1) / n) / length)
        self._add(strength, 0, n * len(texts), seconds, Evaluation(
            texts, backbone.tokenizer.batch_decode(ids, skip_special_tokens=True), rewards.double().numpy(),
            np.full(len(texts), math.nan), kl if prompted else bound, 0.0,
        ))  # fmt: skip


_METHODS = {
    "offline": _Contest.ours, "auto_texts": _Contest.ours, "dpo": _Contest.dpo, "trl_grpo": _Contest.grpo,
    "best_of_n": _Contest.reference, "prompted": _Contest.reference,
}  # fmt: skip
"""All others weigh the texts' likelihood."""


def _loss(backbone: Backbone, texts: ScoredTexts, weights: Tensor, beta: float) -> Tensor:
    """Minus the weighted log-likelihood, plus beta times the mean KL per token along the texts."""
    hidden = predicting_hidden(backbone, texts.prompts, texts.ids)
    loss = -(weights * hidden_logps(backbone, hidden, texts.ids, texts.mask).sum(1)).mean()
    if not beta:
        return loss
    with torch.no_grad(), backbone.reference():
        reference = predicting_hidden(backbone, texts.prompts, texts.ids)
    return loss + beta * sequence_mean(token_kl(backbone, hidden, reference, texts.mask), texts.mask).mean()


def advantages(texts: ScoredTexts) -> Tensor:
    """A [N]; see the module."""
    prompts, rewards = [row["prompt"] for row in texts.prompts.examples], texts.rewards.numpy()
    value = make_pipeline(CountVectorizer(token_pattern=r"\S+"), RidgeCV(PENALTIES))
    return torch.from_numpy(rewards - cross_val_predict(value, prompts, rewards)).float()


def likelihood_weights(method: str, advantage: Tensor, strength: float) -> Tensor:
    """Weight [N] of each text's log-likelihood; see the module.

    >>> likelihood_weights("raft", torch.tensor([0.1, 0.4, 0.2, 0.3]), 0.25)
    tensor([0., 1., 0., 0.])
    """
    if method == "policy_gradient":
        return advantage
    if method == "raft":
        best = advantage.topk(max(1, round(strength * len(advantage)))).indices
        return torch.zeros_like(advantage).index_fill(0, best, 1.0)
    return (advantage / (strength * advantage.std())).exp().clamp(max=LARGEST_WEIGHT)


def preference_pairs(texts: ScoredTexts) -> dict[str, list[list[int]]]:
    """Tokens of each prompt, of its best completion and of its worst, where these differ in reward."""
    prompts, completions = texts.prompts.rows(), texts.ids.tolist()
    groups = pd.Series(texts.rewards.numpy()).groupby([str(prompt) for prompt in prompts], sort=False)
    pairs = [(best, worst) for best, worst in zip(groups.idxmax(), groups.idxmin(), strict=True) if best != worst]
    return {
        "prompt_ids": [prompts[best] for best, _ in pairs],
        "chosen_ids": [completions[best] for best, _ in pairs],
        "rejected_ids": [completions[worst] for _, worst in pairs],
    }
