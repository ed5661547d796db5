"""Whether a step fits in memory at all."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch

from grade.config import check_bytes
from grade.models.policy import Policy

KEPT = 6
"""States of a token that a layer keeps for its gradient: half of what is traced for SmolLM2 and the tiny model."""


def check_room(backbone: Policy, sizes: Mapping[str, int], kept: float = 0.0, teacher: Any = None) -> None:
    """Refuse sizes of a batch, rows and tokens, that this machine has no memory for beside the weights.

    ``teacher``: another model that is held. Estimated from below: one layer's state of each token, and for the token
    that is drawn logits, scaled logits, noise; for a gradient `KEPT` states in each adapted layer, of a share ``kept``
    of the rows.
    """
    if backbone.device.type == "cuda":
        memory = torch.cuda.get_device_properties(backbone.device).total_memory
    elif backbone.device.type == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    else:
        return
    rows, tokens = sizes.values()
    named = backbone.peft.named_parameters() if backbone.peft else ()
    layers = {number for name, p in named if p.requires_grad for number in re.findall(r"\.(\d+)\.", name)[:1]}
    states = max(1, int(KEPT * kept * len(layers)))
    each = states * backbone.hidden_size * backbone.dtype.itemsize + 3 * 4 * backbone.vocab_size // tokens
    models = [backbone.model] if teacher is None else [backbone.model, teacher]
    # A teacher's may be the policy's; those on the meta device have no address.
    held = {p.data_ptr() or id(p): p.nbytes for model in models for p in model.parameters()}
    check_bytes(sizes, each, max(1, memory - sum(held.values())))
