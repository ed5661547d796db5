"""What a distilled reward teaches: the tokens that it likes most and least."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from grade.gradients.distilled.learner import DistilledGradient
    from grade.models.backbone import Backbone

SHOWN = 20
"""Tokens at either end."""


def token_table(backbone: Backbone, learner: DistilledGradient, shown: int = SHOWN) -> pd.DataFrame:
    """The tokens that the distilled reward likes most and least, as text.

    Only tokens that completions had are listed: what a fit says of others is an extrapolation.

    Args:
        backbone: Its tokenizer makes the text.
        learner: Holds the fit.
        shown: Tokens at either end.

    Returns:
        Columns rank (1 is liked most, -1 least), token, id, value (what one token changes the completion's reward by,
        less the mean over the listed completions' tokens) and count (in the completions that are kept). Empty before
        the first fit.
    """
    columns = ["rank", "token", "id", "value", "count"]
    values, counts = learner.liked_tokens(), learner.store.token_counts(backbone.vocab_size)
    if values is None:
        return pd.DataFrame(columns=columns)
    values = values.double().cpu()
    values = values - (values * counts).sum() / counts.sum()
    seen = (counts > 0).nonzero().flatten()
    order = seen[values[seen].argsort(descending=True)].tolist()
    ends = [(rank + 1, i) for rank, i in enumerate(order[:shown])]
    least = order[max(shown, len(order) - shown) :]
    ends += [(rank - len(least), i) for rank, i in enumerate(least)]
    text = backbone.tokenizer.decode if backbone.tokenizer is not None else lambda ids: str(ids[0])
    rows = [(rank, text([i]), i, float(values[i]), int(counts[i])) for rank, i in ends]
    return pd.DataFrame(rows, columns=columns)
