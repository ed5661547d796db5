"""The embedding table through which a reward reads tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class EmbeddingTable:
    """The frozen embedding table through which a reward reads tokens.

    Attributes:
        weight: [V, D_R], a row for each of the policy's V token ids.
        scale: Factor between a row and what the reward's first layer receives.
    """

    weight: Tensor
    scale: float = 1.0

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., D_R] of token ids."""
        return F.embedding(ids, self.weight) * self.scale
