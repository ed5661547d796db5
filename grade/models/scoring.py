"""Given completions: log-probability and KL of every token, and hidden states.

One pass over the given tokens, then the head in row chunks (`grade.models.head`), so no [B, T, V] tensor exists. The
scores of token t are those of the distribution that *predicts* it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grade.errors import InputError
from grade.models.batch import PromptBatch
from grade.models.head import kl_and_entropy as row_kl_and_entropy
from grade.models.head import kl_divergence, token_logps, token_scores
from grade.models.policy import Policy
from grade.models.sampling import Decoder, early_rows, is_eos


def predicting_hidden(backbone: Policy, prompts: PromptBatch, ids: Tensor) -> Tensor:
    """Hidden states [B, T, D] at the positions that predict the tokens of completions [B, T].

    A prompt with several completions is read once where the policy `continues` a cache, and where that pays: a layer
    has some 12 D D products less for each of P tokens, and T T D more, of attention to later tokens.
    """
    pays = 1 < ids.shape[1] < (8 * prompts.ids.shape[1] * backbone.embedding_weight.shape[1]) ** 0.5
    if len(set(prompts.sources)) < len(prompts) and pays and backbone.continues:
        state = Decoder(backbone, prompts)
        return torch.cat([state.last.unsqueeze(1), state.advance(backbone.embed(ids[:, :-1]))], 1)
    inputs = torch.cat([prompts.ids, ids[:, :-1]], 1)
    mask = prompts.mask_with(ids.shape[1] - 1)
    return backbone.hidden(backbone.embed(inputs), mask)[:, prompts.ids.shape[1] - 1 :]


def completion_logps(
    backbone: Policy, prompts: PromptBatch, ids: Tensor, mask: Tensor, min_new_tokens: int = 0
) -> Tensor:
    """Log-probability of each token of completions [B, T] in nats, 0 where masked; from one pass of the policy.

    Within `Backbone.reference` the base's. With a gradient where grad mode is on. Before ``min_new_tokens`` tokens, of
    the distribution without end-of-sequence, as sampled.
    """
    if ids.ndim != 2 or ids.shape != mask.shape or len(ids) != len(prompts) or ids.shape[1] < 1:
        shapes = f"{list(ids.shape)} and {list(mask.shape)}"
        raise ValueError(f"completions have ids and mask of shapes {shapes}, not [{len(prompts)}, T] with T >= 1")
    return hidden_logps(backbone, predicting_hidden(backbone, prompts, ids), ids, mask, min_new_tokens)


def hidden_logps(backbone: Policy, hidden: Tensor, ids: Tensor, mask: Tensor, min_new_tokens: int = 0) -> Tensor:
    """`completion_logps` from the hidden states [B, T, D] of `predicting_hidden`."""
    early = _early(backbone, ids, mask, min_new_tokens)
    rows, eos = hidden.flatten(0, 1), backbone.eos_token_ids
    return token_logps(backbone.head, rows, ids.flatten(), eos, early).view(mask.shape) * mask


def hidden_scores(
    backbone: Policy, hidden: Tensor, ref_hidden: Tensor, ids: Tensor, mask: Tensor, min_new_tokens: int = 0,
    kl_gradient: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`hidden_logps` and `kl_and_entropy`, from one product with the policy's head; see `token_scores`."""
    early, reference = _early(backbone, ids, mask, min_new_tokens), (backbone.ref_head, ref_hidden.flatten(0, 1))
    rows, eos = hidden.flatten(0, 1), backbone.eos_token_ids
    scores = token_scores(backbone.head, rows, ids.flatten(), eos, early, reference, kl_gradient)
    return tuple(values.view(mask.shape) * mask for values in scores)


def _early(backbone: Policy, ids: Tensor, mask: Tensor, min_new_tokens: int) -> Tensor | None:
    """`early_rows` of completions, none of which may end before ``min_new_tokens``."""
    early = early_rows(mask, min_new_tokens)
    if early is not None and (is_eos(ids, backbone.eos_token_ids) & early.view(ids.shape) & mask.bool()).any():
        raise InputError("completions", "one that ends early", f"at least min_new_tokens = {min_new_tokens}")
    return early


def token_kl(backbone: Policy, hidden: Tensor, ref_hidden: Tensor, mask: Tensor) -> Tensor:
    """Exact full-vocabulary KL(policy || reference) at each token [B, T] in nats, 0 where masked.

    From hidden states [B, T, D] of `predicting_hidden`; the reference's are constants.
    """
    rows, ref_rows = hidden.flatten(0, 1), ref_hidden.flatten(0, 1)
    return kl_divergence(backbone.head, rows, backbone.ref_head, ref_rows).view(mask.shape) * mask


def kl_and_entropy(backbone: Policy, hidden: Tensor, ref_hidden: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`token_kl`, and the policy's entropy at each token [B, T] in nats, 0 where masked, without gradient.

    Both are of the whole distribution, from the same logits: end-of-sequence has its share before ``min_new_tokens``
    too.
    """
    rows, ref_rows = hidden.flatten(0, 1), ref_hidden.flatten(0, 1)
    scores = row_kl_and_entropy(backbone.head, rows, backbone.ref_head, ref_rows)
    return tuple(values.view(mask.shape) * mask for values in scores)


@torch.no_grad()
def sequence_kl(backbone: Policy, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
    """`token_kl` of completions [B, T], from a pass of the policy and one of the reference."""
    hidden = predicting_hidden(backbone, prompts, ids)
    with backbone.reference():
        ref_hidden = predicting_hidden(backbone, prompts, ids)
    return token_kl(backbone, hidden, ref_hidden, mask)
