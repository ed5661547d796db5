"""Steps along scored texts: all of a run with `offline`, the first half of one with `distilled`.

The phase ends where own completions disprove what the texts predict; the run then goes on from its start.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from grade.data.texts import encode_texts, read_texts, reference_number, reference_texts, score_texts
from grade.errors import InputError
from grade.gradients.distilled.offline import OfflineGradient, own_completions
from grade.gradients.distilled.store import Evidence
from grade.gradients.methods import OFFLINE
from grade.gradients.objective import GradientStep
from grade.gradients.policy_gradient import Completions, scored_rewards
from grade.models.parameters import set_values
from grade.models.scoring import sequence_kl
from grade.training.kl_budget import LAST_TOLERANCE, Measured, scale_adapter, scale_step

if TYPE_CHECKING:
    from grade.training.config import GradeConfig
    from grade.training.kl_budget import KLSteering
    from grade.training.loop import GradeTrainer

OPENING = 0.5
"""Share of the steps that `distilled` makes along scored texts before it samples."""
WINDOW_PROMPT = 32
"""Tokens of the prompts that whole texts are cut into, where max_prompt_length says nothing."""


class TextPhase:
    """The texts of a run, and its steps along them."""

    def __init__(self, trainer: GradeTrainer, texts: Any) -> None:
        self.trainer = trainer
        self.offline = self.config.method == OFFLINE
        self.mixed = hasattr(self.config, "lmbda")  # a share of the steps is along them
        self.steps = 0  # along the texts
        self.method = trainer.method if self.offline else None  # what learns along them
        self.opened: list[Tensor] = []  # the adapter before them
        self.texts: Any = None  # where `mixed`
        self.step_start: list[Tensor] = []  # the adapter before the present step
        self.rows = self._read(texts)

    @property
    def config(self) -> GradeConfig:
        """The run's settings."""
        return self.trainer.config

    def _read(self, texts: Any) -> list[dict[str, Any]]:
        config, trainer = self.config, self.trainer
        if texts is None:
            raise InputError("texts", None, f"text to train along, with method {OFFLINE}: rows, a file, or reference:N")
        if not hasattr(config, "most_texts"):
            raise InputError("texts", texts, f"none with method {config.method}")
        if self.offline and config.beta == 0 and config.target_kl is None:
            raise InputError("beta", 0.0, f"above 0, or a target_kl, with method {OFFLINE}: nothing else keeps it near")
        backbone, length, number = trainer.backbone, config.max_completion_length, reference_number(texts)
        if number is None:
            prompt = config.max_prompt_length or WINDOW_PROMPT
            return read_texts(texts, backbone.tokenizer, prompt, length, config.most_texts)
        if number > config.most_texts:
            raise InputError("texts", texts, f"at most most_texts = {config.most_texts} completions")
        if trainer.train_dataset is None:
            raise InputError("train_dataset", None, f"prompts for the completions of {texts}")
        return reference_texts(
            trainer.train_dataset, number, backbone, completion_tokens=length,
            encode=trainer.encode, seed=config.seed, min_new_tokens=config.min_completion_length,
        )  # fmt: skip

    def training_rows(self, rows: Any) -> Any:
        """The rows that a run passes over: its texts with `offline`, else its prompts."""
        return self.rows if self.offline else rows

    def begin(self, resumed: bool = False) -> None:
        """Score the texts, distil their reward, and plan the steps along them."""
        trainer, config = self.trainer, self.config
        length, encode = config.max_completion_length, trainer.encode
        if self.mixed:
            self.texts = encode_texts(self.rows, trainer.backbone, completion_tokens=length, encode=encode)
            return
        texts = score_texts(self.rows, trainer.backbone, trainer.rewards, completion_tokens=length, encode=encode)
        learner, target = trainer.method, config.target_kl
        learner.read(texts)
        if learner.prior is None:
            return
        trainer.choose("texts", f"{len(texts)}; {learner.prior.summary}")
        steps = config.max_steps if self.offline else int(OPENING * config.max_steps)
        if not steps or not (target or config.beta):
            return  # without either nothing would keep the policy near
        if not self.offline:
            self.method = OfflineGradient(config, trainer.backbone, learner.families)
            if not (resumed and self.opened):  # where the run began, also if this trainer was interrupted
                self.opened = [p.detach().clone() for p in trainer.backbone.trainable_parameters()]
        self._set_steps(steps)
        self.method.begin(texts, learner.prior, target, config.beta)
        steering = self.method.steering
        trainer.objective = replace(trainer.objective, beta=steering.beta)
        gain = self.method.promised.at(target)[0] if target else math.nan
        promised = f", where they promise {gain:+.3f} at {target:g} nats" if target else ""
        text = f"{self.steps} of {config.max_steps}, beta from {steering.beta:.3g}{promised}"
        trainer.choose("steps along the texts", text)

    def _set_steps(self, steps: int) -> None:
        self.steps = steps
        if self.trainer.steering is not None:
            self.trainer.steering.begin(steps)

    # ---- a step ----
    def is_text_step(self, step: int) -> bool:
        """Whether this step, from 1, is along the scored texts."""
        return step <= self.steps

    def _texts_of(self, step: int) -> Any:
        """What a step is made along; None: own completions."""
        if self.is_text_step(step):
            return self.method.texts
        if self.texts is None or np.random.default_rng([self.config.seed, 4, step]).random() < self.config.lmbda:
            return None
        return self.texts

    def microbatch(self, step: int, number: int) -> Completions | None:
        """Texts of a microbatch; None where the policy samples."""
        texts, config = self._texts_of(step), self.config
        if texts is None:
            return None
        if self.is_text_step(step):
            self.step_start = [p.detach().clone() for p in self.trainer.backbone.trainable_parameters()]
        if self.offline:
            numbers = self.trainer.row_numbers(step, number, config.batch_prompts)
        else:
            numbers = self._numbers((step - 1) * config.microbatches + number, len(texts))
        texts = texts[numbers]
        return Completions(texts.prompts, texts.ids, texts.mask)

    def _numbers(self, before: int, rows: int) -> list[int]:
        """Texts of a microbatch after ``before`` others, in shuffled passes over all ``rows``."""
        size = self.config.batch_completions
        numbers = range(before * size, (before + 1) * size)
        orders = {turn: np.random.default_rng([self.config.seed, 3, turn]).permutation(rows)
                  for turn in {number // rows for number in numbers}}  # fmt: skip
        return [int(orders[number // rows][number % rows]) for number in numbers]

    def steps_with_samples(self, step: int) -> int:
        """How many of the first ``step`` steps drew completions of the policy."""
        return sum(self._texts_of(one) is None for one in range(1, step + 1))

    @property
    def samples(self) -> int:
        """Completions of the policy that measured the steps along the texts."""
        return 0 if self.method is None else self.method.steering.samples

    @property
    def shortens(self) -> bool:
        """Whether steps after the texts are only shortened: beta is near its value then."""
        return self.steps > 0 and not self.method.steering.disproved

    def follow(self, steering: KLSteering) -> None:
        """Set beta by the KL of a step after the texts."""
        if self.shortens:
            budget, step = steering.budget, self.trainer.state.global_step + 1 - self.steps
            beta = self.method.steering.follow(float(budget.values[0]), budget.steps - step)
            self.trainer.objective = replace(self.trainer.objective, beta=beta)

    def after_step(self, parts: list[GradientStep], microbatches: list[Completions]) -> None:
        """Keep within the target, measure own completions now and then, set beta."""
        trainer, config, steering = self.trainer, self.config, self.method.steering
        step, steps, target = trainer.state.global_step, self.steps, steering.target
        kl = trainer.mean([(part.kl.double() * part.completion_mask).sum(-1).mean() for part in parts])
        allowed = math.inf if target is None else target / steering.ratio
        number = own_completions(step, steps, config.own_completions)
        if kl > allowed / 4 or number:  # a step can more than double KL
            kl_after = self._kl(microbatches)
            if kl_after > allowed:
                parameters, before = trainer.backbone.trainable_parameters(), Measured(kl, 0.0)
                measured = scale_step(
                    parameters, self.step_start, before, allowed, lambda: Measured(self._kl(microbatches), 0.0)
                )[1]
                kl_after = measured.kl
            if number:
                self._measure(number, kl_after)
        trainer.log_buffer.add({"beta": torch.tensor(trainer.objective.beta, dtype=torch.float64)})
        trainer.objective = replace(trainer.objective, beta=steering.follow(kl, steps - step))
        if steering.disproved or (step == steps and not self.offline):
            self._end()

    def _kl(self, microbatches: list[Completions]) -> float:
        """KL along the step's texts, in nats per completion."""
        backbone = self.trainer.backbone
        return self.trainer.mean([
            sequence_kl(backbone, part.prompts, part.ids, part.mask).double().sum(1).mean() for part in microbatches
        ])  # fmt: skip

    def _measure(self, number: int, kl: float) -> None:
        """Score a few completions of the policy; after the last step, scale the adapter to their KL."""
        trainer, method = self.trainer, self.method
        own, batch = trainer.sample_policy(number)
        rewards = scored_rewards(trainer.backbone, own.prompts, own.ids, own.mask, trainer.objective)
        method.steering.measure(batch.start.kl, kl, method.predict(own), rewards)
        trainer.log_buffer.add({
            "distilled/own_kl": batch.start.kl, "distilled/own_reward": rewards.nanmean().double(),
            "distilled/trust": method.steering.evidence.trust,
        })  # fmt: skip
        if trainer.state.global_step == self.config.max_steps and self.config.target_kl is not None:
            scale_adapter(trainer.backbone, batch, batch.start.kl, self.config.target_kl, LAST_TOLERANCE)

    def _end(self) -> None:
        """Go on with own completions, from the start where these disproved what the texts predict."""
        trainer, steering, step = self.trainer, self.method.steering, self.trainer.state.global_step
        found = f"rewards of {steering.samples} own completions"
        if self.offline and steering.disproved:
            allowed = "texts more like what the policy writes, or method: auto, which corrects the prediction"
            raise InputError("texts", f"{found} that do not rise with what they predict", allowed)
        if self.offline:
            return
        trainer.method.transfer = evidence = Evidence([group.clone() for group in steering.evidence.groups])
        trust, r2 = evidence.trust, evidence.r2(evidence.trust)
        if not steering.disproved:
            steering.ratio, steering.recent = 1.0, []
            text = f"{found} rise with the prediction: it counts {trust:.2f} (R2 {r2:.2f}) from step {step + 1} on"
        else:
            set_values(trainer.backbone.trainable_parameters(), self.opened)
            trainer.optimizer.state.clear()
            self._set_steps(step)
            trainer.objective = replace(trainer.objective, beta=self.config.beta)
            text = f"{found} do not rise with the prediction: from step {step + 1} on without texts, from the start"
        trainer.choose("transfer", text)

    # ---- checkpoints ----
    def tensors(self) -> dict[str, Tensor]:
        """State for a checkpoint, beside the method's own."""
        return {} if self.method is None or self.offline else self.method.tensors()

    def restore(self, tensors: dict[str, Tensor], steps: int) -> None:
        """Continue where `tensors` was taken."""
        if steps > self.steps:
            allowed = f"one with at least {steps} steps along texts, as the checkpoint has made"
            raise InputError("max_steps", self.config.max_steps, allowed)
        self._set_steps(steps)
        if self.method is not None and not self.offline:
            self.method.load_tensors(tensors)
        if self.method is not None:
            beta = self.method.steering.beta if self.shortens else self.config.beta
            self.trainer.objective = replace(self.trainer.objective, beta=beta)
