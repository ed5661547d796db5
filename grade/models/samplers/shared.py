"""Our own sampler with less to compute: a prompt is read once for all its completions, a token costs one random number.

`generate` reads each prompt as often as it has completions, and draws Gumbel noise for the whole vocabulary, because
the relaxed methods need it. A sampler of plain completions needs neither. The completions have the same distribution;
they are other ones for the same seed, so this is a choice of its own.

A prompt's completions must follow each other in the batch, as in a group. The cache of a prompt is copied for each of
its completions, so nothing is saved on memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from grade.models.samplers.interface import Sampler, Samples, check_lengths
from grade.models.sampling import Decoder, check_finite, forbid_eos, is_eos

if TYPE_CHECKING:
    from grade.models.backbone import Backbone
    from grade.models.prompts import PromptBatch


BLOCK = 256
"""Tokens in a block: about the square root of a vocabulary."""


class SharedPrompts(Sampler):
    """Samples by inverse transform, prompts shared."""

    name = "shared"

    @torch.no_grad()
    def sample(  # noqa: D102
        self, backbone: Backbone, prompts: PromptBatch, max_new_tokens: int, generator: torch.Generator,
        min_new_tokens: int = 0,
    ) -> Samples:  # fmt: skip
        check_lengths(backbone, prompts, max_new_tokens, min_new_tokens)
        eos, alive, going = backbone.eos_token_ids, prompts.mask.new_ones(len(prompts), dtype=torch.bool), True
        ids, masks, logps = [], [], []
        with backbone.merged():
            state = shared_decoder(backbone, prompts)
            for step in range(max_new_tokens):
                if going:
                    token, logp = draw(forbid_eos(state.logits(), None, step, min_new_tokens, eos), generator)
                    check_finite(logp, alive)
                    for values, value in zip((ids, masks, logps), (token, alive, logp), strict=True):
                        values.append(value)
                    alive = alive & ~is_eos(token, eos)
                    going = bool(alive.any())
                # As in `generate`: all processes of a sharded base take part in each pass.
                if step + 1 == max_new_tokens or not backbone.anywhere(going):
                    break
                state.advance(backbone.embed(token))
        mask = torch.stack(masks, 1).long()
        return Samples(torch.stack(ids, 1), mask, torch.stack(logps, 1) * mask)


def shared_decoder(backbone: Backbone, prompts: PromptBatch) -> Decoder:
    """A decoder of B prompts that reads equal prompts in a row once.

    Args:
        backbone: The policy.
        prompts: B prompts.

    Returns:
        The decoder, with B rows.
    """
    keys = torch.cat([prompts.ids * prompts.mask, prompts.mask], 1)
    _, place = torch.unique_consecutive(keys, return_inverse=True, dim=0)
    first = torch.cat([place.new_ones(1), place.diff()]).nonzero().squeeze(1)
    state = Decoder(backbone, prompts[first])
    if len(first) < len(prompts):
        state.cache.batch_select_indices(place)
        state.mask, state.last = prompts.mask, state.last[place]
    return state


def draw(logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A token of each row's softmax by inverse transform, and its log-probability.

    With weights ``w_v = exp(l_v)``, cumulative sums ``c`` of whole blocks of tokens and u uniform in [0, 1), the block
    is the first with ``c > u C``, C the sum of all; what is left of u within the block then chooses the token in the
    same way. Blocks, because a cumulative sum over the vocabulary takes three times as long as the weights do.

    Args:
        logits: [B, V], -inf for forbidden tokens.
        generator: Source of u.

    Returns:
        Tokens [B] and log-probabilities [B] in the logits' type; not finite where the logits are not.

    >>> logits = torch.tensor([[0.0, float("-inf"), 0.0]]).expand(1000, 3)
    >>> tokens, logps = draw(logits, torch.Generator().manual_seed(0))
    >>> sorted(set(tokens.tolist())), round(float(logps[0].exp()), 6)
    ([0, 2], 0.5)
    """
    batch, vocab = logits.shape
    largest = logits.amax(-1, keepdim=True)
    weights = (logits - largest).exp_()
    if vocab % BLOCK:
        weights = F.pad(weights, (0, -vocab % BLOCK))
    blocks = weights.view(batch, -1, BLOCK)
    sums = blocks.sum(-1).double()
    ends = sums.cumsum(-1)
    total = ends[:, -1:]
    u = torch.rand(total.shape, generator=generator, dtype=torch.float64, device=logits.device) * total
    block = torch.searchsorted(ends, u, right=True).clamp(max=ends.shape[1] - 1)
    size = sums.gather(1, block)
    inside = blocks.gather(1, block.unsqueeze(-1).expand(-1, 1, BLOCK)).squeeze(1).double().cumsum(-1)
    rest = (u - ends.gather(1, block) + size) / size * inside[:, -1:]
    token = (block * BLOCK + torch.searchsorted(inside, rest, right=True)).clamp(max=vocab - 1)
    logp = logits.gather(-1, token) - largest - total.log().to(logits.dtype)
    return token.squeeze(-1), logp.squeeze(-1)
