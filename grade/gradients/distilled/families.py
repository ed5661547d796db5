"""What a distilled reward is linear in: how often tokens occur, or the sum of their embeddings.

A family turns completions into rows of features, and weights [k, F] fitted on them back into the values ``s(v)`` of
every token v, from which the all-action gradient is made (`grade.models.head.expected_values`).

| family | feature of a completion | value of token v |
|---|---|---|
| `counts` | how often each token occurs [V] | ``w_v`` |
| `bag` | sum of the tokens' frozen embeddings [D] | ``<w, E_v>`` |

The sum of the values of a completion's tokens is the distilled reward itself, and no value depends on a token: that
makes the corrected gradient unbiased (`grade.gradients.distilled.learner`).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.sparse import csr_matrix
from torch import Tensor

from grade.config import allowed_names
from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.models.head import Values, embedding_values, expected_values, wide
from grade.models.sampling import early_rows


class Family:
    """One kind of features.

    Subclasses define, for completions [B, T] with masks and weights [k, F], each for an equal run of the completions:

    - ``rows(ids, mask)``: features, dense [B, F], or token ids [B, T] with -1 where masked, whose counts are meant;
    - ``table(weights)``: from row numbers of the weights [n] to the values of all tokens [n, V];
    - ``token_values(weights, ids, mask)``: values [B, T] of the completions' tokens, 0 where masked.
    """

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self.dtype = wide(backbone.dtype)

    def share(self, r2: float) -> float:
        """Share f, in 0..1, of the reward's squared gradient that is taken to be the distilled one's: the root of R2.

        A rough rule, and a cautious one, as part of the reward's variance is interactions that no gradient has. Token
        counts with R2 of .07, .09, .53 and .68 had squared cosines to the gradient of .26, .58, .77 and .87.
        """
        return math.sqrt(min(max(r2, 0.0), 1.0))

    def values(self, weights: Tensor, ids: Tensor) -> Values:
        """Values of all tokens at positions of completions [B, T] (`grade.models.head.Values`)."""
        fits, table, length = fit_numbers(len(weights), ids), self.table(weights), ids.shape[1]

        def values(positions: Tensor) -> Tensor:
            return table(fits[(positions if len(weights) > 1 else positions[:1]) // length])

        values.reads = getattr(table, "reads", ())
        return values

    def typical(self, weights: Tensor) -> Tensor:
        """Values [V] of all tokens by weights [1, F]."""
        return self.table(weights)(torch.zeros(1, dtype=torch.long, device=weights.device))[0]

    def expected(self, weights: Tensor, ids: Tensor, mask: Tensor, hidden: Tensor, min_new_tokens: int) -> Tensor:
        """``E_pi s`` at each token [B, T], 0 where masked, from the policy's hidden states [B, T, D].

        Under the distribution that is sampled from: no end-of-sequence before ``min_new_tokens``.
        """
        head, rows, early = self.backbone.head, hidden.flatten(0, 1), early_rows(mask, min_new_tokens)
        expected = expected_values(head, rows, self.values(weights, ids), self.backbone.eos_token_ids, early)
        return expected.view(mask.shape) * mask

    def gram(self, new: Tensor, rows: Tensor) -> Tensor:
        """Inner products [m, n] of rows, float64."""
        return (new @ rows.T).double()

    def weights(self, coefficients: Tensor, rows: Tensor) -> Tensor:
        """Weights [k, F] of fits with coefficients [k, n]."""
        return coefficients.to(rows.dtype) @ rows

    def predict(self, weights: Tensor, rows: Tensor) -> Tensor:
        """Distilled rewards [B], up to a constant, of rows [B, ...] by weights [F]."""
        return rows @ weights

    def matrix(self, rows: Tensor) -> csr_matrix | np.ndarray:
        """The rows [B, F] as scikit-learn reads them, float64."""
        return rows.double().cpu().numpy()


def fit_numbers(fits: int, ids: Tensor) -> Tensor:
    """Which of k fits each of B completions belongs to [B]: they lie in k equal runs, one for each fit."""
    return torch.arange(fits, device=ids.device).repeat_interleave(len(ids) // fits)


class Counts(Family):
    """Token counts, kept as the token ids themselves."""

    def rows(self, ids: Tensor, mask: Tensor) -> Tensor:  # noqa: D102
        return torch.where(mask.bool(), ids, -1)

    def table(self, weights: Tensor) -> Values:  # noqa: D102
        return lambda fits: weights[fits]

    def token_values(self, weights: Tensor, ids: Tensor, mask: Tensor) -> Tensor:  # noqa: D102
        return weights[fit_numbers(len(weights), ids).unsqueeze(1), ids] * mask

    def gram(self, new: Tensor, rows: Tensor) -> Tensor:  # noqa: D102
        return torch.from_numpy((self.matrix(new) @ self.matrix(rows).T).toarray())

    def matrix(self, rows: Tensor) -> csr_matrix:  # noqa: D102
        rows = rows.cpu()
        where, _ = (kept := rows >= 0).nonzero(as_tuple=True)
        ones = torch.ones(len(where), dtype=torch.float64)
        return csr_matrix((ones.numpy(), (where.numpy(), rows[kept].numpy())), (len(rows), self.backbone.vocab_size))

    def weights(self, coefficients: Tensor, rows: Tensor) -> Tensor:  # noqa: D102
        size = self.backbone.vocab_size + 1  # with a place for -1, which is dropped
        weights = torch.zeros(len(coefficients), size, dtype=self.dtype, device=rows.device)
        repeated = coefficients.to(self.dtype).repeat_interleave(rows.shape[1], 1)
        return weights.index_add_(1, rows.flatten() % size, repeated)[:, :-1]

    def predict(self, weights: Tensor, rows: Tensor) -> Tensor:  # noqa: D102
        return (weights[rows.clamp_min(0)] * (rows >= 0)).sum(1)


class Bag(Family):
    """Sum of frozen embeddings."""

    def rows(self, ids: Tensor, mask: Tensor) -> Tensor:  # noqa: D102
        return (self._embeds(ids) * mask.unsqueeze(-1)).sum(1)

    def table(self, weights: Tensor) -> Values:  # noqa: D102
        return embedding_values(self.backbone.embedding_weight, self.backbone.embedding_scale, weights)

    def token_values(self, weights: Tensor, ids: Tensor, mask: Tensor) -> Tensor:  # noqa: D102
        return (weights[fit_numbers(len(weights), ids)].unsqueeze(1) * self._embeds(ids)).sum(-1) * mask

    def _embeds(self, ids: Tensor) -> Tensor:
        return self.backbone.embed(ids).to(self.dtype)


FAMILIES = {"counts": Counts, "bag": Bag}


def make_family(name: str, backbone: Backbone) -> Family:
    """A family by name."""
    if name not in FAMILIES:
        raise InputError("distil_families", name, allowed_names(name, FAMILIES))
    return FAMILIES[name](backbone)
