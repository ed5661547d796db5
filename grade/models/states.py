"""Hidden states of the frozen base along completions: one pass, pooled at several depths.

The pass feeds the whole completion, its last token too, so one pass serves KL (states that predict the tokens), values
of tokens given what stands before them, and features of whole completions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from grade.models.prompts import position_ids

if TYPE_CHECKING:
    from grade.models.backbone import Backbone
    from grade.models.prompts import PromptBatch


@dataclass(frozen=True)
class States:
    """What one pass of the base says about completions.

    Attributes:
        predicting: Last hidden states that predict each token [B, T, D].
        pooled: By depth, the mean over the completion's tokens of the normalised states after so many layers [B, D];
            0 is the embedding itself.
    """

    predicting: Tensor
    pooled: Mapping[int, Tensor]


@torch.no_grad()
def completion_states(
    backbone: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor, depths: Sequence[int] = ()
) -> States:
    """Hidden states of completions under the frozen base.

    Args:
        backbone: Its base is used, with the adapter off.
        prompts: B prompts.
        ids: Completions [B, T].
        mask: [B, T].
        depths: Layers after which states are pooled, 0 to the number of layers.

    Returns:
        The states.
    """
    embeds = torch.cat([backbone.embed(prompts.ids), backbone.embed(ids)], 1)
    full = torch.cat([prompts.mask, mask.to(prompts.mask.dtype)], 1)
    with backbone.reference():
        layers = layer_states(backbone, embeds, full, depths)
    first = prompts.ids.shape[1]
    pooled = {depth: pool(layers[depth][:, first:], mask) for depth in depths}
    return States(layers[None][:, first - 1 : -1], pooled)


def layer_states(backbone: Backbone, embeds: Tensor, mask: Tensor, depths: Sequence[int]) -> dict[int | None, Tensor]:
    """Hidden states [B, L, D] after each of these layers, and under None those after the last norm.

    Args:
        backbone: The model, with or without its adapter.
        embeds: [B, L, D].
        mask: [B, L].
        depths: Layers.

    Returns:
        By depth; the deepest is the state after the last norm as well.
    """
    positions = {"position_ids": position_ids(mask)} if backbone._takes_positions else {}
    result = backbone.decoder(
        inputs_embeds=embeds, attention_mask=mask, use_cache=False, output_hidden_states=bool(depths), **positions
    )
    return {None: result.last_hidden_state} | {depth: result.hidden_states[depth] for depth in depths}


def pool(states: Tensor, mask: Tensor) -> Tensor:
    """Mean over valid positions [B, D] of normalised states [B, L, D]: a few of their entries are very large."""
    states = states.to(torch.promote_types(states.dtype, torch.float32))
    normal = F.layer_norm(states, states.shape[-1:]) * mask.unsqueeze(-1)
    return normal.sum(1) / mask.sum(1, keepdim=True)
