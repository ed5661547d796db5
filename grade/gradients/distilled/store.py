"""Every scored completion so far, and the reward that is distilled from them.

A completion's reward does not depend on the policy that wrote it, so all completions of a run serve every fit: the
reuse that policy gradients do not have. Features and Gram matrices grow by rows; beyond `window` completions the oldest
groups are dropped.

A fit of n completions costs ``n^3``, and one more batch hardly changes it once n is large. So completions wait until
they are a share of those that were fitted, ``(n / LARGE)^2 / 2``: 2 % of 400, half of 2,048 and of more. The time per
completion then does not grow with n. A step without a fit of its own uses the last one, which has seen none of its
rewards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from grade.gradients.distilled.families import Family
from grade.gradients.distilled.ridge import Choice, Spectrum, centred, choose, coefficients, negligible

RECENT = 1024
"""Latest completions on which family and penalty are chosen: the cost is cubic, and they resemble the next ones."""
LARGE = 2048
"""Above this many completions, refit when half are new and reselect family and penalty when all are; below, both
thresholds shrink with the square of n / LARGE."""
TRUST_STEPS = 8
"""Batches used to validate predictions."""


@dataclass
class Evidence:
    """How well predictions that were made before a batch's rewards were known agree with these rewards."""

    # of each batch, ``sum p y``, ``sum p^2`` and ``sum y^2`` of its groups [3, N], centred within groups
    groups: list[Tensor] = field(default_factory=list)

    def add(self, predicted: Tensor, rewards: Tensor, group: int) -> None:
        """Add a batch: predictions p and rewards y [N G], both centred; p that is rounding is none."""
        predicted = torch.zeros_like(predicted) if negligible(predicted, rewards) else predicted
        products = torch.stack([predicted * rewards, predicted * predicted, rewards * rewards])
        self.groups = [*self.groups, products.view(3, -1, group).sum(2)][-TRUST_STEPS:]

    @property
    def trust(self) -> float:
        """Slope of rewards on predictions, ``sum p y / sum p^2``, plus its standard error, clipped to 0..1.

        1 before there is a prediction. With the error, because a few noisy batches must not end what works: this is a
        bound on a distilled reward that rises where the true one does not.
        """
        if not self.groups:
            return 1.0
        products, squares, _ = torch.cat(self.groups, 1)
        if not float(squares.sum()) > 0:
            return 1.0
        slope = products.sum() / squares.sum()
        stderr = (products - slope * squares).square().sum().sqrt() / squares.sum()
        return min(max(float(slope + stderr), 0.0), 1.0)

    def r2(self, weight: float) -> float:
        """Share of the rewards' variance that predictions times ``weight`` explain, at least 0."""
        products, squares, total = torch.cat(self.groups, 1).sum(1).tolist()
        return max(0.0, (2 * weight * products - weight * weight * squares) / total) if total > 0 else 0.0


@dataclass(frozen=True)
class Fit:
    """A distilled reward."""

    family: str  # name of the family
    weights: Tensor  # [1 + k, F]: fitted on all completions, then without each of the newest k groups in turn
    choice: Choice  # penalty, R2 out of sample, slope; weights are to be multiplied by the slope
    predates: bool = True  # whether family and choice were selected before the newest groups' rewards were known

    @property
    def summary(self) -> str:
        """In a few words."""
        return f"{self.family} explains {self.choice.r2:.3f} of the reward out of sample"

    @property
    def all(self) -> Tensor:
        """Weights [1, F] of the fit on all completions, with the slope."""
        return self.weights[:1] * self.choice.slope

    def without(self, first: int, groups: int) -> Tensor:
        """Weights [groups, F] of the fits without each of these groups of the step, with the slope.

        Of a fit that is older than the step they are [1, F]: it has seen none of the groups.
        """
        return self.weights[1 + first : 1 + first + groups] * self.choice.slope if len(self.weights) > 1 else self.all


Scored = dict[str, Tensor]
"""Completions: ``rewards`` [n], centred; with a prior its predictions ``prior`` [n]; ``tokens`` [n, T], -1 where
masked; and the features of each family [n, ...], by its name, centred if they are dense."""


class Store:
    """Completions in groups of one prompt, rewards and Gram matrices; of the newest ``window`` completions at most.

    Families come in the order of preference where they explain equally much.
    """

    def __init__(self, families: Mapping[str, Family], group: int, window: int) -> None:
        self.families, self.group, self.window = families, group, max(window // group, 2) * group
        self.kept: Scored = {
            "rewards": torch.zeros(0, dtype=torch.float64), "tokens": torch.zeros(0, 0, dtype=torch.long)
        }  # fmt: skip
        self.grams: dict[str, Tensor] = {}
        self.choices: dict[str, Choice] = {}
        self.waiting: list[Scored] = []
        self.since_choice = self.dropped = 0
        self.prior_weight = 0.0

    @property
    def targets(self) -> Tensor:
        """What is fitted [n]: the rewards, less what a prior predicts of them times ``prior_weight``."""
        rewards, prior = self.kept["rewards"], self.kept.get("prior")
        return rewards if prior is None else rewards - self.prior_weight * prior

    def __len__(self) -> int:
        """Completions that are kept, with those that wait."""
        return sum(len(part["rewards"]) for part in (self.kept, *self.waiting))

    def append(self, rows: Mapping[str, Tensor], rewards: Tensor, tokens: Tensor, prior: Tensor | None = None) -> None:
        """Let a batch of whole groups wait for `absorb`: features of each family [m, ...], rewards [m], tokens [m, T].

        Tokens are -1 where masked; ``prior`` are a prior's predictions [m], in every batch or in none.
        """
        rows = {name: r.detach() for name, r in rows.items()}
        dense = {name: r if r.dtype == torch.long else centred(r, self.group) for name, r in rows.items()}
        rewards = centred(rewards.detach().double().cpu(), self.group)
        given = {} if prior is None else {"prior": centred(prior, self.group)}
        self.waiting.append({"rewards": rewards, **given, "tokens": tokens.cpu(), **dense})

    @property
    def refit_due(self) -> bool:
        """Whether enough completions wait for another fit to be worth its time."""
        fitted = len(self.kept["rewards"])
        return len(self) - fitted >= growth(fitted) / 2

    def add(self, rows: Mapping[str, Tensor], rewards: Tensor, tokens: Tensor) -> None:
        """`append` and `absorb`."""
        self.append(rows, rewards, tokens)
        self.absorb()

    def absorb(self) -> None:
        """Enter what waits into features and Gram matrices, and drop what is beyond the window."""
        if not self.waiting:
            return
        new, self.waiting = _join(self.waiting), []
        drop = max(0, len(self) + len(new["rewards"]) - self.window)
        self.dropped, self.since_choice = self.dropped + drop, self.since_choice + len(new["rewards"])
        self.kept = {name: rows[drop:] for name, rows in _join([self.kept, new]).items()}
        for name, family in self.families.items():
            kept = self.kept[name]
            block = centred(family.gram(new[name][-len(kept) :], kept).cpu(), self.group)
            block = centred(block.T.contiguous(), self.group).T
            before = self.grams[name][drop:, drop:] if name in self.grams else block[:0, :0]
            n = len(before)
            gram = torch.empty(len(kept), len(kept), dtype=torch.float64)
            gram[:n, :n], gram[n:], gram[:n, n:] = before, block, block[:, :n].T
            self.grams[name] = gram

    def fit(self, newest: int) -> Fit | None:
        """Distil everything, with the family and penalty that the completions before the last batch chose.

        In the first step the batch itself chooses. Each of the ``newest`` groups, those of the last batch, gets a fit
        without it. None if rewards do not differ within prompts, or no fit can be made.
        """
        self.absorb()
        if not float(self.targets.abs().max()) > 0:
            return None
        try:
            if not self.choices:
                self._choose()
            fit = self.fit_of(self.best_of(self.families), newest)
        except (torch.linalg.LinAlgError, ArithmeticError):
            fit = None
        # For the next fit: a choice made on a group's own rewards biases its gradient by a few percent.
        if self.since_choice >= growth(len(self)):
            with suppress(torch.linalg.LinAlgError, ArithmeticError):
                self._choose()
        return fit if fit is not None and fit.all.isfinite().all() and fit.weights.isfinite().all() else None

    def _choose(self) -> None:
        recent, self.since_choice = min(len(self), RECENT // self.group * self.group), 0
        part = slice(len(self) - recent, None)
        self.choices = {
            name: choose(Spectrum.of(self.grams[name][part, part]), self.targets[part], self.group)
            for name in self.families
        }

    def fit_of(self, name: str, newest: int) -> Fit:
        """Distil with a family that was chosen already; arguments as in `fit`."""
        choice, rows, groups = self.choices[name], self.kept[name], len(self) // self.group
        kept = min(newest, groups)  # a step may be larger than the window: what was dropped is in no fit
        left_out = range(groups - kept, groups)
        alpha = coefficients(self.grams[name], self.targets, self.group, choice.penalty, left_out)
        alpha = torch.cat([alpha[:1], alpha[:1].expand(newest - kept, -1), alpha[1:]])
        # Rows of dense families are centred; those of buckets are not, so the coefficients are.
        alpha = torch.stack([centred(a, self.group) for a in alpha]).to(rows.device)
        return Fit(name, self.families[name].weights(alpha, rows), choice)

    def token_counts(self, vocab: int) -> Tensor:
        """How often each token occurs in the completions that are kept [V], float64."""
        tokens = joined([part["tokens"] for part in (self.kept, *self.waiting)])
        return torch.bincount(tokens[tokens >= 0], minlength=vocab).double()

    def best_of(self, names: Iterable[str]) -> str | None:
        """The best of some families; None if none was fitted."""
        known = [name for name in names if name in self.choices]
        return max(known, key=lambda name: self.choices[name].r2) if known else None

    def state(self) -> dict[str, Tensor]:
        """Everything as tensors, for a checkpoint."""
        choices = {name: torch.tensor(astuple(c), dtype=torch.float64) for name, c in self.choices.items()}
        groups = {"kept": self.kept, "gram": self.grams, "choice": choices}
        if self.waiting:  # as one batch, as `absorb` will take them
            groups["waiting"] = _join(self.waiting)
        state = {f"{kind}/{name}": tensor for kind, group in groups.items() for name, tensor in group.items()}
        state["counters"] = torch.tensor([self.since_choice, self.dropped])
        return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue where `state` was taken."""
        device = next(iter(self.families.values())).backbone.device
        groups = defaultdict[str, dict[str, Tensor]](dict)
        for key, tensor in state.items():
            kind, _, name = key.partition("/")
            features = kind in ("kept", "waiting") and name in self.families
            groups[kind][name] = tensor.to(device) if features else tensor
        self.kept, self.grams = groups["kept"], groups["gram"]
        self.waiting = [groups["waiting"]] if groups["waiting"] else []
        self.since_choice, self.dropped = state["counters"].tolist()
        self.choices = {name: Choice(*values.tolist()) for name, values in groups["choice"].items()}


def growth(completions: int) -> float:
    """New completions that make another choice of family and penalty worth its time.

    >>> [growth(n) for n in (0, 128, 1024, 2048, 4096)]
    [0.0, 0.5, 256.0, 2048.0, 4096.0]
    """
    return completions * min((completions / LARGE) ** 2, 1.0)


def _join(parts: Sequence[Scored]) -> Scored:
    """Completions below each other; the last part has all that there is of them."""
    return {name: joined([part[name] for part in parts if name in part]) for name in parts[-1]}


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Rows below each other; lists of buckets or tokens of different length are padded with -1."""
    if parts[0].ndim == 1:
        return torch.cat(parts)
    width = max(part.shape[1] for part in parts)
    padded = [part if part.shape[1] == width else F.pad(part, (0, width - part.shape[1]), value=-1) for part in parts]
    return torch.cat(padded)
