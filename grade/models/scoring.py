"""Scores of given completions: log-probability, entropy and self-certainty of every token.

One teacher-forced pass, then the head in row chunks, so no [B, T, V] tensor exists. Used without gradient to score
(old policy, reference, Intuitor's reward) and with gradient in a policy-gradient update. The scores of token t are
those of the distribution that *predicts* it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from grade.errors import InputError
from grade.models.head import entropy, kl_divergence, token_logps
from grade.models.sampling import is_eos
from grade.models.self_certainty import self_certainty

if TYPE_CHECKING:
    from grade.models.backbone import Backbone
    from grade.models.prompts import PromptBatch


@torch.no_grad()
def sequence_kl(backbone: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
    """Exact full-vocabulary KL(policy || reference) in nats at each position [B, T], 0 where masked."""
    hidden = predicting_hidden(backbone, prompts, ids)
    with backbone.reference():
        ref_hidden = predicting_hidden(backbone, prompts, ids)
    return token_kl(backbone, hidden, ref_hidden, mask)


Score = Literal["logps", "entropy", "self_certainty"]


@dataclass(frozen=True)
class Scores:
    """The requested scores, each [B, T] in nats, 0 where masked; the others are None.

    Attributes:
        logps: Log-probability of each token.
        entropy: Entropy of its distribution.
        self_certainty: ``KL(U || p)`` of its distribution.
    """

    logps: Tensor | None = None
    entropy: Tensor | None = None
    self_certainty: Tensor | None = None


def predicting_hidden(backbone: Backbone, prompts: PromptBatch, ids: Tensor) -> Tensor:
    """Hidden states [B, T, D] at the positions that predict the tokens of completions [B, T]."""
    inputs = torch.cat([prompts.ids, ids[:, :-1]], 1)
    mask = prompts.mask_with(ids.shape[1] - 1)
    return backbone.hidden(backbone.embed(inputs), mask)[:, prompts.ids.shape[1] - 1 :]


def check_shapes(prompts: PromptBatch, ids: Tensor, mask: Tensor) -> None:
    """Check that ids and mask are [B, T], one completion of at least one token for each of B prompts.

    Raises:
        ValueError: Otherwise.
    """
    if ids.ndim != 2 or ids.shape != mask.shape or len(ids) != len(prompts) or ids.shape[1] < 1:
        shapes = f"{list(ids.shape)} and {list(mask.shape)}"
        raise ValueError(f"completions have ids and mask of shapes {shapes}, not [{len(prompts)}, T] with T >= 1")


def score(
    backbone: Backbone,
    prompts: PromptBatch,
    ids: Tensor,
    mask: Tensor,
    what: tuple[Score, ...] = ("logps",),
    temperature: float = 1.0,
    min_new_tokens: int = 0,
) -> Scores:
    """Score completions under the policy (within `Backbone.reference`: under the base).

    Args:
        backbone: The model.
        prompts: B prompts.
        ids: Completions [B, T].
        mask: [B, T], 1 at a token, end-of-sequence included.
        what: Which scores; each takes a pass over the head.
        temperature: Sampling temperature t, as in ``softmax(logits / t)``.
        min_new_tokens: As in sampling: before this many tokens, log-probabilities are those of the distribution
            without end-of-sequence. Entropy and self-certainty always use the whole distribution.

    Returns:
        The scores, with gradient where grad mode is on.

    Raises:
        ValueError: If shapes do not fit.
        InputError: If the temperature is not positive, or a completion ends too early.
    """
    check_shapes(prompts, ids, mask)
    if not 0 < temperature < float("inf"):
        raise InputError("temperature", temperature, "a finite number above 0")
    hidden = predicting_hidden(backbone, prompts, ids)
    return score_hidden(backbone, hidden, ids, mask, what, temperature, min_new_tokens)


def score_hidden(
    backbone: Backbone,
    hidden: Tensor,
    ids: Tensor,
    mask: Tensor,
    what: tuple[Score, ...],
    temperature: float = 1.0,
    min_new_tokens: int = 0,
) -> Scores:
    """`score` from the hidden states [B, T, D] of `predicting_hidden`."""
    hidden, eos, scores = hidden.flatten(0, 1), backbone.eos_token_ids, {}
    if "logps" in what:
        early = None
        if min_new_tokens > 0 and eos:
            early = (torch.arange(ids.shape[1], device=ids.device) < min_new_tokens).expand(ids.shape)
            if (is_eos(ids, eos) & early & mask.bool()).any():
                raise InputError("completions", "one that ends early", f"at least min_new_tokens = {min_new_tokens}")
            early = early.flatten()
        scores["logps"] = token_logps(backbone.head, hidden, ids.flatten(), temperature, eos, early)
    if "entropy" in what:
        scores["entropy"] = entropy(backbone.head, hidden, temperature)
    if "self_certainty" in what:
        scores["self_certainty"] = self_certainty(backbone.head, hidden, temperature)
    return Scores(**{name: values.view(mask.shape) * mask for name, values in scores.items()})


def token_kl(backbone: Backbone, hidden: Tensor, ref_hidden: Tensor, mask: Tensor) -> Tensor:
    """Exact full-vocabulary KL(policy || reference) at each token [B, T] in nats, 0 where masked.

    Args:
        backbone: Gives the head.
        hidden: The policy's hidden states [B, T, D] from `predicting_hidden`.
        ref_hidden: The reference's, constants.
        mask: [B, T].

    Returns:
        [B, T].
    """
    return kl_divergence(backbone.head, hidden.flatten(0, 1), ref_hidden.flatten(0, 1)).view(mask.shape) * mask
