"""Relaxation of one token: Gumbel noise, supports, and the registry of estimators.

At one position the policy's logits ``l`` [V] and Gumbel noise ``g`` give ``z = l[I] + g[I]`` on a support ``I`` of K
token ids, and a relaxed token ``y = relax(z / tau)`` [K]:

- `gumbel` (Gumbel-softmax, Jang et al. 2017, arXiv:1611.01144): ``y = softmax(z / tau)``;
- `ste` (straight-through): one-hot of ``argmax z`` forward, the softmax's gradient backward;
- `gumbel_rao` (Paulus, Maddison and Krause 2021, arXiv:2010.04838): as `ste`, with the softmax's gradient averaged over
  M draws of the noise *given the token*: the same expectation, and never more variance;
- `reinmax` (Liu et al. 2023, arXiv:2304.08612): hard tokens, and a backward pass without noise that is second-order
  accurate (`ste` is first-order);
- `st` (Bengio et al. 2013, arXiv:1308.3432): hard tokens, and a backward pass without noise through the softmax of the
  policy itself over the whole vocabulary: the all-action gradient with a first-order critic
  (`grade.models.head.expected_values`). It has no support and no tau.

All but `gumbel` are straight-through: the text is hard, and what backward needs follows from logits and token alone
(`Estimator.draw`). Their completions may therefore come from any sampler; only `gumbel` needs the noise that drew
them.

Each is a subclass of `Estimator` in `ESTIMATORS`. Everything else (engines, method names, which settings are read)
asks the registry, so a new estimator is one class here.

Two supports: `top_k` takes the K largest logits and then draws noise for them (the source document's);
`perturbed_top_k` draws noise for the whole vocabulary and takes the K largest ``l + g``. With the second the hard token
``argmax z`` is an exact sample of the policy whatever K is (the Gumbel-max trick); with the first it is a sample of the
policy truncated to its K most likely tokens. ``gumbel_topk = 0`` is the full vocabulary.

``tau`` is the Gumbel temperature; the sampling temperature is always 1. Noise is float32 whatever the model's type:
in bfloat16 it would have exact zeros, a mean of 0.557 instead of 0.577, and no values above 5.5.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from grade.config import Config, allowed_names
from grade.errors import InputError
from grade.models.noise import exponential_noise, gumbel_noise

Support = Literal["top_k", "perturbed_top_k"]


def _known(name: str) -> str:
    if name not in ESTIMATORS:
        raise InputError("estimator", name, allowed_names(name, ESTIMATORS))
    return name


EstimatorName = Annotated[str, AfterValidator(_known)]


class RelaxationConfig(Config):
    """Settings of the relaxation."""

    estimator: EstimatorName = Field(
        "ste",
        description="gumbel: soft tokens; ste: hard tokens, soft gradient; gumbel_rao: ste averaged over noise given "
        "the token; reinmax: second-order straight-through; st: straight-through without noise, full vocabulary",
    )
    support: Support = Field(
        "perturbed_top_k",
        description="tokens that are mixed: top_k (largest logits), or perturbed_top_k (largest logits + noise: exact "
        "samples for any K)",
    )
    gumbel_topk: int = Field(256, ge=0, description="size K of the support; 0 = the full vocabulary")
    tau: float = Field(1.0, gt=0, description="Gumbel temperature")
    rao_draws: int = Field(8, ge=1, description="gumbel_rao: draws M of the noise given the token; 1 is ste in law")
    max_new_tokens: int = Field(24, ge=1, description="completion length T in tokens")
    min_new_tokens: int = Field(0, ge=0, description="end-of-sequence is not sampled before this many tokens")

    def check(self, vocab_size: int) -> None:
        """Reject K > V, and more required tokens than generated ones; a dense estimator has no K."""
        if self.gumbel_topk > vocab_size and not ESTIMATORS[self.estimator].dense:
            raise InputError("gumbel_topk", self.gumbel_topk, f"0 (full vocabulary) to {vocab_size} (vocabulary size)")
        if self.min_new_tokens > self.max_new_tokens:
            raise InputError("min_new_tokens", self.min_new_tokens, f"at most max_new_tokens = {self.max_new_tokens}")


def _conditional_noise(logits: Tensor, chosen: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise given that ``argmax(logits + noise)`` is a given entry.

    ``-(l + g)`` is the log of an arrival time at rate ``exp(l)``. The first arrival comes at rate ``Z = sum exp(l)``,
    independently of which entry it is, and the remaining ones restart from there (memoryless):

        z_c = log Z - log E_c,    z_j = log Z - log(E_j Z / exp(l_j) + E_c),    E ~ Exp(1) independent.

    Averaged over ``c ~ softmax(l)`` the noise ``z - l`` is independent standard Gumbel noise. Logits are [N, K], -inf
    for what cannot be drawn, ``chosen`` [N] the index of the drawn entry in each row. The noise [N, K] is in the
    logits' type, 0 where the logit is -inf.
    """
    chosen = chosen.unsqueeze(-1)
    total = logits.logsumexp(-1, keepdim=True)
    times = exponential_noise(tuple(logits.shape), generator, logits.device).to(logits.dtype)
    first = times.gather(-1, chosen)
    z = total - (times * (total - logits).exp() + first).scatter(-1, chosen, first).log()
    return torch.where(logits == float("-inf"), 0.0, z - logits)


class _ReinMaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, chosen: Tensor, tau: float) -> Tensor:
        ctx.save_for_backward(logits.softmax(-1), (chosen + (logits / tau).softmax(-1)) / 2)
        return chosen.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        p, q = ctx.saved_tensors
        first, second = (w * (grad - (w * grad).sum(-1, keepdim=True)) for w in (q, p))
        return 2 * first - second / 2, None, None


class _StraightThroughFunction(torch.autograd.Function):
    # The usual (hard - soft).detach() + soft is one-hot only up to rounding; this is exact.
    @staticmethod
    def forward(ctx, soft: Tensor) -> Tensor:
        return torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


class Estimator:
    """How a token is relaxed. The base class is straight-through; subclasses override what differs.

    To add an estimator, subclass this and add an instance to `ESTIMATORS`. That also creates the training method
    ``<name>`` (replay engine) and, unless it redraws, ``<name>_legacy`` (the original engine).

    Attributes:
        hard: Whether the forward token is one-hot. Only hard text can be sampled elsewhere.
        redraws: Whether backward uses supports and noise redrawn given the token instead of those that chose it. Only
            the replay engine supports that.
        dense: Whether backward goes through the policy's softmax over the whole vocabulary, without noise or tau. Then
            a rollout keeps no support but the token, and `relax` only chooses it.
    """

    hard: bool = True
    redraws: bool = False
    dense: bool = False

    @torch.no_grad()
    def draw(
        self, logits: Tensor, config: RelaxationConfig, generator: torch.Generator, token: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Support and noise of one position that choose its token, or given its token.

        Args:
            logits: Policy logits [B, V] in float32 or float64, -inf for forbidden tokens.
            config: Kind and size of the support, draws M.
            generator: Source of the noise.
            token: Tokens [B] that were drawn: what the straight-through backward pass needs for them.

        Returns:
            Token ids and noise, each [B, K] (largest first, except for the full vocabulary); given a token [B, M, K]
            for `gumbel_rao`. The token has the largest ``l + noise`` (except for `reinmax`, whose noise is 0). With
            `perturbed_top_k` each draw of noise has its own support.
        """
        k = config.gumbel_topk or logits.shape[1]
        if k < logits.shape[1] and config.support == "perturbed_top_k":
            if token is None:
                noise = gumbel_noise(tuple(logits.shape), generator, logits.device)
            else:
                noise = _conditional_noise(logits, token, generator)
            support = (logits + noise).topk(k).indices
            return support, noise.gather(1, support)
        support = _likeliest(logits, token, k)
        if token is None:
            return support, gumbel_noise(tuple(support.shape), generator, logits.device)
        chosen = (support == token.unsqueeze(1)).to(torch.uint8).argmax(1)
        return support, _conditional_noise(logits.gather(1, support), chosen, generator)

    def relax(self, z: Tensor, tau: float) -> Tensor:
        """Relaxed token [..., K] of perturbed logits ``z = l + g`` [..., K]; see the function `relax`."""
        return _StraightThroughFunction.apply((z / tau).softmax(-1))

    def relax_given(self, logits: Tensor, noise: Tensor, support: Tensor, token: Tensor, tau: float) -> Tensor:
        """Relaxed tokens [N M, K] on the supports of a rollout, for the replayed pass.

        Args:
            logits: Policy logits on the supports [N M, K]; the M draws of a position are consecutive rows.
            noise: [N M, K].
            support: Token ids [N M, K].
            token: The hard tokens [N].
            tau: Gumbel temperature.
        """
        return self.relax(logits + noise, tau)


def _likeliest(logits: Tensor, token: Tensor | None, k: int) -> Tensor:
    """Token ids [B, k] of the k largest logits [B, V]; where the token is not among them, it replaces the last."""
    batch, vocab = logits.shape
    if k in (0, vocab):
        return torch.arange(vocab, device=logits.device).expand(batch, vocab)
    if token is not None:
        logits = logits.scatter(1, token.unsqueeze(1), float("inf"))
    return logits.topk(k).indices


class _GumbelSoftmax(Estimator):
    """``y = softmax(z / tau)``, forward and backward."""

    hard = False

    def relax(self, z: Tensor, tau: float) -> Tensor:  # noqa: D102
        return (z / tau).softmax(-1)


class _RaoBlackwellised(Estimator):
    """Straight-through, its gradient averaged over M draws of the noise given the token."""

    redraws = True

    def draw(  # noqa: D102
        self, logits: Tensor, config: RelaxationConfig, generator: torch.Generator, token: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        draw = super().draw
        if token is None:
            return draw(logits, config, generator)
        draws = [draw(logits, config, generator, token) for _ in range(config.rao_draws)]
        supports, noises = zip(*draws, strict=True)
        return torch.stack(supports, 1), torch.stack(noises, 1)


class _ReinMax(Estimator):
    """ReinMax: one-hot of the drawn token forward, a second-order accurate gradient backward, without noise.

    With ``p = softmax(l)``, ``q = (onehot + softmax(l / tau)) / 2`` and the softmax's Jacobian
    ``J(p) = diag(p) - p p^T``, backward is ``(2 J(q) - J(p) / 2) g``. At tau = 1 its expectation over the token is the
    exact gradient of ``E f(onehot)`` for every quadratic f (Heun's method; straight-through is Euler's). The support is
    the likeliest tokens, the token among them. Source: Liu et al. 2023, arXiv:2304.08612, algorithm 2.
    """

    redraws = True

    def draw(  # noqa: D102
        self, logits: Tensor, config: RelaxationConfig, generator: torch.Generator, token: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if token is None:
            return super().draw(logits, config, generator)
        support = _likeliest(logits, token, config.gumbel_topk)
        return support, torch.zeros_like(support, dtype=logits.dtype)

    def relax_given(  # noqa: D102
        self, logits: Tensor, noise: Tensor, support: Tensor, token: Tensor, tau: float
    ) -> Tensor:
        return _ReinMaxFunction.apply(logits, (support == token.unsqueeze(1)).to(logits.dtype), tau)


class _DenseStraightThrough(Estimator):
    """Straight-through without noise: one-hot forward, the softmax of the policy over the whole vocabulary backward."""

    redraws, dense = True, True

    def draw(  # noqa: D102
        self, logits: Tensor | None, config: RelaxationConfig, generator: torch.Generator, token: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if token is None:
            one = config.model_copy(update={"gumbel_topk": 1, "support": "perturbed_top_k"})
            return super().draw(logits, one, generator)
        return token.unsqueeze(-1), torch.zeros_like(token, dtype=torch.float32).unsqueeze(-1)


ESTIMATORS: dict[str, Estimator] = {
    "gumbel": _GumbelSoftmax(),
    "ste": Estimator(),
    "gumbel_rao": _RaoBlackwellised(),
    "reinmax": _ReinMax(),
    "st": _DenseStraightThrough(),
}


def relax(z: Tensor, tau: float, estimator: str) -> Tensor:
    """Relaxed token ``y`` of perturbed logits.

    Args:
        z: Perturbed logits [..., K].
        tau: Gumbel temperature.
        estimator: ``gumbel`` (softmax), or straight-through: exact one-hot of the argmax forward, softmax backward.

    Returns:
        Weights [..., K] that sum to one.

    >>> z = torch.tensor([0.0, 1.0, 3.0], requires_grad=True)
    >>> relax(z, 1.0, "ste").tolist()
    [0.0, 0.0, 1.0]
    >>> torch.equal(*(torch.autograd.grad(relax(z, 1.0, e)[0], z)[0] for e in ("ste", "gumbel")))
    True
    """
    return ESTIMATORS[estimator].relax(z, tau)


def tau_at(step: int, start: float, end: float, anneal_steps: int) -> float:
    """Linear temperature schedule: ``start`` at step 0, ``end`` from step ``anneal_steps`` on, also if that is 0.

    >>> [tau_at(s, 2.0, 0.5, 100) for s in (0, 50, 100, 1000)]
    [2.0, 1.25, 0.5, 0.5]
    """
    if anneal_steps <= 0:
        return end
    return start + (end - start) * min(step / anneal_steps, 1.0)
