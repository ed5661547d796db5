"""Completions of a training step that another engine samples, and how far its policy is from the trained one.

Once a step one process hands the adapter to the engine. Then each process asks for its own microbatches, whose seeds
depend on run, step and place only: a resumed run asks for the same. The completions are scored here, with one pass
without gradient, and refused if the two policies' log-probabilities are too far apart at any token.

Evaluations, and the greedy completions of `remax`, are sampled here: all runs see the same noise there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Self

import torch

from grade.gradients.losses import importance_weights
from grade.gradients.policy_gradient import Completions, PolicyGradient
from grade.models.samplers import make_sampler, seed_of
from grade.models.scoring import score

if TYPE_CHECKING:
    from grade.gradients.distilled_given import DistilledFromGiven
    from grade.gradients.objective import GradientStep, Objective
    from grade.gradients.policy_gradient import StepContext
    from grade.models.backbone import Backbone
    from grade.models.prompts import PromptBatch
    from grade.models.samplers import Sampler
    from grade.training.config import GradeConfig
    from grade.training.together import Together
    from grade.training.window import Window


class Elsewhere:
    """The sampler of a run, and the completions of its present step.

    Args:
        args: Settings, which name the sampler.
        backbone: The policy.
        together: The processes.
        learner: The method, or None if it is relaxed.
        sampler: The sampler.
    """

    def __init__(
        self, args: GradeConfig, backbone: Backbone, together: Together,
        learner: PolicyGradient | DistilledFromGiven | None, sampler: Sampler,
    ) -> None:  # fmt: skip
        self.args, self.backbone, self.together, self.learner, self.sampler = args, backbone, together, learner, sampler
        self._given: list[Completions] = []
        self._published = -1

    def draw(self, prompts: PromptBatch, generator: torch.Generator, step: int, window: Window) -> None:
        """Have a microbatch sampled, G completions of each prompt; all processes call this equally often.

        Args:
            prompts: This process's prompts.
            generator: Source of the seed.
            step: Number of the step: at its first microbatch the adapter is handed over.
            window: Gets the figures.

        Raises:
            InputError: If the engine fails, on any process, or samples another policy.
        """
        args, sampler, start = self.args, self.sampler, time.perf_counter()
        if step != self._published:
            main = args.process_index == 0
            name = self.together(lambda: sampler.publish(self.backbone) if main else None)
            sampler.use(self.together.gather([name])[0])
            self._published = step
        prompts = prompts.repeat(args.group)
        most, least = args.max_completion_length, args.min_completion_length
        # A generator of its own: what is drawn given the tokens does not depend on who sampled them, and how.
        own = torch.Generator(generator.device).manual_seed(seed_of(generator))
        samples = self.together(partial(sampler.sample, self.backbone, prompts, most, own, least))
        seconds = time.perf_counter() - start
        # Outside `together`: with a sharded base this pass communicates.
        with torch.no_grad():
            logps = score(self.backbone, prompts, samples.ids, samples.mask, min_new_tokens=least).logps
        found = samples.mismatch(logps)
        self.together(partial(found.check, args.sampler_max_difference, sampler.name))
        figures = {"mean_ratio": found.mean_ratio, "largest_difference": found.largest_difference, "seconds": seconds}
        window.note({f"sampler/{name}": torch.tensor(v, dtype=torch.float64) for name, v in figures.items()})
        level, cap = args.importance_sampling, args.importance_sampling_cap
        weights = importance_weights(logps, samples.logps, samples.mask, level, cap)
        self._given.append(Completions(prompts, samples.ids, samples.mask, weights))

    def given(self, engine: partial[GradientStep]) -> partial[GradientStep]:
        """The replay engine with the completions of the last microbatch that was drawn."""
        completions = self._given.pop()
        return partial(engine, completions=(completions.ids, completions.mask))

    def step(
        self, microbatches: Sequence[tuple[PromptBatch, torch.Generator]], objective: Objective, context: StepContext
    ) -> list[GradientStep]:
        """The learner's step on the completions that were drawn.

        Args:
            microbatches: The prompts that they are of; only the completions are used.
            objective: Reward and KL weight.
            context: The training loop.

        Returns:
            One result per microbatch.
        """
        given, self._given = self._given, []
        learn = self.learner.learn if isinstance(self.learner, PolicyGradient) else self.learner.step
        return learn(given, objective, context)

    def __enter__(self) -> Self:
        self._given.clear()
        self._published = -1
        return self

    def __exit__(self, *_: object) -> None:
        self.sampler.close()


def make_elsewhere(
    args: GradeConfig, backbone: Backbone, together: Together, learner: PolicyGradient | DistilledFromGiven | None
) -> Elsewhere | None:
    """The other sampler of a run, if its settings name one; arguments as for `Elsewhere`."""
    if args.sampler == "own":
        return None
    sampler = make_sampler(args.sampler, args.sampler_timeout, args.sampler_folder)
    return Elsewhere(args, backbone, together, learner, sampler)
