"""What the leanest step of a large model needs beside its weights, traced."""

from __future__ import annotations

import pandas as pd

from grade.memory.decoding import quick_trace
from grade.memory.step import StepConfig

GIB = 2**30


def lean_step(model: str = "qwen3-4b", batch: int = 2, prompt_tokens: int = 32, new_tokens: int = 32) -> StepConfig:
    """Replay on one base in three roles, layers recomputed, the reward on the embedding table."""
    return StepConfig(
        model=model, batch_size=batch, prompt_tokens=prompt_tokens, max_new_tokens=new_tokens, method="ste",
        reward="bag", gradient_checkpointing=True,
    )  # fmt: skip


def lean_table(model: str = "qwen3-4b", batch: int = 2, prompt_tokens: int = 32, new_tokens: int = 32) -> pd.DataFrame:
    """Bytes of the lean step by phase.

    Columns phase, peak_bytes, weights_bytes, over_weights_gib: one row for each phase and one, ``step``, for the
    whole step. Over its weights are adapter, optimizer, and what the step itself needs.
    """
    found = quick_trace(lean_step(model, batch, prompt_tokens, new_tokens))
    parts = found.phases | {"step": found.categories}
    rows = [(name, sum(bytes_of.values()), bytes_of["weights"]) for name, bytes_of in parts.items()]
    table = pd.DataFrame(rows, columns=["phase", "peak_bytes", "weights_bytes"])
    return table.assign(over_weights_gib=(table.peak_bytes - table.weights_bytes) / GIB)
