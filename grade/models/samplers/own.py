"""This package's own sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grade.models.samplers.interface import Sampler, Samples
from grade.models.sampling import generate

if TYPE_CHECKING:
    from grade.models.backbone import Backbone
    from grade.models.prompts import PromptBatch


class OwnSampler(Sampler):
    """`grade.models.sampling.generate`, with the log-probabilities of its tokens."""

    name = "own"

    def sample(  # noqa: D102
        self, backbone: Backbone, prompts: PromptBatch, max_new_tokens: int, generator: torch.Generator,
        min_new_tokens: int = 0,
    ) -> Samples:  # fmt: skip
        logps: list[Tensor] = []
        ids, mask = generate(
            backbone, prompts, max_new_tokens, generator, min_new_tokens=min_new_tokens, logps=logps
        )  # fmt: skip
        return Samples(ids, mask, torch.stack(logps, 1) * mask)
