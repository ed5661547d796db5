"""One-token counterfactuals: what another token at a place would have done to a completion's reward.

The all-action gradient needs ``s_t(v) - s_t(y_t)``, the change that one token makes, and a cheap reward can be asked
for it: at each place of an own completion y, m tokens v are drawn from the policy's law ``pi(. | y_<t)``, and y' is
scored, which is y with v instead of y_t. A v that ends the completion removes what stood after it. A v that is drawn
again is not scored again, nor is y_t itself.

Each is a row of the fit: features z, those of v less those of what it replaced, and the target ``d = R(y') - R(y)``,
less what a prior predicts of it. (What v changes for tokens after it is put down to v, also by families with context.)
Beside the completions' own rows x and rewards r, centred within groups,

    min_w  sum_i (r_i - <w, x_i>)^2 + c sum_j (d_j - <w, z_j>)^2 + lambda |w|^2,    c = var(r) / mean(d^2).

Rows weigh as the inverse variance of what the fit leaves of them (Aitken 1936), here an equal share of r and d. With
tokens of equal effect c is T / 2, and ``sqrt(c) z`` as long as x: lambda keeps its scale. `FOLDS` fits choose lambda,
and measure slope and R2, on completions and substitutions of groups of which they have seen neither: changes are many,
so this is surer than on the completions alone, and they are what the gradient is made of.

The newest `MOST` are kept, on the CPU: z of buckets as sparse rows, of dense families as rows of F numbers. Sparse fits
take conjugate gradients, dense ones the products [F, F] of all rows, less those of the rows that are left out.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import sparse
from sklearn.linear_model import Ridge
from torch import Tensor

from grade.gradients.distilled.families import Family, Observed
from grade.gradients.distilled.ridge import PENALTIES, Choice, calibrated
from grade.gradients.objective import Objective
from grade.gradients.policy_gradient import scored_rewards
from grade.models.backbone import Backbone
from grade.models.gather import whole
from grade.models.head import chunk_rows
from grade.models.prompts import PromptBatch
from grade.models.sampling import draw, forbid_eos, is_eos
from grade.models.scoring import predicting_hidden

MOST = 2**15
"""Substitutions that are kept."""
FOLDS = 5
"""Fits of the cross-validation."""
Rows = sparse.csr_matrix | np.ndarray
"""Features [n, F]."""


@dataclass(frozen=True)
class Substituted:
    """N substitutions in a batch."""

    completions: np.ndarray  # numbers of the completions [N]
    changes: np.ndarray  # d [N] float64, NaN where no function scored
    rows: dict[str, Rows]  # z [N, F] of each family


@torch.no_grad()
def draw_substitutions(backbone: Backbone, seen: Observed, number: int, least: int) -> tuple[Tensor, Tensor, Tensor]:
    """Completions, places and tokens [N] of up to ``number`` other tokens at each place.

    From the distribution that was sampled from: no end-of-sequence in the first ``least`` tokens. A completion seeds
    its own draws: they depend on no other completion, nor on the process, nor on where a run was resumed.
    """
    hidden, drawn = predicting_hidden(backbone, seen.prompts, seen.ids), []
    step, eos = chunk_rows(backbone.vocab_size, seen.ids.numel()), backbone.eos_token_ids
    with whole(backbone.head.weight):
        for row, tokens in enumerate(seen.tokens):
            generator = torch.Generator(tokens.device).manual_seed(zlib.crc32(tokens.cpu().numpy().tobytes(), row))
            for places in (tokens >= 0).nonzero().split(step):
                logits = forbid_eos(backbone.head(hidden[row, places[:, 0]]), None, places, least, eos)
                each = torch.stack([draw(logits, generator)[0] for _ in range(number)], 1)
                drawn.append(torch.stack([torch.full_like(each, row), places.expand_as(each), each], 2).flatten(0, 1))
    rows, places, tokens = torch.cat(drawn).unique(dim=0).unbind(1)
    other = tokens != seen.ids[rows, places]
    return rows[other], places[other], tokens[other]


@torch.no_grad()
def substitute(
    families: Mapping[str, Family], seen: Observed, reward: Tensor, objective: Objective, number: int, least: int
) -> Substituted:
    """Draw substitutions of completions with rewards [B], and score them, B at a time."""
    backbone, at = next(iter(families.values())).backbone, torch.arange(seen.ids.shape[1], device=seen.ids.device)
    rows, places, tokens = draw_substitutions(backbone, seen, number, least)
    here, end = at == places.unsqueeze(1), is_eos(tokens, backbone.eos_token_ids).unsqueeze(1)
    cut = end & (at > places.unsqueeze(1))
    ids = torch.where(here, tokens.unsqueeze(1), seen.ids[rows])
    mask = torch.where(cut, 0, seen.mask[rows])
    recorded = getattr(objective.reward_model, "recorded", None)  # for the log, of own completions alone
    before = len(recorded or ())
    scores = [scored_rewards(backbone, seen.prompts[rows[part]], ids[part], mask[part], objective)
              for part in torch.arange(len(ids), device=ids.device).split(len(seen.ids)) if len(part)]  # fmt: skip
    del (recorded or [])[before:]
    changes = torch.cat([reward[:0], *scores]).double() - reward[rows].double()
    new, column = (here | cut & seen.mask[rows].bool()).nonzero(as_tuple=True)
    entries = (np.ones(len(new)), (new.cpu().numpy(), (rows[new] * len(at) + column).cpu().numpy()))
    replaced = sparse.csr_matrix(entries, (len(ids), seen.ids.numel()))  # which tokens [B T] each one takes away
    every = torch.arange(len(seen.ids), device=ids.device).repeat_interleave(len(at)), at.repeat(len(seen.ids))
    added, own = _alone(seen, rows, places, tokens), _alone(seen, *every, seen.ids.flatten())
    z = {name: family.matrix(family.rows(added)) - replaced @ family.matrix(family.rows(own))
         for name, family in families.items()}  # fmt: skip
    z = {name: each.sorted_indices() if sparse.issparse(each) else
         torch.from_numpy(each).to(families[name].dtype).numpy() for name, each in z.items()}  # fmt: skip
    return Substituted(rows.cpu().numpy(), changes.cpu().numpy(), z)


def _alone(seen: Observed, rows: Tensor, places: Tensor, tokens: Tensor) -> Observed:
    """Tokens [N] at these places, as completions of one token: additive features are sums of theirs."""
    before = seen.before[rows, places].unsqueeze(1)
    ones = torch.ones_like(before)
    return Observed(
        PromptBatch(before, ones), tokens.unsqueeze(1), ones, seen.predicting[rows, places].unsqueeze(1), {}
    )


@dataclass(frozen=True)
class Stack:
    """Completions and substitutions of whole groups, as features of one family."""

    own: Rows  # x [n, F]
    rewards: np.ndarray  # r [n]
    rows: Rows  # z [N, F]
    changes: np.ndarray  # d [N]
    groups: np.ndarray  # number of each row's group [n + N]
    size: int  # G

    def choose(self) -> Choice | None:
        """The weight c, and the penalty that explains most out of sample; None where nothing can be fitted."""
        n, square, own = len(self.rewards), np.square(self.rewards).sum(), self.own
        changed = np.square(self.changes).mean() if len(self.changes) else 0.0
        scale = (own.multiply(own) if sparse.issparse(own) else own * own).sum() / max(n, 1)
        if n < 2 * self.size or not min(square, changed, scale) > 0:
            return None
        weight, penalties = float(square / (n - n // self.size) / changed), [float(p * scale) for p in PENALTIES]
        rows, targets = self.together(weight)
        fold = self.groups % min(FOLDS, n // self.size)
        fits = self.weights(weight, penalties, [fold == number for number in range(fold.max() + 1)])
        values = np.concatenate([targets[None], np.zeros((len(penalties), len(targets)))])
        for number, each in enumerate(fits):
            values[1:, fold == number] = (rows[fold == number] @ each.T).T
        # In groups of one size, where zeros add nothing.
        order, counts = np.argsort(self.groups, kind="stable"), np.unique(self.groups, return_counts=True)[1]
        padded = np.zeros((len(values), len(counts), counts.max()))
        padded[:, np.arange(counts.max()) < counts[:, None]] = values[:, order]
        targets, *predicted = torch.from_numpy(padded).flatten(1)
        slopes = (calibrated(each, targets, int(counts.max())) for each in predicted)
        choices = [Choice(penalty, *slope, weight) for penalty, slope in zip(penalties, slopes, strict=True)]
        return max(choices, key=lambda choice: choice.r2)

    def together(self, weight: float) -> tuple[Rows, np.ndarray]:
        """All rows [n + N, F] and targets [n + N]: completions, then substitutions times the root of their weight."""
        parts = [self.own, self.rows * weight**0.5]
        rows = sparse.vstack(parts, format="csr") if sparse.issparse(self.own) else np.concatenate(parts)
        return rows, np.concatenate([self.rewards, self.changes * weight**0.5])

    def weights(self, weight: float, penalties: Sequence[float], left_out: Sequence[np.ndarray]) -> np.ndarray:
        """Weights [L, P, F] at each penalty, without the rows of each of L masks [n + N]."""
        rows, targets = self.together(weight)
        if sparse.issparse(rows):
            return np.array([[
                Ridge(penalty, fit_intercept=False, solver="sparse_cg", tol=1e-8).fit(rows[~out], targets[~out]).coef_
                for penalty in penalties] for out in left_out])  # fmt: skip
        rows, targets = torch.from_numpy(rows), torch.from_numpy(targets)
        gram, right, eye, fits = rows.T @ rows, rows.T @ targets, torch.eye(rows.shape[1], dtype=torch.float64), []
        for out in left_out:
            own, own_targets = rows[out], targets[out]
            square, product = gram - own.T @ own, (right - own.T @ own_targets).unsqueeze(1)
            factors = torch.linalg.cholesky(torch.stack([square + penalty * eye for penalty in penalties]))
            fits.append(torch.cholesky_solve(product, factors).squeeze(2))
        return torch.stack(fits).numpy()


class Substitutions:
    """The newest substitutions of a run; ``calls`` were scored so far."""

    def __init__(self, families: Mapping[str, Family], group: int) -> None:
        self.families, self.group, self.calls = families, group, 0
        self.rows: dict[str, Rows] = {}
        self.about = np.zeros((3, 0))  # number of the group in the run, d, and what a prior predicts of d

    def add(self, new: Substituted, first: int, prior: tuple[str, Tensor] | None) -> None:
        """Add those of a batch whose first group has this number; a prior is a family and its weights [1, F]."""
        scored = np.isfinite(new.changes)
        known = new.rows[prior[0]] @ prior[1][0].double().cpu().numpy() if prior else 0 * new.changes
        about = np.stack([first + new.completions // self.group, new.changes, known])[:, scored]
        self.calls, self.about = self.calls + len(scored), np.concatenate([self.about, about], 1)[:, -MOST:]
        for name, rows in new.rows.items():
            parts = [self.rows[name], rows[scored]] if name in self.rows else [rows[scored]]
            stacked = sparse.vstack(parts, format="csr") if sparse.issparse(rows) else np.concatenate(parts)
            self.rows[name] = stacked[-MOST:]

    def stack(self, name: str, own: Rows, rewards: Tensor, first: int, prior_weight: float) -> Stack:
        """With completions: features [n, F] and centred targets [n] of groups that begin with this number."""
        n = len(rewards)
        centre = sparse.kron(sparse.identity(n // self.group), np.eye(self.group) - 1 / self.group, format="csr")
        kept = self.about[0] >= first
        groups, changes, known = self.about[:, kept]
        groups = np.concatenate([first + np.arange(n) // self.group, groups]).astype(int)
        changes = changes - prior_weight * known
        return Stack(centre @ own, rewards.numpy(), self.rows[name][kept], changes, groups, self.group)

    def state(self) -> dict[str, Tensor]:
        """Everything as tensors, for a checkpoint; of sparse rows the row, column and value of each entry [3, E]."""
        entries = {name: np.stack([(each := rows.tocoo()).row, each.col, each.data]) if sparse.issparse(rows) else rows
                   for name, rows in self.rows.items()}  # fmt: skip
        entries |= {"about": self.about, "calls": np.array(self.calls)}
        return {name: torch.from_numpy(each) for name, each in entries.items()} if self.rows else {}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue where `state` was taken."""
        rows = {"about": np.zeros((3, 0)), "calls": 0} | {name: each.numpy() for name, each in state.items()}
        self.about, self.calls, self.rows = rows.pop("about"), int(rows.pop("calls")), {}
        for name, each in rows.items():
            if (size := getattr(self.families[name], "size", None)) is not None:
                entries = each[2], each[:2].astype(int)
                each = sparse.csr_matrix(entries, (self.about.shape[1], size))
            self.rows[name] = each
