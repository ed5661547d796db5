"""Repeated gradients at fixed weights: many estimators, several rewards, one rollout and one graph per row.

A row is one batch: G completions of each prompt, and every estimator's gradient of the expected reward from them. The
policy gradients and the straight-through ones share completions and graph, and differ in the vector-Jacobian products
that they take; `gumbel` has soft tokens and so its own rollout. All are ascent directions of the same number,
``mean over prompts of E R``, so their means can be compared.

With ``kl=True`` there is one more "reward", the exact KL to the reference, mean over a completion's tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from grade.gradients import losses
from grade.gradients.estimators import EstimatorName, RelaxationConfig
from grade.gradients.objective import Objective, sequence_mean
from grade.gradients.replay import ReplayGraph
from grade.gradients.rollout import sample
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch
from grade.models.sampling import generate
from grade.models.scoring import sequence_kl
from grade.results import progress
from grade.rewards.base import RewardScope

PolicyGradient = Literal["reinforce", "rloo", "remax", "grpo"]
POLICY_GRADIENTS: tuple[PolicyGradient, ...] = get_args(PolicyGradient)
KL = "kl"


@dataclass(frozen=True)
class Variant:
    """A relaxed estimator and its settings.

    Attributes:
        estimator: Of `grade.gradients.estimators`.
        tau: Gumbel temperature.
        hops: Feedback hops; at most T - 1 are taken.
        topk: Size of the (perturbed) support; 0 = the full vocabulary.
        draws: M of `gumbel_rao`.
    """

    estimator: EstimatorName
    tau: float = 1.0
    hops: int = 0
    topk: int = 0
    draws: int = 8

    @property
    def name(self) -> str:
        """For tables and metrics.

        >>> Variant("gumbel_rao", 0.5, 1, draws=4).name
        'gumbel_rao_m4_tau0.5_hops1'
        """
        parts = [self.estimator, f"m{self.draws}" if self.estimator == "gumbel_rao" else "", f"tau{self.tau:g}",
                 f"k{self.topk}" if self.topk else "", f"hops{self.hops}"]  # fmt: skip
        return "_".join(part for part in parts if part)

    def relaxation(self, length: int) -> RelaxationConfig:
        """Its config for completions of ``length`` tokens."""
        return RelaxationConfig(
            estimator=self.estimator, gumbel_topk=self.topk, tau=self.tau, rao_draws=self.draws, max_new_tokens=length
        )


@dataclass(frozen=True)
class Setting:
    """What gradients are taken of.

    Attributes:
        backbone: The policy, fixed.
        prompts: B prompts, fixed.
        group: Completions G of each in a row.
        length: Completion length T.
        rewards: Reward models by name.
        variants: Relaxed estimators.
        policy: Policy gradients.
        kl: Whether KL is one more "reward".
        scope: What rewards score.
        project: Applied to every gradient [P].
    """

    backbone: Backbone
    prompts: PromptBatch
    group: int
    length: int
    rewards: Mapping[str, nn.Module]
    variants: Sequence[Variant]
    policy: Sequence[PolicyGradient] = ("rloo",)
    kl: bool = False
    scope: RewardScope = "prompt_and_completion"
    project: Callable[[Tensor], Tensor] = field(default=lambda gradient: gradient)

    @property
    def size(self) -> int:
        """Completions per row, B G."""
        return len(self.prompts) * self.group

    def repeated(self) -> PromptBatch:
        """Each prompt G times, [B G, P]."""
        owner = torch.arange(len(self.prompts), device=self.prompts.ids.device).repeat_interleave(self.group)
        return self.prompts[owner]


@dataclass(frozen=True)
class Rows:
    """Repeated gradients.

    Attributes:
        gradients: For each (reward, estimator), [R, P] on the CPU.
        seconds: For each, mean seconds that a row would take alone: rollout, pass, reward and its own products.
        norms: For each, norms of the gradients of the parameter tensors [R, tensors].
        size: Completions in a row.
        group: Of which G share a prompt.
    """

    gradients: dict[tuple[str, str], Tensor]
    seconds: dict[tuple[str, str], float]
    norms: dict[tuple[str, str], Tensor]
    size: int
    group: int


def advantages(rewards: Tensor, kind: PolicyGradient, greedy: Tensor | None = None) -> Tensor:
    """Advantages whose mean over completions, times the score, is a policy gradient.

    `reinforce`: the reward itself; `rloo`: minus the mean of the prompt's other completions; `remax`: minus the reward
    of the greedy completion; `grpo`: minus the mean of all of the prompt's, itself included (no whitening), which makes
    the expected gradient ``1 - 1/G`` of the truth (`grade.gradients.losses.grpo`, which trains, corrects for that).

    >>> r = torch.tensor([[1.0, 2.0, 6.0]])
    >>> advantages(r, "rloo").tolist(), advantages(r, "grpo").tolist()
    ([[-3.0, -1.5, 4.5]], [[-2.0, -1.0, 3.0]])
    """
    if kind == "reinforce":
        return rewards
    if kind == "remax":
        return losses.remax(rewards, greedy)
    return losses.rloo(rewards) * (1 if kind == "rloo" else 1 - 1 / rewards.shape[1])


def gradient_rows(setting: Setting, rows: int, seed: int = 0) -> Rows:
    """Draw R rows.

    The gradients, and the time of each.
    """
    gradients: dict[tuple[str, str], list[Tensor]] = {}
    seconds: dict[tuple[str, str], list[float]] = {}
    norms: dict[tuple[str, str], list[Tensor]] = {}
    sizes = [p.numel() for p in setting.backbone.trainable_parameters()]
    for row in progress(range(rows), "batches of gradients"):
        generator = torch.Generator(setting.backbone.device).manual_seed(1_000_003 * seed + row)
        for key, gradient, taken in _row(setting, generator):
            norms.setdefault(key, []).append(torch.stack([part.norm() for part in gradient.split(sizes)]).cpu())
            gradients.setdefault(key, []).append(setting.project(gradient.cpu()))
            seconds.setdefault(key, []).append(taken)
    return Rows(
        {key: torch.stack(value) for key, value in gradients.items()},
        {key: sum(value) / rows for key, value in seconds.items()},
        {key: torch.stack(value) for key, value in norms.items()},
        setting.size,
        setting.group,
    )


def _row(setting: Setting, generator: torch.Generator):
    """Yields (reward, estimator), gradient [P] and its seconds."""
    hard = [v for v in setting.variants if v.estimator != "gumbel"]
    if hard or setting.policy:
        yield from _hard_row(setting, hard, generator)
    soft: dict[tuple[float, int], list[Variant]] = {}
    for variant in setting.variants:
        if variant.estimator == "gumbel":
            soft.setdefault((variant.tau, variant.topk), []).append(variant)
    for variants in soft.values():
        clock, relaxation = _Clock(), variants[0].relaxation(setting.length)
        graph = ReplayGraph(setting.backbone, sample(setting.backbone, setting.repeated(), relaxation, generator))
        pull, start = graph.pullback(graph.rollout, relaxation), clock.lap()
        for name, _, r, k, taken in _targets(setting, graph, clock):
            for variant in variants:
                yield _product(graph, (name, variant), r, k, pull, clock, start + taken)


def _hard_row(setting: Setting, variants: Sequence[Variant], generator: torch.Generator):
    backbone, clock = setting.backbone, _Clock()
    # With the full vocabulary or a perturbed support the hard token is an exact sample, whatever K is.
    drawn = RelaxationConfig(estimator="ste", gumbel_topk=min(64, backbone.vocab_size), max_new_tokens=setting.length)
    graph = ReplayGraph(backbone, sample(backbone, setting.repeated(), drawn, generator))
    pulls, start = [], None
    targets = list(_targets(setting, graph, clock))
    _ = graph.h
    start = clock.lap()
    for variant in variants:
        relaxation = variant.relaxation(setting.length)
        pulls.append((graph.pullback(graph.given(relaxation, generator), relaxation), clock.lap()))
    for name, values, r, k, taken in targets:
        groups = values.double().view(len(setting.prompts), setting.group)
        for kind in setting.policy:
            greedy = _greedy(setting, name) if kind == "remax" else None
            clock.lap()
            coefficients = advantages(groups, kind, greedy).flatten() / setting.size
            gradient = graph.parameter_gradient(graph.policy(coefficients) - k)
            yield (name, kind), gradient, start + taken + clock.lap()
        for variant, (pull, draw) in zip(variants, pulls, strict=True):
            yield _product(graph, (name, variant), r, k, pull, clock, start + taken + draw)


def _targets(setting: Setting, graph: ReplayGraph, clock: _Clock) -> list[tuple]:
    """For each reward: its name, values [B G], adjoints r and k of *minus* it, seconds."""
    targets = []
    for name, model in setting.rewards.items():
        clock.pause()
        values, r, _ = graph.reward(Objective(model, 0.0, setting.scope))
        targets.append((name, values, r, torch.zeros(()), clock.resume()))
    if setting.kl:
        clock.pause()
        kl, k = graph.kl(-1.0)
        values = sequence_mean(kl, graph.rollout.completion_mask)
        targets.append((KL, values, torch.zeros_like(graph.e), k, clock.resume()))
    return targets


def _product(graph: ReplayGraph, key: tuple[str, Variant], r: Tensor, k: Tensor, pull, clock: _Clock, before: float):
    name, variant = key
    clock.lap()
    v, _, _ = graph.adjoint(r, k, pull, variant.hops)
    return (name, variant.name), -graph.parameter_gradient(v), before + clock.lap()


@torch.no_grad()
def _greedy(setting: Setting, name: str) -> Tensor:
    """Value of each prompt's greedy completion [B]."""
    backbone, generator = setting.backbone, torch.Generator(setting.backbone.device)
    ids, mask = generate(backbone, setting.prompts, setting.length, generator, temperature=0.0, stop_early=False)
    if name == KL:
        return sequence_mean(sequence_kl(backbone, setting.prompts, ids, mask), mask).double()
    objective = Objective(setting.rewards[name], 0.0, setting.scope)
    prompt_embeds = backbone.embed(setting.prompts.ids)
    return objective.reward(prompt_embeds, setting.prompts, backbone.embed(ids), mask).double()


class _Clock:
    """Seconds since the last lap, pauses excluded."""

    def __init__(self) -> None:
        self.last, self.paused = time.perf_counter(), 0.0

    def lap(self) -> float:
        now = time.perf_counter()
        taken, self.last, self.paused = now - self.last - self.paused, now, 0.0
        return taken

    def pause(self) -> None:
        self.since = time.perf_counter()

    def resume(self) -> float:
        taken = time.perf_counter() - self.since
        self.paused += taken
        return taken
