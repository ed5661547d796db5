"""Every scored completion so far, and the reward that is distilled from them.

A completion's reward does not depend on the policy that wrote it, so all completions of a run serve every fit: the
reuse that policy gradients do not have. Features and Gram matrices grow by rows, batch by batch; beyond `window`
completions the oldest groups are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from grade.gradients.distilled.families import Family
from grade.gradients.distilled.ridge import Choice, centred, choose, coefficients

RECENT = 1024
"""Latest completions on which family and penalty are chosen: the cost is cubic, and they resemble the next ones."""
GROWTH = 0.2
"""Share of those completions that must be new before family and penalty are chosen again."""
TRUST_STEPS = 8
"""Batches over which predictions made in advance are held against the rewards that came."""


@dataclass
class Evidence:
    """Predictions made before a batch's rewards were seen, against these.

    Attributes:
        groups: Of each batch, ``sum p y`` and ``sum p^2`` of its groups [2, N], centred within groups.
    """

    groups: list[Tensor] = field(default_factory=list)

    def add(self, predicted: Tensor, rewards: Tensor, group: int) -> None:
        """Add a batch: predictions and rewards [N G], both centred."""
        products = torch.stack([predicted * rewards, predicted * predicted])
        self.groups = [*self.groups, products.view(2, -1, group).sum(2)][-TRUST_STEPS:]

    @property
    def trust(self) -> float:
        """Share of the predicted differences that came true, plus its standard error, in 0..1.

        1 before there is a prediction. With the error, because a few noisy batches must not end what works: this is a
        bound on a distilled reward that rises where the true one does not.
        """
        if not self.groups:
            return 1.0
        came, said = torch.cat(self.groups, 1)
        if not float(said.sum()) > 0:
            return 1.0
        share = came.sum() / said.sum()
        stderr = (came - share * said).square().sum().sqrt() / said.sum()
        return min(max(float(share + stderr), 0.0), 1.0)


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
        self.tokens = torch.zeros(0, 0, dtype=torch.long)
        self.rows: dict[str, Tensor] = {}
        self.grams: dict[str, Tensor] = {}
        self.choices: dict[str, Choice] = {}
        self.fresh = self.dropped = 0

    def __len__(self) -> int:
        """Completions that are kept."""
        return len(self.rewards)

    def add(self, rows: Mapping[str, Tensor], rewards: Tensor, tokens: Tensor) -> None:
        """Add a batch of whole groups.

        Args:
            rows: Features of each family [m, ...].
            rewards: [m].
            tokens: The completions [m, T], -1 where masked.
        """
        drop = max(0, len(self) + len(rewards) - self.window)
        self.dropped += drop
        self.rewards = torch.cat([self.rewards, centred(rewards.double().cpu(), self.group)])[drop:]
        self.tokens = joined([self.tokens, tokens.cpu()])[drop:]
        for name, family in self.families.items():
            new = rows[name]
            new = new if new.dtype == torch.long else centred(new, self.group)
            kept = joined([self.rows[name], new]) if name in self.rows else new
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
        """Distil, with the family and penalty that the completions before the last batch chose.

        In the first step the batch itself chooses.

        Args:
            newest: Groups of the last batch, each of which gets a fit without it.

        Returns:
            The distilled reward of the best family; None if rewards do not differ within prompts.
        """
        if not float(self.rewards.abs().max()) > 0:
            return None
        if not self.choices:
            self._choose()
        fit = self.fit_of(max(self.choices, key=lambda name: self.choices[name].r2), newest)
        # For the next step: a choice that has seen a group's rewards would bias its gradient, by some percent.
        if self.fresh >= GROWTH * min(len(self), RECENT):
            self._choose()
        return fit

    def _choose(self) -> None:
        recent, self.fresh = min(len(self), RECENT // self.group * self.group), 0
        part = slice(len(self) - recent, None)
        self.choices = {
            name: choose(self.grams[name][part, part], self.rewards[part], self.group) for name in self.families
        }

    def fit_of(self, name: str, newest: int) -> Fit:
        """Distil with a family that was chosen already; arguments as in `fit`."""
        choice = self.choices[name]
        groups = len(self) // self.group
        kept = min(newest, groups)  # a step may be larger than the window: what was dropped is in no fit
        alpha = coefficients(self.grams[name], self.rewards, self.group, choice.penalty, range(groups - kept, groups))
        alpha = torch.cat([alpha[:1], alpha[:1].expand(newest - kept, -1), alpha[1:]])
        # Rows of dense families are centred; those of buckets are not, so the coefficients are.
        alpha = torch.stack([centred(a, self.group) for a in alpha]).to(self.rows[name].device)
        return Fit(name, self.families[name].weights(alpha, self.rows[name]), choice)

    def token_counts(self, vocab: int) -> Tensor:
        """How often each token occurs in the completions that are kept [V], float64."""
        return torch.bincount(self.tokens[self.tokens >= 0], minlength=vocab).double()

    def best_of(self, names: Sequence[str]) -> str | None:
        """The best of some families; None if none was fitted."""
        known = [name for name in names if name in self.choices]
        return max(known, key=lambda name: self.choices[name].r2) if known else None

    def state(self) -> dict[str, Tensor]:
        """Everything as tensors, for a checkpoint."""
        state = {"rewards": self.rewards, "tokens": self.tokens, "counters": torch.tensor([self.fresh, self.dropped])}
        for name in self.rows:
            state |= {f"rows/{name}": self.rows[name], f"gram/{name}": self.grams[name]}
        for name, c in self.choices.items():
            state[f"choice/{name}"] = torch.tensor(astuple(c), dtype=torch.float64)
        return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue where `state` was taken."""
        self.rewards, self.tokens = state["rewards"], state["tokens"]
        self.fresh, self.dropped = state["counters"].tolist()
        for key, tensor in state.items():
            kind, _, name = key.partition("/")
            if kind == "rows":
                self.rows[name] = tensor.to(self.families[name].backbone.device)
            elif kind == "gram":
                self.grams[name] = tensor
            elif kind == "choice":
                self.choices[name] = Choice(*tensor.tolist())


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows of features below each other; lists of buckets or tokens of different length are padded with -1."""
    width = max(part.shape[1] for part in parts)
    padded = [part if part.shape[1] == width else F.pad(part, (0, width - part.shape[1]), value=-1) for part in parts]
    return torch.cat(padded)
