"""Gradients at fixed weights: repeated, by many estimators and of several rewards; and exact ones by enumeration.

A row is one batch: G completions of each prompt, and every estimator's gradient of the expected reward from them. The
policy gradients and the straight-through ones share completions and graph, and differ in the vector-Jacobian products
that they take; `gumbel` has soft tokens and so its own rollout. All are ascent directions of the same number,
``mean over prompts of E R``, so their means can be compared.

With ``kl=True`` there is one more "reward", the exact KL to the reference, mean over a completion's tokens.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from grade.experiments.enumeration import completion_logps, every_completion
from grade.gradients import losses
from grade.gradients.estimators import EstimatorName, RelaxationConfig
from grade.gradients.objective import Objective, sequence_mean
from grade.gradients.replay import ReplayGraph
from grade.gradients.rollout import sample
from grade.gradients.straight_through import redrawn
from grade.models.backbone import Backbone
from grade.models.parameters import flatten
from grade.models.prompts import PromptBatch
from grade.models.sampling import generate
from grade.models.scoring import predicting_hidden, sequence_kl
from grade.results import progress
from grade.rewards.model import HeadSettings, RewardModel

KL = "kl"
POLICY_GRADIENTS = ("reinforce", "rloo", "remax", "grpo")
_HEAD_SCALE = 4.0  # weights of a random head are small: rewards would hardly differ between completions


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
        """For tables and figures; K is the size of the support.

        >>> Variant("gumbel_rao").name, Variant("ste", 0.5, 1, 64).name
        ('gumbel_rao, 8 draws, tau 1', 'ste, tau 0.5, K 64, 1 hop')
        """
        parts = [self.estimator, _number(self.draws, "draw") if self.estimator == "gumbel_rao" else "",
                 f"tau {self.tau:g}", f"K {self.topk}" if self.topk else "", _number(self.hops, "hop")]  # fmt: skip
        return ", ".join(part for part in parts if part)

    def relaxation(self, length: int) -> RelaxationConfig:
        """Its config for completions of ``length`` tokens."""
        return RelaxationConfig(
            estimator=self.estimator, gumbel_topk=self.topk, tau=self.tau, rao_draws=self.draws, max_new_tokens=length
        )


def _number(n: int, of: str) -> str:
    return f"{n} {of}{'s' if n > 1 else ''}" if n else ""


def random_rewards(policy: Backbone) -> dict[str, RewardModel]:
    """Random reward models on a policy's own base: ``bag`` (its embeddings) and ``trunk`` (through its layers)."""
    rewards = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for kind in ("bag", "trunk"):
            model = RewardModel(kind, policy, HeadSettings(dropout=0.0))
            with torch.no_grad():
                model.head[-1].weight.mul_(_HEAD_SCALE)
            rewards[kind] = model.requires_grad_(False)
    return rewards


def advantages(rewards: Tensor, kind: str, greedy: Tensor | None = None) -> Tensor:
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


@dataclass(frozen=True)
class FixedPolicy:
    """What gradients are taken of."""

    backbone: Backbone  # the policy
    prompts: PromptBatch  # B prompts
    group: int  # completions G of each in a row
    length: int  # completion length T
    rewards: Mapping[str, nn.Module]  # reward models by name
    variants: Sequence[Variant]  # relaxed estimators
    policy_gradients: Sequence[str] = ("rloo",)  # of `POLICY_GRADIENTS`
    kl: bool = False  # whether KL is one more "reward"

    def rows(
        self, number: int, project: Callable[[Tensor], Tensor] = lambda gradient: gradient
    ) -> dict[tuple[str, str], Tensor]:
        """So many rows: for each (reward, estimator) the gradients [R, P] on the CPU, each projected."""
        gradients = defaultdict(list)
        for row in progress(range(number), "batches of gradients"):
            for key, gradient in self._row(torch.Generator(self.backbone.device).manual_seed(row)):
                gradients[key].append(project(gradient.cpu()))
        return {key: torch.stack(parts) for key, parts in gradients.items()}

    def exact(self) -> dict[str, Tensor]:
        """Exact gradient [P] of each expected reward: ``mean over prompts of sum_y pi(y) R(y)``, all y enumerated.

        KL depends on the policy itself as well.
        """
        backbone, gradients = self.backbone, {}
        ids, mask = every_completion(backbone.vocab_size, self.length, backbone.eos_token_ids)
        probabilities = completion_logps(backbone, self.prompts, self.length).exp()  # [B, N]
        for name in [*self.rewards, *([KL] if self.kl else [])]:
            many = [self.prompts[[n] * len(ids)] for n in range(len(self.prompts))]
            if name == KL:
                values = [_dense_kl(backbone, prompts, ids, mask) for prompts in many]
            else:
                values = [self._values(name, prompts, ids, mask).detach() for prompts in many]
            expected = (probabilities * torch.stack(values)).sum(1).mean()
            grads = torch.autograd.grad(expected, backbone.trainable_parameters(), retain_graph=True)
            gradients[name] = flatten(grads)
        return gradients

    def _row(self, generator: torch.Generator) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """(reward, estimator) and gradient [P]: of all hard estimators on one rollout, of soft ones on their own."""
        backbone = self.backbone
        # With the full vocabulary or a perturbed support the hard token is an exact sample, whatever K is.
        drawn = RelaxationConfig(estimator="ste", gumbel_topk=min(64, backbone.vocab_size), max_new_tokens=self.length)
        by_rollout: dict[tuple[float, int] | None, list[Variant]] = {None: []}
        for variant in self.variants:
            soft = variant.estimator == "gumbel"
            by_rollout.setdefault((variant.tau, variant.topk) if soft else None, []).append(variant)
        for soft, variants in by_rollout.items():
            policy_gradients = () if soft else self.policy_gradients
            if not variants and not policy_gradients:
                continue
            relaxations = [variant.relaxation(self.length) for variant in variants]
            for relaxation in relaxations:
                relaxation.check(backbone.vocab_size)
            prompts = self.prompts.repeat(self.group)
            graph = ReplayGraph(backbone, sample(backbone, prompts, relaxations[0] if soft else drawn, generator))
            targets = list(self._targets(graph))
            pulls = [graph.pullback(graph.rollout if soft else redrawn(graph, relaxation, generator), relaxation)
                     for relaxation in relaxations]  # fmt: skip
            for name, values, r, k in targets:
                groups = values.double().view(-1, self.group)
                for kind in policy_gradients:
                    greedy = self._greedy(name) if kind == "remax" else None
                    coefficients = advantages(groups, kind, greedy).flatten() / len(prompts)
                    yield (name, kind), graph.parameter_gradient([graph.policy(coefficients)[0] - k[0]])
                for variant, pull in zip(variants, pulls, strict=True):
                    v, _, _ = graph.adjoint(r, k, pull, variant.hops)
                    yield (name, variant.name), -graph.parameter_gradient(v)

    def _targets(self, graph: ReplayGraph) -> Iterator[tuple[str, Tensor, Tensor, list[Tensor]]]:
        """For each reward: its name, values [B G], and adjoints r and k of *minus* it."""
        for name, model in self.rewards.items():
            values, r, _ = graph.reward(Objective(model, 0.0))
            yield name, values, r, [torch.zeros(())]
        if self.kl:
            kl, k = graph.kl(-1.0)
            yield KL, sequence_mean(kl, graph.rollout.completion_mask), torch.zeros_like(graph.e), k

    @torch.no_grad()
    def _greedy(self, name: str) -> Tensor:
        """Value of each prompt's greedy completion [B]."""
        backbone, generator = self.backbone, torch.Generator(self.backbone.device)
        ids, mask = generate(backbone, self.prompts, self.length, generator, temperature=0.0, stop_early=False)
        if name == KL:
            return sequence_mean(sequence_kl(backbone, self.prompts, ids, mask), mask).double()
        return self._values(name, self.prompts, ids, mask).double()

    def _values(self, name: str, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards [N] of completions."""
        backbone, objective = self.backbone, Objective(self.rewards[name], 0.0)
        return objective.reward(backbone.embed(prompts.ids), prompts, backbone.embed(ids), mask)


def _dense_kl(backbone: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
    """Mean KL over each completion's tokens [N], from dense logits, with gradient."""
    logp = backbone.head(predicting_hidden(backbone, prompts, ids)).log_softmax(-1)
    with torch.no_grad(), backbone.reference():
        ref_logp = backbone.head(predicting_hidden(backbone, prompts, ids)).log_softmax(-1)
    return sequence_mean((logp.exp() * (logp - ref_logp)).sum(-1), mask)
