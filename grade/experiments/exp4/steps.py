"""Experiment 4's configurations: the step that ran out of memory, its six changes, and this project's step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from grade.memory.formulas import token_forwards_cached, token_forwards_uncached
from grade.memory.step import StepConfig
from grade.memory.trace import Trace

START = dict(method="gumbel_legacy", gumbel_topk=0, reward="trunk", dtype="float32", base_copies=3)
"""The document's step: three float32 models, soft tokens over the whole vocabulary, every prefix re-run."""

LEAN = "replay, one base, checkpointed, ste, K = 256, bag"
"""This project's smallest step at the document's sizes."""


def configurations(
    model: str, prompt_tokens: int, batch_sizes: tuple[int, int], lengths: tuple[int, int]
) -> dict[str, StepConfig]:
    """The document's start, each of its changes alone, all together, and this project's step at the same size.

    Args:
        model: Name or folder of the model.
        prompt_tokens: P.
        batch_sizes: B before and after (4 and 2 in the document).
        lengths: T before and after (48 and 32).

    Returns:
        Configurations by name. Accumulation is left out of change 1 (4 to 8 microbatches): a second microbatch finds
        the adapter's gradients there, 45 MiB for Qwen3-4B, and needs nothing else more than the first.
    """
    start = START | dict(model=model, prompt_tokens=prompt_tokens, batch_size=batch_sizes[0], max_new_tokens=lengths[0])
    changes: dict[str, dict[str, Any]] = {
        "1 half the batch": dict(batch_size=batch_sizes[1]),
        "2 shorter completions": dict(max_new_tokens=lengths[1]),
        "3 bfloat16, eager": dict(dtype="bfloat16", attention="eager"),
        "4 layers checkpointed": dict(gradient_checkpointing=True),
        "5 explicit freeing": dict(explicit_freeing=True),
        "6 autocast": dict(autocast=True),
    }
    together: dict[str, Any] = {}
    for change in changes.values():
        together |= change
    small = dict(batch_size=batch_sizes[1], max_new_tokens=lengths[1], dtype="bfloat16")
    ours = dict(model=model, prompt_tokens=prompt_tokens, method="gumbel", reward="trunk", gumbel_topk=0, **small)
    steps = {"start": start} | {name: start | change for name, change in changes.items()}
    steps |= {
        "all six": start | together,
        "all six, without checkpointing": start | together | dict(gradient_checkpointing=False),
        "bfloat16, sdpa, sizes of 1 and 2": start | small,
        "… layers checkpointed": start | small | dict(gradient_checkpointing=True),
        "replay, one base": ours,
        "replay, one base, checkpointed": ours | dict(gradient_checkpointing=True),
        LEAN: ours | dict(method="ste", gumbel_topk=256, reward="bag", gradient_checkpointing=True),
    }
    return {name: StepConfig(**values) for name, values in steps.items()}


def token_forwards(config: StepConfig) -> int:
    """Tokens that the policy processes forward in one optimizer step, recomputation in backward included."""
    prompt, new = config.prompt_tokens, config.max_new_tokens
    sequences = config.batch_size * config.gradient_accumulation_steps
    passes = 2 if config.gradient_checkpointing else 1
    if config.engine_name == "replay":
        again = 1 + (config.hops + 1 if config.gradient_checkpointing else 0)
        return sequences * (token_forwards_cached(prompt, new - 1) + again * (prompt + new - 1))
    passes += config.engine_name == "checkpointed"
    return sequences * passes * token_forwards_uncached(prompt, new)


def table(steps: Mapping[str, StepConfig], traces: Mapping[str, Trace]) -> pd.DataFrame:
    """One row a configuration: peak, what is always there and what the step adds, in GiB; tokens and operations."""
    rows = []
    for name, config in steps.items():
        found = traces[name]
        rows.append({
            "configuration": name, "peak GiB": found.peak / 2**30,
            "weights, adapter, optimizer GiB": (found.peak - found.step_bytes) / 2**30,
            "step GiB": found.step_bytes / 2**30, "peak phase": found.peak_phase,
            "token-forwards": token_forwards(config), "TFLOP": found.flops / 1e12,
        })  # fmt: skip
    return pd.DataFrame(rows)
