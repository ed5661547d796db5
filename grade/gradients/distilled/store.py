"""Every scored completion so far, and the reward that is distilled from them.

A completion's reward does not depend on the policy that wrote it, so all completions of a run serve every fit: the
reuse that policy gradients do not have. Features and Gram matrices grow by rows, batch by batch; beyond `window`
completions the oldest groups are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from grade.gradients.distilled.families import Family
from grade.gradients.distilled.ridge import Choice, centred, choose, coefficients

RECENT = 512
"""Latest completions on which family and penalty are chosen: the cost is cubic, and they resemble the next ones."""
GROWTH = 0.1
"""Share of those completions that must be new before family and penalty are chosen again."""
TRUST_STEPS = 8
"""Batches over which predictions made in advance are held against the rewards that came."""


@dataclass
class Evidence:
    """Predictions made before a batch's rewards were seen, against these.

    Attributes:
        products: Of each batch: ``sum p y`` and ``sum p^2``, centred within prompts.
    """

    products: list[tuple[float, float]] = field(default_factory=list)

    def add(self, predicted: Tensor, rewards: Tensor) -> None:
        """Add a batch: predictions and rewards [m], both centred."""
        self.products = [*self.products, (float(predicted @ rewards), float(predicted @ predicted))][-TRUST_STEPS:]

    @property
    def trust(self) -> float:
        """Share of the predicted differences that came true, in 0..1; 1 before there is a prediction."""
        came, said = (sum(values) for values in zip(*self.products, strict=True)) if self.products else (1.0, 1.0)
        return min(max(came / said, 0.0), 1.0) if said > 0 else 1.0


@dataclass(frozen=True)
class Fit:
    """A distilled reward.

    Attributes:
        family: Name of the family.
        weights: [1 + k, F]: fitted on all completions, then without each of the newest k groups in turn.
        choice: Penalty, R2 out of sample, slope; weights are to be multiplied by the slope.
    """

    family: str
    weights: Tensor
    choice: Choice

    @property
    def all(self) -> Tensor:
        """Weights [1, F] of the fit on all completions, with the slope."""
        return self.weights[:1] * self.choice.slope

    @property
    def left_out(self) -> Tensor:
        """Weights [k, F] without each of the newest groups, with the slope."""
        return self.weights[1:] * self.choice.slope


class Store:
    """Completions, rewards and Gram matrices.

    Args:
        families: By name, in the order of preference where they explain equally much.
        group: G completions of one prompt.
        window: Most completions that are kept.
    """

    def __init__(self, families: Mapping[str, Family], group: int, window: int) -> None:
        self.families, self.group, self.window = families, group, max(window // group, 2) * group
        self.rewards = torch.zeros(0, dtype=torch.float64)
        self.rows: dict[str, Tensor] = {}
        self.grams: dict[str, Tensor] = {}
        self.choices: dict[str, Choice] = {}
        self.fresh = self.dropped = 0

    def __len__(self) -> int:
        """Completions that are kept."""
        return len(self.rewards)

    def add(self, rows: Mapping[str, Tensor], rewards: Tensor) -> None:
        """Add a batch of whole groups.

        Args:
            rows: Features of each family [m, ...].
            rewards: [m].
        """
        drop = max(0, len(self) + len(rewards) - self.window)
        self.dropped += drop
        self.rewards = torch.cat([self.rewards, centred(rewards.double().cpu(), self.group)])[drop:]
        for name, family in self.families.items():
            new = rows[name]
            new = new if new.dtype == torch.long else centred(new, self.group)
            kept = torch.cat([self.rows[name], new]) if name in self.rows else new
            block = self._centred_block(family.gram(new, kept).cpu())
            before = self.grams.get(name, block[:, :0].T[:, :0])
            n, m = len(before), len(new)
            gram = torch.empty(n + m, n + m, dtype=torch.float64)
            gram[:n, :n], gram[n:], gram[:n, n:] = before, block, block[:, :n].T
            self.rows[name], self.grams[name] = kept[drop:], gram[drop:, drop:].contiguous()
        self.fresh += len(rewards)

    def _centred_block(self, block: Tensor) -> Tensor:
        return centred(centred(block, self.group).T.contiguous(), self.group).T

    def fit(self, newest: int) -> Fit | None:
        """Distil.

        Args:
            newest: Groups of the last batch, each of which gets a fit without it.

        Returns:
            The distilled reward of the best family; None if rewards do not differ within prompts.
        """
        if not float(self.rewards.abs().max()) > 0:
            return None
        recent = min(len(self), RECENT // self.group * self.group)
        if not self.choices or self.fresh >= GROWTH * recent:
            part, self.fresh = slice(len(self) - recent, None), 0
            self.choices = {
                name: choose(self.grams[name][part, part], self.rewards[part], self.group) for name in self.families
            }
        name = self.best
        choice = self.choices[name]
        groups = len(self) // self.group
        alpha = coefficients(
            self.grams[name], self.rewards, self.group, choice.penalty, range(groups - newest, groups)
        )  # fmt: skip
        # Rows of dense families are centred; those of buckets are not, so the coefficients are.
        alpha = torch.stack([centred(a, self.group) for a in alpha]).to(self.rows[name].device)
        return Fit(name, self.families[name].weights(alpha, self.rows[name]), choice)

    @property
    def best(self) -> str:
        """The family that explains most out of sample."""
        return max(self.choices, key=lambda name: self.choices[name].r2)

    def best_of(self, names: Sequence[str]) -> str | None:
        """The best of some families; None if none was fitted."""
        known = [name for name in names if name in self.choices]
        return max(known, key=lambda name: self.choices[name].r2) if known else None

    def state(self) -> dict[str, Tensor]:
        """Everything as tensors, for a checkpoint."""
        state = {"rewards": self.rewards, "counters": torch.tensor([self.fresh, self.dropped])}
        for name in self.rows:
            state |= {f"rows/{name}": self.rows[name], f"gram/{name}": self.grams[name]}
        for name, c in self.choices.items():
            state[f"choice/{name}"] = torch.tensor([c.penalty, c.r2, c.slope, c.stderr], dtype=torch.float64)
        return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue where `state` was taken."""
        self.rewards = state["rewards"]
        self.fresh, self.dropped = state["counters"].tolist()
        for key, tensor in state.items():
            kind, _, name = key.partition("/")
            if kind == "rows":
                self.rows[name] = tensor.to(self.families[name].backbone.device)
            elif kind == "gram":
                self.grams[name] = tensor
            elif kind == "choice":
                self.choices[name] = Choice(*tensor.tolist())

