"""What gradients, sampling and scoring need of a policy; `grade.models.backbone.Backbone` is one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from grade.models.head import Head


class Policy(Protocol):
    """A causal language model over embeddings, with a trainable part and a frozen reference."""

    ref_head: Head  # the reference's
    eos_token_ids: tuple[int, ...]
    tokenizer: Any

    @property
    def head(self) -> Head:
        """The head of its present role: the reference's with the policy's token bias, or the reference's."""

    @property
    def embedding_weight(self) -> Tensor:
        """The frozen embedding table [V, D], unscaled."""

    @property
    def embedding_scale(self) -> float:
        """Factor between the table and what the first layer receives."""

    @property
    def vocab_size(self) -> int:
        """V."""

    @property
    def max_positions(self) -> int:
        """Longest context in tokens."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings [..., D] of token ids."""

    def hidden(self, inputs_embeds: Tensor, mask: Tensor) -> Tensor:
        """Last hidden states [B, L, D] of a pass over embeddings."""

    def decode(self, inputs_embeds: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Hidden states of new positions [B, n, D] on a cache, which grows."""

    def new_cache(self) -> Any:
        """An empty key-value cache."""

    @property
    def continues(self) -> bool:
        """Whether a pass of several positions may continue a cache, and its gradient reach what is cached."""

    def trainable_parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in a fixed order."""

    def reference(self) -> AbstractContextManager[None]:
        """Within this context it is the frozen reference."""

    def bare(self) -> AbstractContextManager[None]:
        """Within this context it is the frozen base, without adapter and token bias."""

    def merged(self) -> AbstractContextManager[None]:
        """Within this context it samples fast."""

    def checkpointed_layers(self, enabled: bool) -> AbstractContextManager[None]:
        """Within this context layers are recomputed in backward."""

    def anywhere(self, flag: bool) -> bool:
        """Whether a flag is set on any process that holds a part."""
