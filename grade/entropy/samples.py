"""Samples of the policy for the estimates: kept on the CPU, moved to the device microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from grade.errors import InputError
from grade.models.prompts import PromptBatch
from grade.models.sampling import generate

if TYPE_CHECKING:
    from grade.models.backbone import Backbone


@dataclass(frozen=True)
class Samples:
    """G completions of each of B prompts, on the CPU.

    Attributes:
        prompts: B prompts.
        ids: Completions [B, G, T].
        mask: [B, G, T], 1 at a token, end-of-sequence included, 0 after it.
        temperature: Sampling temperature; log-probabilities are taken at the same temperature.
    """

    prompts: PromptBatch
    ids: Tensor
    mask: Tensor
    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Check shapes and that no completion is empty.

        Raises:
            ValueError: If shapes do not fit or a completion is empty.
            InputError: If the temperature is out of range.
        """
        if self.ids.ndim != 3 or self.ids.shape != self.mask.shape or len(self.ids) != len(self.prompts):
            shapes = f"{list(self.ids.shape)} and {list(self.mask.shape)}"
            raise ValueError(f"completions have ids and mask of shapes {shapes}, not [{len(self.prompts)}, G, T]")
        if not self.mask.bool().any(-1).all():
            raise ValueError("a completion is empty: each needs at least one token")
        if not 0 < self.temperature < float("inf"):
            raise InputError("temperature", self.temperature, "a finite number above 0")

    def of_prompts(self, rows: slice) -> Samples:
        """The samples of the selected prompts."""
        return Samples(self.prompts[rows], self.ids[rows], self.mask[rows], self.temperature)

    def microbatches(
        self, size: int, device: torch.device | str
    ) -> Iterator[tuple[slice, PromptBatch, Tensor, Tensor]]:
        """Consecutive rows of the flattened [B G] completions, moved to a device one microbatch at a time.

        Args:
            size: Completions per microbatch, at least 1.
            device: Target device.

        Yields:
            Rows, their prompts, ids [n, T] and mask [n, T].
        """
        if size < 1:
            raise InputError("microbatch size", size, "at least 1")
        batch, group, length = self.ids.shape
        owner = torch.arange(batch).repeat_interleave(group)
        ids, mask = self.ids.reshape(-1, length), self.mask.reshape(-1, length)
        for start in range(0, batch * group, size):
            rows = slice(start, min(start + size, batch * group))
            yield rows, self.prompts[owner[rows]].to(device), ids[rows].to(device), mask[rows].to(device)


@torch.no_grad()
def draw(
    backbone: Backbone,
    prompts: PromptBatch,
    group: int,
    max_new_tokens: int,
    generator: torch.Generator,
    temperature: float = 1.0,
    microbatch: int = 64,
) -> Samples:
    """Sample completions of the policy.

    Args:
        backbone: The policy.
        prompts: B prompts.
        group: G.
        max_new_tokens: T.
        generator: Source of the noise, on the backbone's device.
        temperature: Sampling temperature, above 0.
        microbatch: Completions sampled at once.

    Returns:
        The samples, on the CPU.

    Raises:
        InputError: If a size or the temperature is out of range.
    """
    for name, value in (("num_generations", group), ("microbatch size", microbatch)):
        if value < 1:
            raise InputError(name, value, "at least 1")
    if not 0 < temperature < float("inf"):
        raise InputError("temperature", temperature, "a finite number above 0: a greedy policy has no entropy")
    owner = torch.arange(len(prompts)).repeat_interleave(group)
    ids, masks = [], []
    for rows in owner.split(microbatch):
        part = prompts[rows].to(backbone.device)
        one, mask = generate(backbone, part, max_new_tokens, generator, temperature, stop_early=False)
        ids.append(one.cpu())
        masks.append(mask.cpu())
    shape = (len(prompts), group, max_new_tokens)
    return Samples(prompts.to("cpu"), torch.cat(ids).view(shape), torch.cat(masks).view(shape), temperature)
