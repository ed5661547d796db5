r"""Values of tokens that depend on the state before them, and the policy that they call for without training.

With h the base's last state before a token v of embedding e(v), a completion's reward is explained by

    R(y) = sum_t s(y_t) + h_t' A e(y_t),

which is linear in s [V] and A [D, D]. The law that maximises ``E[value] - KL_t / c`` at every position has
``c (s(v) + h' A e(v))`` more in its logits (`grade.gradients.tilt`): a token bias ``c s``, and ``W + c E A'`` for the
head's rows W, with E the embedding table.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from grade.models.backbone import Backbone
from grade.models.batch import Completions
from grade.models.head import Head
from grade.models.scoring import predicting_hidden

PENALTIES = (10.0, 30.0, 100.0)
"""Ridge penalties that are compared on a fifth of the texts. A feature varies as counts of tokens do."""


class InContext(Backbone):
    """A base without adapter, whose policy follows values in units of the reward, times a length in nats per unit."""

    values: tuple[Tensor, Tensor] | None = None  # s [V] and A [D, D]
    rows: Tensor | None = None  # of the policy's head [V, D]

    @property
    def head(self) -> Head:
        """The policy's head; the reference's is the base's."""
        own = super().head
        return replace(own, weight=self.rows) if self.bias.on and self.rows is not None else own

    def fit(self, text: Completions) -> None:
        """Fit the values to scored texts, by ridge regression."""
        self.values = _ridge(self, text)

    def set_length(self, length: float) -> None:
        """Let the policy follow the values at this length."""
        tokens, moved = self.values
        self.set_token_bias(length * tokens)
        self.rows = self.ref_head.weight + length * self.embedding_weight @ moved.T

    def predictions(self, text: Completions) -> Tensor:
        """Rewards [n] of completions that the values predict, up to what the prompt adds."""
        tokens, moved = self.values
        counted, states = _features(self, text)
        return counted @ tokens + states @ moved.flatten()


@torch.no_grad()
def _features(policy: InContext, text: Completions) -> tuple[Tensor, Tensor]:
    """Counts of tokens [n, V], and ``sum_t h_t e(y_t)'`` [n, D D] of the base's states."""
    states = torch.cat([predicting_hidden(policy, prompts, ids) for prompts, ids, _ in text.batches(256)])
    embedded = policy.embedding_weight[text.ids] * text.mask.unsqueeze(-1)
    return _counts(text.ids, text.mask, policy), torch.einsum("ntd,nte->nde", states, embedded).flatten(1)


def _counts(ids: Tensor, mask: Tensor, policy: InContext) -> Tensor:
    return policy.embedding_weight.new_zeros(len(ids), policy.vocab_size).scatter_add_(1, ids, mask.to(policy.dtype))


def _ridge(policy: InContext, text: Completions) -> tuple[Tensor, Tensor]:
    """The values s [V] and A [D, D]; counts of the prompt's tokens take what the prompt explains."""
    counted, states = _features(policy, text)
    unit = (states.var(0).sum() / counted.var(0).sum()).sqrt()
    design = torch.cat([counted, states / unit, _counts(text.prompts.ids, text.prompts.mask, policy)], 1)
    # More features than texts: the solution is a weighted sum of rows of the design.
    products, y = design @ design.T, (text.rewards - text.rewards.mean()).to(design)
    fifth = torch.arange(len(y)) % 5 == 0

    def solved(rows: Tensor, penalty: float) -> Tensor:
        return torch.linalg.solve(products[rows][:, rows] + penalty * torch.eye(int(rows.sum())).to(y), y[rows])

    def error(penalty: float) -> float:
        return float((products[fifth][:, ~fifth] @ solved(~fifth, penalty) - y[fifth]).square().mean())

    weights = solved(fifth | ~fifth, min(PENALTIES, key=error)) @ design
    tokens, moved, _ = weights.split([counted.shape[1], states.shape[1], counted.shape[1]])
    return tokens, moved.view(policy.hidden_size, -1) / unit
