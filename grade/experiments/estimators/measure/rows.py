"""Repeated gradients at fixed weights: many estimators, several rewards, one rollout and one graph per row.

A row is one batch: G completions of each prompt, and every estimator's gradient of the expected reward from them. The
policy gradients and the straight-through ones share completions and graph, and differ in the vector-Jacobian products
that they take; `gumbel` has soft tokens and so its own rollout. All are ascent directions of the same number,
``mean over prompts of E R``, so their means can be compared.

With ``kl=True`` there is one more "reward", the exact KL to the reference, mean over a completion's tokens.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from grade.gradients import losses
from grade.gradients.estimators import EstimatorName, RelaxationConfig
from grade.gradients.objective import Objective, sequence_mean
from grade.gradients.replay import ReplayGraph
from grade.gradients.rollout import sample
from grade.gradients.straight_through import redrawn
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch
from grade.models.sampling import generate
from grade.models.scoring import sequence_kl
from grade.results import progress

PolicyGradient = Literal["reinforce", "rloo", "remax", "grpo"]
POLICY_GRADIENTS: tuple[PolicyGradient, ...] = get_args(PolicyGradient)
KL = "kl"


@dataclass(frozen=True)
class Variant:
    """A relaxed estimator and its settings."""

    estimator: EstimatorName  # of `grade.gradients.estimators`
    tau: float = 1.0  # Gumbel temperature
    hops: int = 0  # feedback hops; at most T - 1 are taken
    topk: int = 0  # size of the (perturbed) support; 0 = the full vocabulary
    draws: int = 8  # M of `gumbel_rao`

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
    """What gradients are taken of."""

    backbone: Backbone  # the policy, fixed
    prompts: PromptBatch  # B prompts, fixed
    group: int  # completions G of each in a row
    length: int  # completion length T
    rewards: Mapping[str, nn.Module]  # reward models by name
    variants: Sequence[Variant]  # relaxed estimators
    policy: Sequence[PolicyGradient] = ("rloo",)  # policy gradients
    kl: bool = False  # whether KL is one more "reward"
    project: Callable[[Tensor], Tensor] = field(default=lambda gradient: gradient)  # applied to every gradient [P]

    @property
    def size(self) -> int:
        """Completions per row, B G."""
        return len(self.prompts) * self.group


@dataclass(frozen=True)
class Rows:
    """Repeated gradients."""

    gradients: dict[tuple[str, str], Tensor]  # for each (reward, estimator), [R, P] on the CPU
    size: int  # completions in a row
    group: int  # of which G share a prompt


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
        return rewards - greedy.unsqueeze(1)
    return losses.rloo(rewards) * (1 if kind == "rloo" else 1 - 1 / rewards.shape[1])


def gradient_rows(setting: Setting, rows: int) -> Rows:
    """Draw R rows."""
    gradients: dict[tuple[str, str], list[Tensor]] = defaultdict(list)
    for row in progress(range(rows), "batches of gradients"):
        generator = torch.Generator(setting.backbone.device).manual_seed(row)
        for key, gradient in _row(setting, generator):
            gradients[key].append(setting.project(gradient.cpu()))
    stacked = {key: torch.stack(parts) for key, parts in gradients.items()}
    return Rows(stacked, setting.size, setting.group)


def _row(setting: Setting, generator: torch.Generator) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yields (reward, estimator) and gradient [P]: of all hard estimators on one rollout, of soft ones on their own."""
    backbone = setting.backbone
    # With the full vocabulary or a perturbed support the hard token is an exact sample, whatever K is.
    drawn = RelaxationConfig(estimator="ste", gumbel_topk=min(64, backbone.vocab_size), max_new_tokens=setting.length)
    by_rollout: dict[tuple[float, int] | None, list[Variant]] = {None: []}
    for variant in setting.variants:
        soft = variant.estimator == "gumbel"
        by_rollout.setdefault((variant.tau, variant.topk) if soft else None, []).append(variant)
    for soft, variants in by_rollout.items():
        policy = () if soft else setting.policy
        if not variants and not policy:
            continue
        relaxations = [variant.relaxation(setting.length) for variant in variants]
        for relaxation in relaxations:
            relaxation.check(backbone.vocab_size)
        prompts = setting.prompts.repeat(setting.group)
        graph = ReplayGraph(backbone, sample(backbone, prompts, relaxations[0] if soft else drawn, generator))
        targets = list(_targets(setting, graph))
        pulls = [graph.pullback(graph.rollout if soft else redrawn(graph, relaxation, generator), relaxation)
                 for relaxation in relaxations]  # fmt: skip
        for name, values, r, k in targets:
            groups = values.double().view(len(setting.prompts), setting.group)
            for kind in policy:
                greedy = _greedy(setting, name) if kind == "remax" else None
                coefficients = advantages(groups, kind, greedy).flatten() / setting.size
                yield (name, kind), graph.parameter_gradient([graph.policy(coefficients)[0] - k[0]])
            for variant, pull in zip(variants, pulls, strict=True):
                v, _, _ = graph.adjoint(r, k, pull, variant.hops)
                yield (name, variant.name), -graph.parameter_gradient(v)


def _targets(setting: Setting, graph: ReplayGraph) -> Iterator[tuple[str, Tensor, Tensor, list[Tensor]]]:
    """For each reward: its name, values [B G], and adjoints r and k of *minus* it."""
    for name, model in setting.rewards.items():
        values, r, _ = graph.reward(Objective(model, 0.0))
        yield name, values, r, [torch.zeros(())]
    if setting.kl:
        kl, k = graph.kl(-1.0)
        yield KL, sequence_mean(kl, graph.rollout.completion_mask), torch.zeros_like(graph.e), k


@torch.no_grad()
def _greedy(setting: Setting, name: str) -> Tensor:
    """Value of each prompt's greedy completion [B]."""
    backbone, generator = setting.backbone, torch.Generator(setting.backbone.device)
    ids, mask = generate(backbone, setting.prompts, setting.length, generator, temperature=0.0, stop_early=False)
    if name == KL:
        return sequence_mean(sequence_kl(backbone, setting.prompts, ids, mask), mask).double()
    prompt_embeds, objective = backbone.embed(setting.prompts.ids), Objective(setting.rewards[name], 0.0)
    return objective.reward(prompt_embeds, setting.prompts, backbone.embed(ids), mask).double()
