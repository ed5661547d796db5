"""All computations over the vocabulary, in chunks of rows.

With hidden states ``h`` [N, D] and a head ``W`` [V, D], a tensor of logits is [N, V]: for a long completion and a
large vocabulary it is the largest tensor of a step. Here it exists for `chunk_rows` rows at a time, and what is kept
for backward is proportional to D or K, never to V. The head is frozen throughout this project, so no weight gradient
is ever formed; the only vector of size V with a gradient is the token bias, where it is trained.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from grade.models.gather import whole

CHUNK_ROWS = 64
"""Most rows of logits that exist at once. A number of rows, not of chunks, so that the peak does not grow with N."""

CHUNK_ELEMENTS = 2**22
"""Elements of logits [n, V] that exist at once, if rows are few: 16 MiB in float32. Up to V = 65,536 `CHUNK_ROWS` rows
have no more."""

MANY = 8
"""With this many chunks or more, `CHUNK_ELEMENTS` no longer applies."""

BLOCK_TOKENS = 1024
"""Tokens whose logits are computed at once on a CPU, times threads."""

GATHER_ELEMENTS = 2**24
"""Elements of gathered head rows [n, K, D] that exist at once in `support_logits`."""

RowFunction = Callable[..., tuple[Tensor, Tensor | None]]
"""From logits [n, V] to one number per row and its gradient in the logits; see `row_values`."""


def chunk_rows(vocab: int, count: int) -> int:
    """Rows of logits [., V] that exist at once, of N = ``count`` rows in all.

    `CHUNK_ROWS`, halved while they have more than `CHUNK_ELEMENTS` elements and ``count`` is less than `MANY` of them:
    in a short step the logits would be the largest tensors. A long one keeps more than that for each of its rows, and
    reading the head (0.8 GB for Qwen3-4B) for a few rows at a time would take longer than the products. Halved, as
    products with a power of two rows waste nothing of a GPU's tiles.

    >>> chunk_rows(49_152, 64), chunk_rows(151_936, 64), chunk_rows(151_936, 4096)     # SmolLM2, Qwen3 twice
    (64, 16, 64)
    """
    rows = CHUNK_ROWS
    while rows > 1 and rows * vocab > CHUNK_ELEMENTS and count < MANY * rows:
        rows //= 2
    return rows


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that logits, noise and losses are computed in: float32, or float64 for a float64 model."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Head:
    """Hidden states to logits ``(cap(scale * (h W^T + b)) + token_bias) / temperature``.

    ``cap(x) = c tanh(x / c)`` or identity.
    """

    weight: Tensor  # frozen head [V, D]; for a tied model the embedding table itself
    bias: Tensor | None = None  # frozen bias [V] or None
    scale: float = 1.0  # factor on the logits (Cohere's ``logit_scale``, the inverse of Granite's ``logits_scaling``)
    softcap: float | None = None  # Gemma's ``final_logit_softcapping`` c, or None
    temperature: float = 1.0  # sampling temperature; the policy is the softmax of these logits everywhere
    token_bias: Tensor | None = None  # [V] in nats, in the type of the logits (`grade.models.token_bias`), or None

    def __call__(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D], in float32 (float64 for a float64 model)."""
        if _gains_by_blocks(hidden, self.weight) and self.bias is None:
            return self._shape(_in_blocks(hidden, self.weight), self.token_bias)
        return self._shape(F.linear(hidden, self.weight, self.bias).to(wide(hidden.dtype)), self.token_bias)

    def rows(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Logits [n, K] at the token ids [n, K] only, for hidden states [n, D]: K D products per row instead of V D."""
        logits = _products(self.weight, ids, hidden)
        if self.bias is not None:
            logits = logits + self.bias[ids]
        return self._shape(logits.to(wide(hidden.dtype)), None if self.token_bias is None else self.token_bias[ids])

    def slope(self, logits: Tensor, ids: Tensor | None = None) -> Tensor | float:
        """``dl / d(h W^T + b)`` at the given (final) logits: of all tokens [..., V], or of the token ids [n, K]."""
        if self.softcap is None:
            return self.scale / self.temperature
        capped = logits * self.temperature
        if self.token_bias is not None:
            capped = capped - (self.token_bias if ids is None else self.token_bias[ids])
        return self.scale * (1 - (capped / self.softcap) ** 2) / self.temperature

    def _shape(self, logits: Tensor, token_bias: Tensor | None) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if token_bias is not None:
            logits = logits + token_bias
        return logits if self.temperature == 1.0 else logits / self.temperature


def _gains_by_blocks(hidden: Tensor, weight: Tensor) -> bool:
    here = hidden.device.type == "cpu" and type(weight) in (Tensor, nn.Parameter)  # such as neither traced nor in parts
    large = hidden.dtype == torch.float32 and len(weight) > 8 * BLOCK_TOKENS
    # What is written to a given tensor has no derivative, neither backward nor forward.
    return here and large and not torch.is_grad_enabled() and forward_ad.unpack_dual(hidden).tangent is None


def _in_blocks(hidden: Tensor, weight: Tensor) -> Tensor:
    """``h W^T`` [..., V], `BLOCK_TOKENS` tokens of the vocabulary at a time, for each thread.

    For the few rows of logits that exist at once, MKL then takes four fifths of the time (4 to 128 rows of 576, V =
    49,152, one thread and two), with the same bits.
    """
    rows, size = hidden.reshape(-1, hidden.shape[-1]), BLOCK_TOKENS * torch.get_num_threads()
    logits = rows.new_empty(len(rows), len(weight))
    for block, out in zip(weight.split(size), logits.split(size, 1), strict=True):
        torch.mm(rows, block.t(), out=out)
    return logits.view(*hidden.shape[:-1], -1)


def support_logits(head: Head, hidden: Tensor, support: Tensor) -> Tensor:
    """Logits of each row's own support, with the gradient to the hidden state and to the head's token bias.

    ``l[n, k] = head(h[n])[support[n, k]]``; backward is ``dL/dh[n] = sum_k dL/dl[n, k] l'[n, k] W[support[n, k]]``,
    one `embedding_bag`, and ``dL/db[v] = sum_{support[n, k] = v} dL/dl[n, k] / temperature``. Kept for backward: the
    support and, only if the head has a soft cap, the logits [N, K]. Hidden states are [N, D]; the support is [N, K],
    and if K = V, in order 0 .. V-1.
    """
    with whole(head.weight):
        return _SupportLogits.apply(hidden, head.token_bias, support, head)


class _SupportLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, token_bias: Tensor | None, support: Tensor, head: Head) -> Tensor:
        n, k = support.shape
        vocab = len(head.weight)
        if k == vocab:
            parts = [head(h) for h in hidden.split(chunk_rows(vocab, n))]
        elif 8 * k >= vocab:  # gathering would cost more than the dense product
            rows = chunk_rows(vocab, n)
            parts = [head(h).gather(1, i) for h, i in zip(hidden.split(rows), support.split(rows), strict=True)]
        else:
            rows = _gathered_rows(support, head.weight)
            parts = [head.rows(h, i) for h, i in zip(hidden.split(rows), support.split(rows), strict=True)]
        logits = torch.cat(parts) if n else hidden.new_zeros(0, k, dtype=wide(hidden.dtype))
        ctx.head, ctx.dtype = head, hidden.dtype
        ctx.save_for_backward(support, *([logits] if head.softcap is not None else []))
        return logits

    @staticmethod
    def backward(ctx, grad: Tensor):
        (support, *logits), of_bias = ctx.saved_tensors, None
        if ctx.needs_input_grad[1]:
            of_bias = grad.new_zeros(len(ctx.head.weight)).index_add_(0, support.flatten(), grad.flatten())
            of_bias /= ctx.head.temperature
        grad = grad * ctx.head.slope(logits[0] if logits else grad, support)
        return weighted_embedding(ctx.head.weight, support, grad).to(ctx.dtype), of_bias, None, None


def weighted_embedding(table: Tensor, support: Tensor, weights: Tensor) -> Tensor:
    """``e[n] = sum_k weights[n, k] table[support[n, k]]`` without the [N, K, D] tensor of gathered rows.

    Sums [N, D] over a frozen table [V, D], in its type; differentiable in the weights [N, K]. The support is token ids
    [N, K], if K = V in order 0 .. V-1 (then it is a plain product). Kept for backward: support and weights.
    """
    if support.shape[-1] == table.shape[0]:
        return weights.to(table.dtype) @ table.detach()
    table, weights = table.detach(), weights.to(table.dtype)
    if weights.requires_grad and table.device.type == "cuda" and table.dtype == torch.bfloat16:
        # torch has no such backward before pull request 185889, of 2026
        return _WeightedEmbedding.apply(table, support, weights)
    return F.embedding_bag(support, table, per_sample_weights=weights, mode="sum")


class _WeightedEmbedding(torch.autograd.Function):
    """The bag with ``dL/dweights[n, k] = table[support[n, k]] . dL/de[n]``, for some rows at once."""

    @staticmethod
    def forward(ctx, table: Tensor, support: Tensor, weights: Tensor) -> Tensor:
        ctx.table = table
        ctx.save_for_backward(support)
        return F.embedding_bag(support, table, per_sample_weights=weights, mode="sum")

    @staticmethod
    def backward(ctx, grad: Tensor):
        (support,) = ctx.saved_tensors
        parts = zip(*(x.split(_gathered_rows(support, ctx.table)) for x in (support, grad)), strict=True)
        return None, None, torch.cat([_products(ctx.table, ids, few) for ids, few in parts])


def _gathered_rows(support: Tensor, table: Tensor) -> int:
    """Rows of a support whose gathered rows of a table exist at once."""
    return max(1, GATHER_ELEMENTS // (support.shape[1] * table.shape[1]))


def _products(table: Tensor, ids: Tensor, vectors: Tensor) -> Tensor:
    """Products [n, K] of vectors [n, D] with the rows of a table at ids [n, K]."""
    return torch.bmm(table[ids], vectors.unsqueeze(-1)).squeeze(-1)  # [n, K, D] x [n, D, 1]


def row_values(head: Head, hidden: Tensor, functions: Sequence[RowFunction], *others: Tensor | None) -> tuple:
    """Numbers of each row of logits, from hidden states; `chunk_rows` rows of logits exist at once.

    Differentiable in ``hidden``. As they are single numbers, their gradients [N, D] are computed in the forward pass,
    while the chunk's logits exist, and only scaled in backward: no second product with the head, and nothing of size V
    is kept. Without gradient nothing is kept at all. If the head's token bias requires a gradient, which is a sum over
    rows, their logits are computed again in backward, and what makes them is kept.

    Each function is called with logits [n, V], whether a gradient is needed, and the same rows [n, ...] of ``others``,
    which are constants with N rows (None is left out). It returns values [n] and their gradient in the logits [n, V],
    or None if they have none or none is needed; the last function may overwrite the logits. Other tables that one
    reads, its attribute ``reads``, are gathered once for all rows if they are in parts. The values, [N] of each
    function, are float32 (float64 for a float64 model).
    """
    given = (rows for rows in others if rows is not None)
    with whole(head.weight, *(table for each in functions for table in getattr(each, "reads", ()))):
        return _RowValues.apply(hidden, head.token_bias, head, functions, *given)


class _RowValues(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, token_bias: Tensor | None, head: Head, functions: Sequence[RowFunction], *others: Tensor
    ) -> tuple[Tensor, ...]:
        needed, trained, *_ = ctx.needs_input_grad
        ctx.set_materialize_grads(False)
        rows, chunks = chunk_rows(len(head.weight), len(hidden)), []
        for h, *rest in zip(*(x.split(rows) for x in (hidden, *others)), strict=True):
            chunks.append(_chunk(head, h, functions, needed, rest))
        columns = [zip(*column, strict=True) for column in zip(*chunks, strict=True)]
        values, slopes = zip(*((torch.cat(v), None if s[0] is None else torch.cat(s)) for v, s in columns), strict=True)
        if trained:
            ctx.again = head, functions, rows
        ctx.save_for_backward(*slopes, *([hidden, *others, token_bias] if trained else []))  # autograd checks the bias
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None):
        saved = ctx.saved_tensors  # once: read twice, recomputed layers would be computed twice
        slopes, kept = saved[: len(grads)], saved[len(grads) :]
        parts = [(g.unsqueeze(-1) * slope).to(slope.dtype)
                 for g, slope in zip(grads, slopes, strict=True) if g is not None and slope is not None]  # fmt: skip
        of_hidden, of_bias = sum(parts[1:], parts[0]) if parts else None, None
        if kept:
            head, functions, rows = ctx.again
            functions = [each for each, g in zip(functions, grads, strict=True) if g is not None]
            inputs = torch.stack([g for g in grads if g is not None], 1), *kept[:-1]
            with whole(head.weight, *(table for each in functions for table in getattr(each, "reads", ()))):
                chunks = zip(*(x.split(rows) for x in inputs), strict=True)
                of_bias = sum(_bias_slope(head, h, functions, rest, g) for g, h, *rest in chunks)
        return of_hidden, of_bias, *[None] * (len(ctx.needs_input_grad) - 2)


def _chunk(
    head: Head, hidden: Tensor, functions: Sequence[RowFunction], needed: bool, rest: list[Tensor]
) -> list[tuple[Tensor, Tensor | None]]:
    """Values [n], their gradients in the hidden states [n, D]; a function of its own, so that every [n, V] is freed."""
    logits = [head(hidden)]
    inner, found = head.slope(logits[0]) if needed else 1.0, []
    for value, grad in _each(functions, logits, needed, rest):
        found.append((value, None if grad is None else grad.mul_(inner).to(hidden.dtype) @ head.weight))
        del grad
    return found


def _bias_slope(head: Head, hidden: Tensor, functions: Sequence[RowFunction], rest: list[Tensor], g: Tensor) -> Tensor:
    """The gradient of a sum of values with weights g [n, functions] in the token bias [V]."""
    total, found = 0.0, _each(functions, [head(hidden)], True, rest)
    for weight in g.split(1, 1):
        _, grad = next(found)
        total = total if grad is None else total + grad.mul_(weight).sum(0)
        del grad  # before the next one is made
    return total / head.temperature


def _each(
    functions: Sequence[RowFunction], logits: list[Tensor], needed: bool, rest: list[Tensor]
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """What each function gives, one after the other; the last alone holds the logits, to drop."""
    for left, function in zip(reversed(range(len(functions))), functions, strict=True):
        yield function(logits[0] if left else logits.pop(), needed, rest)


def kl_divergence(head: Head, hidden: Tensor, ref_head: Head, ref_hidden: Tensor) -> Tensor:
    """Exact ``KL(policy || reference)`` over the full vocabulary, row by row, from hidden states; see `row_values`.

    ``KL = sum_v p_v (log p_v - log q_v)`` in nats, with ``p = softmax(head(h))`` and ``q = softmax(ref_head(h_ref))``
    of the *same* position; the heads differ in the policy's token bias. Differentiable in ``hidden`` (the reference is
    a constant): ``dKL/dl_v = p_v (log p_v - log q_v - KL)``. The sum is taken of ``p (log p - log q) - p + q``, whose
    terms are all >= 0 and which is the same number when p and q are normalised: rounding in the two normalisers then
    enters at second order, so equal distributions give 0 to ~1e-7 in float32 instead of ~1e-5.
    """
    return row_values(head, hidden, [_kl_from(ref_head)], ref_hidden.detach())[0]


def kl_and_entropy(head: Head, hidden: Tensor, ref_head: Head, ref_hidden: Tensor) -> tuple[Tensor, Tensor]:
    """`kl_divergence`, and the policy's entropy in nats, without gradient."""
    entropy, kl = row_values(head, hidden, [entropy_function, _kl_from(ref_head)], ref_hidden.detach())
    return kl, entropy.detach()


def _kl_from(ref_head: Head, gradient: bool = True) -> RowFunction:
    def of_logits(logits: Tensor, needed: bool, others: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        logp = logits.log_softmax(-1)
        del logits
        ref_logp = ref_head(others[-1]).log_softmax(-1)
        diff = logp - ref_logp
        p = logp.exp_()
        # In place, and in this order: q - p is exact where they are close, p (log p - log q) is small there.
        kl = ref_logp.exp_().sub_(p).addcmul_(p, diff).sum(-1)
        return kl, p.mul_(diff.sub_(kl.unsqueeze(-1))) if needed and gradient else None

    return of_logits


def token_logps(
    head: Head, hidden: Tensor, ids: Tensor, forbidden: tuple[int, ...] = (), where: Tensor | None = None
) -> Tensor:
    """``log softmax(head(h))`` in nats at one token per row, from hidden states; see `row_values`.

    Differentiable in ``hidden``: ``dlogp/dl_v = 1[v = id] - p_v``, 0 at a forbidden v. The logits of ``forbidden``
    token ids, which could not be sampled, are -inf in the rows [N] where ``where`` is True.
    """
    return row_values(head, hidden, [_logp_of(forbidden if where is not None else ())], ids.unsqueeze(1), where)[0]


def token_scores(
    head: Head, hidden: Tensor, ids: Tensor, forbidden: tuple[int, ...] = (), where: Tensor | None = None,
    reference: tuple[Head, Tensor] | None = None, kl_gradient: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`token_logps`; given the reference's head and hidden states, `kl_divergence`; and the policy's entropy in nats.

    All from one product with the policy's head. KL and entropy are of all tokens; the entropy has no gradient, and KL
    has one, for one more product, if it is asked for.
    """
    functions, others = [entropy_function, _logp_of(forbidden if where is not None else ())], [ids.unsqueeze(1), where]
    if reference is not None:
        functions.append(_kl_from(reference[0], kl_gradient))
        others.append(reference[1].detach())
    entropy, logps, *kl = row_values(head, hidden, functions, *others)
    return logps, *(each if kl_gradient else each.detach() for each in kl), entropy.detach()


def _logp_of(forbidden: tuple[int, ...]) -> RowFunction:
    def of_logits(logits: Tensor, needed: bool, others: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        with _without(logits, forbidden, others):
            logp = logits.log_softmax(-1)
        del logits
        value = logp.gather(1, others[0])
        if needed:
            logp.exp_().neg_().scatter_add_(1, others[0], torch.ones_like(value))
        return value.squeeze(1), logp if needed else None

    return of_logits


@contextlib.contextmanager
def _without(logits: Tensor, forbidden: tuple[int, ...], others: list[Tensor]) -> Iterator[None]:
    """Within this context logits [n, V] of forbidden ids are -inf, in the rows [n] that the second of others says."""
    columns = list(forbidden)
    before = logits[:, columns]
    if columns:
        logits[:, columns] = before.masked_fill(others[1].unsqueeze(1), float("-inf"))
    yield
    logits[:, columns] = before


def entropy_function(logits: Tensor, *_: Any) -> tuple[Tensor, None]:
    """Entropies without gradient, for `row_values`."""
    return entropy_of_logits(logits), None


def entropy_of_logits(logits: Tensor) -> Tensor:
    """``-sum_v p_v log p_v`` in nats of given finite logits [..., V], without gradient.

    >>> round(float(entropy_of_logits(torch.zeros(4)).exp()), 4)        # uniform: log 4
    4.0
    """
    logp = logits.detach().log_softmax(-1)
    return -logp.exp().mul_(logp).sum(-1)


Values = Callable[[Tensor], Tensor]
"""From row numbers [n] to the values of all tokens in these rows, [n, V], or [V] or [1, V] if all rows share them."""


def expected_values(
    head: Head, hidden: Tensor, values: Values, forbidden: tuple[int, ...] = (), where: Tensor | None = None
) -> Tensor:
    """``E_pi s = sum_v pi_v s_v`` with ``pi = softmax(head(h))``, from hidden states; see `row_values`.

    Differentiable in ``hidden``: ``dE/dl_v = pi_v (s_v - E)``, 0 at a forbidden v. This is the all-action, or expected,
    policy gradient: it weighs every token by its probability, where a policy gradient has the token that was drawn.
    Given the values it has no variance from the action (Sutton et al. 2000; Allen et al. 2017, mean actor-critic,
    arXiv:1709.00503; Ciosek and Whiteson 2018, expected policy gradients, arXiv:1706.05374; Petit et al. 2019,
    all-action policy gradient methods). Logits and values exist for a chunk of rows at a time: no [N, V] tensor is made
    or kept.

    Hidden states are [N, D], expectations [N] in the values' unit, float32 (float64 for a float64 model). ``values``
    are called with row numbers [n] (int64) and give s without gradient: constants, in any unit, finite for forbidden
    tokens too.
    """
    banned = forbidden if where is not None else ()

    def of_logits(logits: Tensor, needed: bool, others: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        with _without(logits, banned, others):
            p = logits.softmax(-1)
        del logits
        s = values(others[0]).to(p.dtype)
        value = (p * s).sum(-1)
        return value, p.mul_(s - value.unsqueeze(-1)) if needed else None

    of_logits.reads = getattr(values, "reads", ())
    numbers = torch.arange(len(hidden), device=hidden.device)
    return row_values(head, hidden, [of_logits], numbers, where)[0]


def embedding_values(weight: Tensor, scale: float, u: Tensor) -> Values:
    """Values ``s[n, v] = scale <u[n], weight[v]>`` of a first-order critic, for `expected_values`.

    With the reward's slope u at a position's embedding it is, up to a constant, the reward after a change of this token
    alone, to first order. The gradient of ``E_pi s`` is then that of the estimator `st`.

    From the table [V, D], the factor between its rows and embeddings, and slopes u [N, D] in reward per unit of
    embedding. Values [n, V] are float32 (float64 for a float64 table); as for logits, the product itself is in the
    table's type: a table converted to float32 could be the largest tensor of a step.
    """

    def values(rows: Tensor) -> Tensor:
        return ((scale * u[rows]).to(weight.dtype) @ weight.detach().T).to(wide(weight.dtype))

    values.reads = (weight,)
    return values


def self_certainty(head: Head, hidden: Tensor) -> Tensor:
    """``KL(U || softmax(head(h)))`` in nats, row by row: how far each distribution is from uniform; `row_values`.

    Intuitor's reward (Zhao et al. 2025, arXiv:2505.19590, section 3.2; the metric is Kang et al. 2025,
    arXiv:2502.18581). The published code leaves ``log V`` out: a constant, which cancels where a group mean is
    subtracted. Differentiable in ``hidden``: ``dSC/dl_v = p_v - 1 / V``.

    A row needs all V logits: chunking the vocabulary and averaging the chunks' values, as document 004 proposes, gives
    a different quantity.
    """

    def of_logits(logits: Tensor, needed: bool, _: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        return certainty_of_logits(logits), logits.softmax(-1).sub_(1 / logits.shape[-1]) if needed else None

    return row_values(head, hidden, [of_logits])[0]


def certainty_of_logits(logits: Tensor) -> Tensor:
    """``KL(U || p) = logsumexp(l) - mean(l) - log V`` of given logits [..., V]; 0 for a uniform p.

    >>> certainty_of_logits(torch.zeros(4)).abs() < 1e-6                 # uniform
    tensor(True)
    >>> round(float(certainty_of_logits(torch.tensor([math.log(2.0), 0.0]))), 4)   # p = 2/3, 1/3
    0.0589
    """
    return logits.logsumexp(-1) - logits.mean(-1) - math.log(logits.shape[-1])


@dataclass(frozen=True)
class EmbeddingTable:
    """The frozen embedding table through which a reward reads tokens."""

    weight: Tensor  # [V, D_R], a row for each of the policy's V token ids
    scale: float = 1.0  # factor between a row and what the reward's first layer receives

    @classmethod
    def of(cls, layer: nn.Module) -> EmbeddingTable:
        """A model's input embedding; some models scale what they look up (Gemma 3, BART)."""
        scale = getattr(layer, "scalar_embed_scale", getattr(layer, "embed_scale", 1.0))
        return cls(layer.weight.detach(), float(scale))

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., D_R] of token ids."""
        return F.embedding(ids, self.weight) * self.scale
