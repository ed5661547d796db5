"""Reward models through the first layers of the frozen base: between ``bag`` (none) and ``trunk`` (all).

Trained as `trunk` is (`grade.rewards.fit`), on a base that is cut meanwhile. They answer how deep a reward may be
before its gradient says nothing about other tokens.
"""

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.rewards.fit import LabelledText, RewardConfig, TrunkSettings, train_reward


@contextlib.contextmanager
def first_layers(backbone: Backbone, depth: int) -> Iterator[None]:
    """Within this context the base, and its final norm, read only the first ``depth`` layers."""
    decoder = backbone.decoder
    name = "layers" if hasattr(decoder, "layers") else "h"
    every = getattr(decoder, name)
    if not 1 <= depth <= len(every):
        raise InputError("depth", depth, f"1 to {len(every)} layers")
    setattr(decoder, name, every[:depth])
    try:
        yield
    finally:
        setattr(decoder, name, every)


class ShallowReward(nn.Module):
    """A reward model on the first ``depth`` layers of the base, trained on the first ``tokens`` tokens of reviews."""

    def __init__(
        self, backbone: Backbone, depth: int, train_data: Sequence[LabelledText],
        validation_data: Sequence[LabelledText], tokens: int = 64,
    ) -> None:  # fmt: skip
        super().__init__()
        fit = TrunkSettings(train_size=len(train_data), validation_size=len(validation_data), max_tokens=tokens,
                            min_tokens=min(16, tokens), eval_size=2)  # fmt: skip
        config = RewardConfig(trunk=fit, eval_tokens=[tokens])
        self._base, self.depth = (backbone,), depth  # in a tuple: the base's weights are not this model's
        with first_layers(backbone, depth):
            self.model, _ = train_reward("trunk", config, backbone, train_data, validation_data)
        self.model.requires_grad_(False)

    def forward(self, embeds: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B] of embeddings [B, L, D]; see `RewardModel.forward`."""
        with first_layers(self._base[0], self.depth):
            return self.model(embeds, mask)
