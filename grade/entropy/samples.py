"""Samples of the policy, and what is estimated from them: scores, gradients, directional derivatives.

Samples stay on the CPU and go to the device one microbatch at a time.

**Gradients in the memory of one microbatch.** Leave-one-out couples the completions of a prompt: each coefficient needs
the log-probabilities of all. But coefficients are constants, so pass 1 computes them without gradient
(`sequence_logps`) and pass 2 recomputes a microbatch, multiplies, runs backward and frees it (`prompt_gradients`).

**Forward mode** (`directional`), without a graph. With ``H_t`` the entropy of the distribution of token t given what
precedes it (a Rao-Blackwellised integrand: exact over the vocabulary, sampled only over prefixes), ``H = E sum_t H_t``
and

    dH[v] = E sum_t ( dH_t[v] + (G_t - b_t) d log pi(y_t)[v] ),   G_t = sum_{k > t} H_k

d.[v] is a Jacobian-vector product of one forward pass. The baseline b_t does not depend on y_t. Per token,
``H_tok = E sum_t H_t / E L`` with L a completion's length, and by the quotient rule

    dH_tok[v] = ( dH[v] - H_tok dE[L][v] ) / E L,   dE[L][v] = E sum_t (L - t - c_t) d log pi(y_t)[v]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from grade.entropy.vector import split_vector
from grade.errors import InputError
from grade.gradients.losses import rloo
from grade.models.backbone import Backbone
from grade.models.batch import PromptBatch, Rows
from grade.models.head import Head, token_scores
from grade.models.noise import gumbel_noise
from grade.models.parameters import flatten, trained_parameters
from grade.models.sampling import generate
from grade.models.scoring import completion_logps, predicting_hidden
from grade.results import progress
from grade.stats import jackknife_stderr

ROWS = 64
"""Rows of logits, with their tangents, computed at once."""


@dataclass(frozen=True)
class Samples(Rows):
    """G completions of each of B prompts, on the CPU."""

    prompts: PromptBatch  # B prompts
    ids: Tensor  # completions [B, G, T]
    mask: Tensor  # [B, G, T], 1 at a token, end-of-sequence included, 0 after it; no completion is empty

    def microbatches(
        self, size: int, device: torch.device | str, title: str = ""
    ) -> Iterator[tuple[slice, PromptBatch, Tensor, Tensor]]:
        """Consecutive rows of the flattened [B G] completions on a device: rows, prompts, ids [n, T], mask [n, T].

        With a title, a bar shows how far they are.
        """
        batch, group, length = self.ids.shape
        owner = torch.arange(batch).repeat_interleave(group)
        ids, mask = self.ids.reshape(-1, length), self.mask.reshape(-1, length)
        starts = range(0, batch * group, size)
        for start in progress(starts, title) if title else starts:
            rows = slice(start, min(start + size, batch * group))
            yield rows, self.prompts[owner[rows]].to(device), ids[rows].to(device), mask[rows].to(device)


@torch.no_grad()
def draw(
    backbone: Backbone, prompts: PromptBatch, group: int, max_new_tokens: int, generator: torch.Generator,
    microbatch: int = 64,
) -> Samples:  # fmt: skip
    """G = ``group`` completions of each prompt, ``microbatch`` of them at once; by noise, so that policies share it."""
    owner = torch.arange(len(prompts)).repeat_interleave(group)
    ids, masks, noise = [], [], partial(gumbel_noise, generator=generator)
    for rows in progress(owner.split(microbatch), "sampling"):
        part = prompts[rows].to(backbone.device)
        one, mask = generate(backbone, part, max_new_tokens, noise, stop_early=False)
        ids.append(one.cpu())
        masks.append(mask.cpu())
    shape = (len(prompts), group, max_new_tokens)
    return Samples(prompts.to("cpu"), torch.cat(ids).view(shape), torch.cat(masks).view(shape))


class _HiddenStates(nn.Module):
    """`predicting_hidden` and the head, as a module whose parameters `functional_call` can replace for one call."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.model, self.bias = backbone.model, backbone.bias
        # In a tuple, so that it is no submodule. A backbone has its decoder under two names, and `functional_call`
        # restores parameters name by name: it would leave the replaced ones in a module registered twice.
        self.hidden_backbone = (backbone,)

    def forward(self, prompts: PromptBatch, ids: Tensor) -> tuple[Tensor, Head]:
        """Rows of hidden states [B T, D], and the head with the token bias of this call."""
        (backbone,) = self.hidden_backbone
        return predicting_hidden(backbone, prompts, ids).flatten(0, 1), backbone.head

    def along(self, vector: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Value and part of a vector [P] by the name of each trained parameter."""
        named = [(name, p.detach()) for name, p in self.named_parameters() if p.requires_grad]
        parts = split_vector(self.hidden_backbone[0], vector)
        return {name: (p, part) for (name, p), part in zip(named, parts, strict=True)}


@dataclass(frozen=True)
class SampleScores:
    """Log-probabilities and entropies of tokens in nats, each [B, G, T] in float64 on the CPU, 0 where masked."""

    logps: Tensor
    entropies: Tensor


@torch.no_grad()
def scores_at(
    backbone: Backbone, samples: Samples, vector: Tensor | None = None, eta: float = 1.0, microbatch: int = 8
) -> SampleScores:
    """Scores at ``theta + eta v``, or at theta without a vector [P]; the policy is unchanged."""
    module, replaced = _HiddenStates(backbone), {}
    if vector is not None:
        replaced = {name: p + eta * part for name, (p, part) in module.along(vector).items()}
    logps, entropies = (torch.zeros(samples.ids.shape, dtype=torch.float64) for _ in range(2))
    for rows, prompts, ids, mask in samples.microbatches(microbatch, backbone.device, "scores"):
        hidden, head = functional_call(module, replaced, (prompts, ids))
        for total, values in zip((logps, entropies), token_scores(head, hidden, ids.flatten()), strict=True):
            total.view(-1, ids.shape[1])[rows] = (values.view(mask.shape) * mask).double().cpu()
    return SampleScores(logps, entropies)


@torch.no_grad()
def sequence_logps(backbone: Backbone, samples: Samples, microbatch: int = 8) -> Tensor:
    """``S = sum_t log pi(y_t)`` [B, G] in nats, float64 on the CPU."""
    total = torch.zeros(samples.ids.shape[:2], dtype=torch.float64)
    for rows, prompts, ids, mask in samples.microbatches(microbatch, backbone.device):
        logps = completion_logps(backbone, prompts, ids, mask)
        total.view(-1)[rows] = logps.sum(-1).double().cpu()
    return total


def entropy_coefficients(logps: Tensor) -> Tensor:
    """Leave-one-out coefficients c [B, G] of ``X_n = sum_g c_ng grad S_ng``, whose expectation is ``-grad H``.

    ``c_ng = (S_ng - mean_{g' != g} S_ng') / G``: the baseline is independent of completion g, so it adds no bias.

    >>> entropy_coefficients(torch.tensor([[1.0, 2.0, 6.0]]))       # (1 - 4) / 3, (2 - 3.5) / 3, (6 - 1.5) / 3
    tensor([[-1.0000, -0.5000,  1.5000]])
    """
    return rloo(logps) / logps.shape[1]


def prompt_gradients(backbone: Backbone, samples: Samples, coefficients: Tensor, microbatch: int = 2) -> Tensor:
    """``sum_g c_ng grad S_ng`` [B, P] of each prompt n, for coefficients c [B, G].

    In float32 (float64 for a float64 model) on the CPU. The graph of ``microbatch`` completions,
    all of one prompt, exists at once; the parameters' ``.grad`` are not touched.
    """
    if not torch.isfinite(coefficients).all():
        raise InputError("coefficients", "NaN or infinity", "finite rewards and log-probabilities")
    parameters = trained_parameters(backbone)
    sums = torch.zeros(len(samples.ids), sum(p.numel() for p in parameters), dtype=parameters[0].dtype)
    for n, c in enumerate(progress(coefficients, "gradients, by prompt")):
        for rows, prompts, ids, mask in samples[n : n + 1].microbatches(microbatch, backbone.device):
            logps = completion_logps(backbone, prompts, ids, mask).sum(-1)
            weights = c[rows].to(logps)
            grads = torch.autograd.grad(logps, parameters, weights)
            sums[n] += flatten(grads).cpu()
            del logps
    return sums


def two_batch(x: Tensor, y: Tensor) -> tuple[float, float]:
    """``mu_X . mu_Y`` from an evaluation batch x [B_E, P] and an independent update batch y [B_U, P]; standard error.

    The error is ``sqrt(V_X + V_Y)``, V_X the variance of the mean of ``X_n . mu_Y``, V_Y that of ``Y_n . mu_X``.

    >>> two_batch(torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [2.0]]))   # 2 * 2; X: var 2, times 4, over 2
    (4.0, 2.0)
    """
    x, y = x.double(), y.double()
    mean_x, mean_y = x.mean(0), y.mean(0)
    along_x, along_y = (x @ mean_y).var() / len(x), (y @ mean_x).var() / len(y)
    return float(mean_x @ mean_y), float((along_x + along_y).sqrt())


def u_statistic(x: Tensor, y: Tensor) -> tuple[float, dict[str, float]]:
    """``E[X] . E[Y]`` from one batch: X_n and Y_n, of x and y [B, P], come from the same completions of prompt n.

    The mean of ``X_n . Y_m`` over pairs n != m is unbiased nevertheless. With
    ``r_n = (X_n . Ybar_{-n} + Y_n . Xbar_{-n}) / 2``, so that mean(r) = U, Hoeffding's decomposition gives
    ``Var(U) = 4 zeta_1 / B + 2 zeta_2 / (B (B - 1))``, with zeta_1 the variance over one prompt of the mean of the
    symmetric kernel ``h(n, m) = (X_n . Y_m + Y_n . X_m) / 2``. Left out: the second term, of order 1 / B^2.

    U with its standard errors for B >= 3: the plug-in one, ``sqrt(4 var(r) / B)`` with ``var`` over B - 1, and the
    jackknife's, from ``U_{-n} = (B U - 2 r_n) / (B - 2)``.
    """
    batch, x, y = len(x), x.double(), y.double()
    sum_x, sum_y, diagonal = x.sum(0), y.sum(0), (x * y).sum(1)
    rows = (x @ sum_y + y @ sum_x - 2 * diagonal) / (2 * (batch - 1))
    value = rows.mean()
    without = (batch * value - 2 * rows) / (batch - 2)
    return float(value), {"plug_in": float((4 * rows.var() / batch).sqrt()), "jackknife": jackknife_stderr(without)}


@dataclass(frozen=True)
class Directional:
    """Derivatives along v of each sample's terms, each [B, G, T] in float64 on the CPU, 0 where masked."""

    entropies: Tensor  # H_t
    d_entropies: Tensor  # ``dH_t[v]``
    d_logps: Tensor  # ``d log pi(y_t)[v]``

    def per_sequence(self, baseline: Tensor | None = None) -> Tensor:
        """``sum_t dH_t + (G_t - b_t) dlogp_t`` [B, G], whose expectation is ``dH[v]``.

        The baseline b [B, G, T] is the leave-one-out mean of G_t over the prompt's other completions by default.
        """
        later = _later(self.entropies)
        baseline = _others(later) if baseline is None else baseline
        return (self.d_entropies + (later - baseline) * self.d_logps).sum(-1)

    def per_token(self, mask: Tensor) -> Tensor:
        """Each sample's part [B, G] of ``dH_tok[v]``, which is their mean; mask [B, G, T]."""
        mask = mask.double()
        later, length = _later(mask), mask.sum() / mask[..., 0].numel()
        d_length = ((later - _others(later)) * self.d_logps).sum(-1)
        return (self.per_sequence() - self.entropies.sum() / mask.sum() * d_length) / length


def _later(values: Tensor) -> Tensor:
    """Sum over the tokens after each [.., T]."""
    return values.flip(-1).cumsum(-1).flip(-1) - values


def _others(values: Tensor) -> Tensor:
    """Mean over the prompt's other completions, 0 if there are none: a baseline independent of the token."""
    return (values.sum(1, keepdim=True) - values) / max(values.shape[1] - 1, 1)


@torch.no_grad()
def directional(backbone: Backbone, samples: Samples, vector: Tensor, microbatch: int = 8) -> Directional:
    """Forward-mode derivatives along a vector [P]; the policy is unchanged.

    Fused attention has no forward mode, so torch's unfused implementation is used here, whatever the model's own.
    """
    module, terms = _HiddenStates(backbone), [torch.zeros(samples.ids.shape, dtype=torch.float64) for _ in range(3)]
    pairs = module.along(vector)
    for rows, prompts, ids, mask in samples.microbatches(microbatch, backbone.device, "forward mode"):
        with fwd.dual_level(), sdpa_kernel(SDPBackend.MATH):
            dual = {name: fwd.make_dual(*pair) for name, pair in pairs.items()}
            hidden, head = functional_call(module, dual, (prompts, ids))
            chunks = [_row_terms(head, h, i)
                      for h, i in zip(hidden.split(ROWS), ids.flatten().split(ROWS), strict=True)]  # fmt: skip
        for total, values in zip(terms, zip(*chunks, strict=True), strict=True):
            total.view(-1, total.shape[-1])[rows] = (torch.cat(values).view(mask.shape) * mask).double().cpu()
    return Directional(*terms)


def _row_terms(head: Head, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logp = head(hidden).log_softmax(-1)
    entropy = fwd.unpack_dual(-(logp.exp() * logp).sum(-1))
    chosen = fwd.unpack_dual(logp.gather(1, ids.unsqueeze(1)).squeeze(1))
    zero = torch.zeros_like(entropy.primal)
    return entropy.primal, zero if entropy.tangent is None else entropy.tangent, chosen.tangent
