"""A batch of tokenised prompts, and of their completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, Self

import torch
from torch import Tensor


class Rows:
    """A batch as a dataclass; tensors, other batches and dictionaries of them have an entry for each of its rows."""

    def __getitem__(self, rows: slice | Sequence[int] | Tensor) -> Self:
        """The selected rows, still a batch."""
        return replace(self, **{name: _selected(part, rows) for name, part in vars(self).items()})


def _selected(part: Any, rows: slice | Sequence[int] | Tensor) -> Any:
    if isinstance(part, dict):
        return {name: _selected(each, rows) for name, each in part.items()}
    return part[rows] if isinstance(part, Tensor | Rows) else part


def _numbers(rows: slice | Sequence[int] | Tensor, length: int) -> list[int]:
    """The numbers of the selected rows; without tensors, which have no data in a trace."""
    if isinstance(rows, slice):
        return list(range(length)[rows])
    picks = rows.tolist() if hasattr(rows, "tolist") else list(rows)
    return list(compress(range(length), picks)) if picks and isinstance(picks[0], bool) else picks


@dataclass(frozen=True)
class PromptBatch(Rows):
    """A batch of tokenised prompts, padded on the left."""

    ids: Tensor  # token ids, int64 [B, P]. At padding they are valid ids without meaning.
    mask: Tensor  # 1 at a token, 0 at padding, int64 [B, P]
    # the dataset's row of each prompt, B of them; None if the ids were not made from rows
    examples: tuple[Mapping[str, Any], ...] | None = None
    # a number for each prompt, B of them, the same for copies of one, which taking rows makes
    sources: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.examples is not None and len(self.examples) != len(self.ids):
            raise ValueError(f"{len(self.examples)} examples for {len(self.ids)} prompts")
        object.__setattr__(self, "sources", tuple(range(len(self.ids))))

    def __len__(self) -> int:
        """The number of prompts B."""
        return len(self.ids)

    def __getitem__(self, rows: slice | Sequence[int] | Tensor) -> PromptBatch:
        """The prompts of these rows, still a batch."""
        numbers = _numbers(rows, len(self))
        examples = None if self.examples is None else tuple(self.examples[i] for i in numbers)
        return PromptBatch(self.ids[rows], self.mask[rows], examples)._of(self.sources[i] for i in numbers)

    def repeat(self, times: int) -> PromptBatch:
        """Each prompt ``times`` times in a row, one for each of its completions."""
        return self[[row for row in range(len(self)) for _ in range(times)]]

    def distinct(self) -> tuple[PromptBatch, list[int]]:
        """One copy of each prompt, and the number of its copy there for each row."""
        place = {source: number for number, source in enumerate(dict.fromkeys(self.sources))}
        return self[[self.sources.index(source) for source in place]], [place[source] for source in self.sources]

    def rows(self) -> list[list[int]]:
        """Token ids of each prompt, without padding."""
        return [ids[mask.bool()].tolist() for ids, mask in zip(self.ids, self.mask, strict=True)]

    def mask_with(self, new_tokens: int) -> Tensor:
        """Attention mask [B, P + n] of the prompts followed by n further tokens."""
        return torch.cat([self.mask, self.mask.new_ones(len(self), new_tokens)], 1)

    def to(self, device: torch.device | str) -> PromptBatch:
        """The same batch on another device."""
        return PromptBatch(self.ids.to(device), self.mask.to(device), self.examples)._of(self.sources)

    def _of(self, sources: Iterable[int]) -> Self:
        object.__setattr__(self, "sources", tuple(sources))
        return self


@dataclass(frozen=True)
class Completions(Rows):
    """A completion of each of B prompts; the G of one prompt stand in a row."""

    prompts: PromptBatch
    ids: Tensor  # [B, T], padded on the right
    mask: Tensor  # [B, T], 1 at a token, end-of-sequence included
    rewards: Tensor | None = None  # [B] float64, NaN where no function scored; None: they were not asked

    def __len__(self) -> int:
        """The number of completions B."""
        return len(self.ids)

    @property
    def text(self) -> tuple[PromptBatch, Tensor, Tensor]:
        """Prompts, ids, mask."""
        return self.prompts, self.ids, self.mask

    def batches(self, size: int) -> list[tuple[PromptBatch, Tensor, Tensor]]:
        """Prompts, ids, mask of ``size`` completions at a time."""
        return [self[start : start + size].text for start in range(0, len(self), size)]
