"""What a distilled reward may be linear in: tokens, embeddings, n-grams, tokens in their context, hidden states.

A family turns completions into rows of features, and weights [k, F] fitted on them back into the values ``s_t(v)`` of
every token v at every position t, from which the all-action gradient is made (`grade.models.head.expected_values`).

| family | feature of a completion | value of token v at position t |
|---|---|---|
| `counts` | how often each token occurs [V] | ``w_v`` |
| `bag` | sum of the tokens' frozen embeddings [D] | ``<w, E_v>`` |
| `ngrams` | hashed single tokens and pairs | ``w_h(v) + w_h(y_{t-1}, v)`` |
| `values` | ``sum_t (A h_t) * (B E_{y_t})``, a sketch of ``sum_t h_t x E_{y_t}`` | ``<B^T (w * A h_t), E_v>`` |
| `hinted` | ``exp L_T``, ``sum_t l_t(y_t)``; see below | ``w (exp(L_{t-1} + l_t(v)) - exp L_{t-1}) + w' l_t(v)`` |
| `trunk<d>` | mean hidden state of the frozen base after d layers [D] | to first order, ``<dR/de_t, E_v>`` |

`hinted` reads completions as a teacher q does, usually the base p itself with a hint in front of the prompt x: the
answer, a worked example, an instruction. With ``l_t(v) = log q(v | hint, x, y_<t) - log p(v | x, y_<t)`` and
``L_t = l_1(y_1) + ... + l_t(y_t)``, Bayes' rule says ``exp L_t = p(hint | x, y_<=t) / p(hint | x)``: how much more
probable the text has made the hint. Where a hint means success this is the value of a prefix, up to a factor. Methods
of self-distillation learn ``sum_t l_t`` with weight 1; here rewards decide both weights, and a hint that says nothing
of them gets none. L and l are cut at `MOST_NATS`: a few tokens would decide the fit.

All but `trunk<d>` are additive: the sum of the completion's own values is the distilled reward itself, and values at t
depend on what stands before t only (``h_t`` is the base's hidden state there). That makes the corrected gradient
unbiased (`grade.gradients.distilled.learner`). The sketch (Rademacher A and B; Pham and Pagh 2013) has the kernel
``<h, h'> <E, E'>`` in expectation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import csr_matrix
from torch import Tensor

from grade.errors import InputError

HINTED = "hinted"
from grade.models.backbone import Backbone
from grade.models.head import Values, chunk_rows, embedding_values, expected_values, wide
from grade.models.prompts import PromptBatch, Rows
from grade.models.sampling import early_rows
from grade.models.scoring import pooled_states, predicting_hidden

SKETCH = 2048
"""Features of `values`."""
BUCKETS = 2**15
"""Features of `ngrams`."""
MOST_NATS = 1.0
"""Where L, from above, and l of `hinted` are cut."""
ADDITIVE = ("counts", "bag", "ngrams", "values")
"""Additive families that need nothing but the policy."""


@dataclass(frozen=True)
class Observed(Rows):
    """Completions as the families see them."""

    prompts: PromptBatch  # B prompts
    ids: Tensor  # completions [B, T]
    mask: Tensor  # [B, T]
    predicting: Tensor  # the frozen base's hidden states that predict each token [B, T, D]
    pooled: dict[int, Tensor]  # its pooled states [B, D] by depth
    hinted: Tensor | None = None  # a teacher's hidden states that predict each token [B, T, D_q]
    told: Tensor | None = None  # its log-probability of each token less the base's [B, T]

    @classmethod
    def of(
        cls, backbone: Backbone, families: Iterable[Family], prompts: PromptBatch, ids: Tensor, mask: Tensor
    ) -> Observed:
        """Completions with the states that these families need."""
        depths = sorted({family.depth for family in families if family.depth is not None})
        with torch.no_grad(), backbone.reference():
            # As the policy's own pass: another one's rounding would be a KL where there is none, and have a gradient.
            states = predicting_hidden(backbone, prompts, ids)
            pooled = pooled_states(backbone, prompts, backbone.embed(ids), mask, depths) if depths else {}
        for family in families:
            if family.teacher is not None:
                hinted = family.teacher.hidden(prompts, ids)
                return cls(prompts, ids, mask, states, pooled, hinted, family.told_by(states, hinted, ids, mask))
        return cls(prompts, ids, mask, states, pooled)

    @property
    def before(self) -> Tensor:
        """The token before each of the completions' [B, T]."""
        return torch.cat([self.prompts.ids[:, -1:], self.ids[:, :-1]], 1)

    @property
    def tokens(self) -> Tensor:
        """Completions [B, T], -1 where masked."""
        return torch.where(self.mask.bool(), self.ids, -1)

    def fit_numbers(self, fits: int) -> Tensor:
        """Which of k fits each completion belongs to [B]: they lie in k equal runs, one for each fit."""
        return torch.arange(fits, device=self.ids.device).repeat_interleave(len(self.ids) // fits)


class Family:
    """One kind of features, made by a backbone's frozen base.

    Subclasses define, with weights [k, F], each for an equal run of the completions:

    - ``rows(seen)``: features of completions, dense [B, F], or buckets of tokens [B, M] with -1 for none;
    - ``values(weights, seen)``: values of all tokens at positions (`grade.models.head.Values`);
    - ``own(weights, seen)``: values [B, T] of the completions' own tokens, 0 where masked;
    - ``typical(weights, seen)``: values [V] of tokens by weights [1, F], averaged over positions.
    """

    additive: bool = True  # see the module
    reads_states: bool = False  # whether values depend on the base's hidden states
    depth: int | None = None  # the depth whose pooled states it needs
    teacher: Teacher | None = None  # the teacher whose states it needs

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self.dtype = wide(backbone.dtype)

    def share(self, r2: float) -> float:
        """Share f, in 0..1, of the reward's squared gradient that is taken to be the distilled one's: the root of R2.

        A rough rule, and a cautious one, as part of the reward's variance is interactions that no gradient has. Token
        counts with R2 of .07, .09, .53 and .68 had squared cosines to the gradient of .26, .58, .77 and .87, but token
        values with R2 of .003 had .46.
        """
        return math.sqrt(min(max(r2, 0.0), 1.0))

    def expected(self, weights: Tensor, seen: Observed, hidden: Tensor, min_new_tokens: int) -> Tensor:
        """``E_pi s_t`` at each token [B, T], 0 where masked, from the policy's hidden states [B, T, D].

        Under the distribution that is sampled from: no end-of-sequence before ``min_new_tokens``.
        """
        head, rows, values = self.backbone.head, hidden.flatten(0, 1), self.values(weights, seen)
        early = early_rows(seen.mask, min_new_tokens)
        return expected_values(head, rows, values, self.backbone.eos_token_ids, early).view(seen.mask.shape) * seen.mask

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


class _Buckets(Family):
    """Sparse features: a completion is a list of buckets, each of its tokens is in one or several of ``size``.

    Subclasses define ``buckets(ids, before)`` of tokens and those that stand before them; the first is the same
    whatever stands before.
    """

    size: int

    def rows(self, seen: Observed) -> Tensor:  # noqa: D102
        mask = seen.mask.bool()
        return torch.cat([torch.where(mask, each, -1) for each in self.buckets(seen.ids, seen.before)], 1)

    def own(self, weights: Tensor, seen: Observed) -> Tensor:  # noqa: D102
        fit = seen.fit_numbers(len(weights)).unsqueeze(1)
        return sum(weights[fit, each] for each in self.buckets(seen.ids, seen.before)) * seen.mask

    def typical(self, weights: Tensor, seen: Observed) -> Tensor:  # noqa: D102
        tokens = torch.arange(self.backbone.vocab_size, device=weights.device)
        return weights[0, self.buckets(tokens, tokens)[0]]

    def gram(self, new: Tensor, rows: Tensor) -> Tensor:  # noqa: D102
        return torch.from_numpy((self.matrix(new) @ self.matrix(rows).T).toarray())

    def matrix(self, rows: Tensor) -> csr_matrix:  # noqa: D102
        rows = rows.cpu()
        where, _ = (kept := rows >= 0).nonzero(as_tuple=True)
        ones = torch.ones(len(where), dtype=torch.float64)
        return csr_matrix((ones.numpy(), (where.numpy(), rows[kept].numpy())), (len(rows), self.size))

    def weights(self, coefficients: Tensor, rows: Tensor) -> Tensor:  # noqa: D102
        weights = torch.zeros(len(coefficients), self.size + 1, dtype=self.dtype, device=rows.device)
        each = coefficients.to(self.dtype).repeat_interleave(rows.shape[1], 1)
        return weights.index_add_(1, rows.flatten() % (self.size + 1), each)[:, :-1]  # -1: a bucket that is dropped

    def predict(self, weights: Tensor, rows: Tensor) -> Tensor:  # noqa: D102
        return (weights[rows.clamp_min(0)] * (rows >= 0)).sum(1)


class _Counts(_Buckets):
    """Token counts."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone)
        self.size = backbone.vocab_size

    def buckets(self, ids: Tensor, before: Tensor) -> list[Tensor]:  # noqa: D102
        return [ids]

    def values(self, weights: Tensor, seen: Observed) -> Values:  # noqa: D102
        fit, length = seen.fit_numbers(len(weights)), seen.ids.shape[1]
        return lambda positions: weights if len(weights) == 1 else weights[fit[positions // length]]


class _NGrams(_Buckets):
    """Hashed single tokens and pairs of neighbours; the first token's pair is with the prompt's last."""

    size = BUCKETS

    def buckets(self, ids: Tensor, before: Tensor) -> list[Tensor]:  # noqa: D102
        return [_hash(ids, None), _hash(ids, before)]

    def values(self, weights: Tensor, seen: Observed) -> Values:  # noqa: D102
        fit, before = seen.fit_numbers(len(weights)), seen.before.flatten()
        tokens = torch.arange(self.backbone.vocab_size, device=seen.ids.device)
        single = weights[:, _hash(tokens, None)]

        def values(positions: Tensor) -> Tensor:
            own = fit[positions // seen.ids.shape[1]]
            return single[own] + weights[own.unsqueeze(1), _hash(tokens, before[positions].unsqueeze(1))]

        return values


def _hash(ids: Tensor, before: Tensor | None) -> Tensor:
    """Buckets of tokens, or of pairs: multiplication by odd constants, the upper bits (Knuth)."""
    mixed = ids * 2654435761 + (0 if before is None else (before + 1) * 40503 * 65599)
    return (mixed % 2**32 * 2246822519 % 2**32) * BUCKETS // 2**32


class _Linear(Family):
    """Values that are linear in the token's embedding: ``s_t(v) = scale <u_t, E_v>``.

    Subclasses define ``directions(weights, seen)``: u [B, T, D] by weights [k, F].
    """

    def values(self, weights: Tensor, seen: Observed) -> Values:  # noqa: D102
        u = self.directions(weights, seen).flatten(0, 1)
        return embedding_values(self.backbone.embedding_weight, self.backbone.embedding_scale, u)

    def own(self, weights: Tensor, seen: Observed) -> Tensor:  # noqa: D102
        return (self.directions(weights, seen) * self._embeds(seen)).sum(-1) * seen.mask

    def typical(self, weights: Tensor, seen: Observed) -> Tensor:  # noqa: D102
        mask = seen.mask.unsqueeze(-1)
        u = (self.directions(weights, seen) * mask).sum((0, 1)) / mask.sum()
        table = self.backbone.embedding_weight.to(self.dtype)
        return self.backbone.embedding_scale * (table @ u)

    def _embeds(self, seen: Observed) -> Tensor:
        return self.backbone.embed(seen.ids).to(self.dtype)


class _Bag(_Linear):
    """Sum of frozen embeddings."""

    def rows(self, seen: Observed) -> Tensor:  # noqa: D102
        return (self._embeds(seen) * seen.mask.unsqueeze(-1)).sum(1)

    def values(self, weights: Tensor, seen: Observed) -> Values:  # noqa: D102
        values = super().values(weights, seen)
        if len(weights) > 1:
            return values

        def shared(positions: Tensor) -> Tensor:
            return values(positions[:1])

        shared.reads = values.reads
        return shared

    def directions(self, weights: Tensor, seen: Observed) -> Tensor:  # noqa: D102
        batch, length = seen.ids.shape
        return weights[seen.fit_numbers(len(weights)).repeat_interleave(length)].view(batch, length, -1)


class _TokenValues(_Linear):
    """Tokens given their context: a sketch of hidden state times embedding."""

    reads_states = True

    @cached_property
    def _signs(self) -> tuple[Tensor, Tensor]:
        """A [D + 1, F] and B [D, F]; the last row of A is for a constant, so `bag` is a part of it."""
        generator = torch.Generator().manual_seed(0)
        sizes = (self.backbone.hidden_size + 1, self.backbone.hidden_size)
        signs = [torch.randint(2, (size, SKETCH), generator=generator) * 2 - 1 for size in sizes]
        return tuple(sign.to(self.backbone.device, self.dtype) for sign in signs)

    def rows(self, seen: Observed) -> Tensor:  # noqa: D102
        tokens = self._context(seen) * (self._embeds(seen) @ self._signs[1])
        return (tokens * seen.mask.unsqueeze(-1)).sum(1) / math.sqrt(SKETCH)

    def directions(self, weights: Tensor, seen: Observed) -> Tensor:  # noqa: D102
        each = weights[seen.fit_numbers(len(weights))].unsqueeze(1)  # [B, 1, F]
        return (each * self._context(seen)) @ self._signs[1].T / math.sqrt(SKETCH)

    def _context(self, seen: Observed) -> Tensor:
        """``A h_t`` [B, T, F]."""
        h = seen.predicting.to(self.dtype)
        h = F.layer_norm(h, h.shape[-1:]) / math.sqrt(h.shape[-1])
        return h @ self._signs[0][:-1] + self._signs[0][-1]


class _Trunk(_Linear):
    """Mean hidden state of the frozen base at a depth. Not additive: values are the reward's derivative."""

    additive = False

    def __init__(self, backbone: Backbone, depth: int) -> None:
        super().__init__(backbone)
        self.depth = depth

    def rows(self, seen: Observed) -> Tensor:  # noqa: D102
        return seen.pooled[self.depth]

    def directions(self, weights: Tensor, seen: Observed) -> Tensor:  # noqa: D102
        with torch.enable_grad():
            e = self.backbone.embed(seen.ids).detach().requires_grad_()
            pooled = pooled_states(self.backbone, seen.prompts, e, seen.mask, [self.depth])[self.depth]
            value = (pooled * weights[seen.fit_numbers(len(weights))]).sum()
            return torch.autograd.grad(value, e)[0].to(self.dtype)


class _Hinted(Family):
    """What a teacher's reading tells of the hint."""

    reads_states = True

    def __init__(self, backbone: Backbone, teacher: Teacher) -> None:
        super().__init__(backbone)
        self.teacher = teacher

    def share(self, r2: float) -> float:
        """R2 itself: two features cannot have the gradient of what they do not explain.

        Along a training on sums f was .78 to .88 where R2 was .82 to .86, and .02 to .05 for a hint at another number,
        with R2 of .05 to .07 (`grade.experiments.sums`, 98,304 completions each).
        """
        return min(max(r2, 0.0), 1.0)

    def rows(self, seen: Observed) -> Tensor:  # noqa: D102
        return self._own(seen).sum(1)

    def values(self, weights: Tensor, seen: Observed) -> Values:  # noqa: D102
        fit, length, before = seen.fit_numbers(len(weights)), seen.ids.shape[1], _earlier(seen.told).flatten()

        def values(positions: Tensor) -> Tensor:
            told = self.told(seen.predicting, seen.hinted, positions)
            each = weights[fit[positions // length]]
            return sum(each[:, i, None] * x for i, x in enumerate(_parts(told, before[positions, None])))

        return values

    def own(self, weights: Tensor, seen: Observed) -> Tensor:  # noqa: D102
        return (weights[seen.fit_numbers(len(weights))].unsqueeze(1) * self._own(seen)).sum(2)

    def typical(self, weights: Tensor, seen: Observed) -> Tensor:  # noqa: D102
        kept, values = seen.mask.flatten().nonzero().flatten(), self.values(weights, seen)
        rows = kept.split(chunk_rows(self.backbone.vocab_size, len(kept)))
        return sum(values(each).sum(0) for each in rows) / len(kept)

    def _own(self, seen: Observed) -> Tensor:
        """Both features of the completions' own tokens [B, T, 2]."""
        return torch.stack(_parts(seen.told, _earlier(seen.told)), 2) * seen.mask.unsqueeze(2)

    @torch.no_grad()
    def told(self, base: Tensor, teacher: Tensor, rows: Tensor) -> Tensor:
        """Log-ratios l of all tokens at places [n, V], from hidden states [B, T, D]; 0 for what the teacher lacks."""
        heads = (self.teacher.head, teacher), (self.backbone.head, base)
        q, p = (head(states.flatten(0, 1)[rows]).to(self.dtype).log_softmax(-1) for head, states in heads)
        shared = min(q.shape[-1], p.shape[-1])
        return F.pad(q[:, :shared] - p[:, :shared], (0, p.shape[-1] - shared))

    def told_by(self, base: Tensor, teacher: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """The log-ratios l of completions' own tokens [B, T], 0 where masked."""
        rows = torch.arange(ids.numel(), device=ids.device).split(chunk_rows(self.backbone.vocab_size, ids.numel()))
        each = [self.told(base, teacher, some).gather(1, ids.flatten()[some].unsqueeze(1)) for some in rows]
        return torch.cat(each).view(ids.shape) * mask


def _earlier(told: Tensor) -> Tensor:
    """The sum of what the tokens before each one told [B, T]."""
    return told.cumsum(1) - told


def _parts(told: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """What a token changes in the two features, from its own l and the sum L of those before it."""
    later, earlier = ((each.clamp(max=MOST_NATS)).exp() for each in (before + told, before))
    return later - earlier, told.clamp(-MOST_NATS, MOST_NATS)


def layers_of(backbone: Backbone) -> int:
    """Number of layers of the base."""
    return int(backbone.model.config.get_text_config().num_hidden_layers)


def make_family(name: str, backbone: Backbone, teacher: Teacher | None = None) -> Family:
    """A family by name: those of the module's table, or ``trunk`` for all layers; `hinted` needs a teacher."""
    if name == HINTED and teacher is not None:
        return _Hinted(backbone, teacher)
    kinds = {"counts": _Counts, "bag": _Bag, "ngrams": _NGrams, "values": _TokenValues}
    if name in kinds:
        return kinds[name](backbone)
    match, layers = re.fullmatch(r"trunk(\d*)", name), layers_of(backbone)
    if match is None or not 1 <= int(match[1] or layers) <= layers:
        raise InputError("distil_families", name, f"{', '.join(kinds)}, trunk, or trunk1 to trunk{layers}")
    return _Trunk(backbone, int(match[1] or layers))
