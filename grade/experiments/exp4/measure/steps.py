"""Experiment 4's configurations: the step that ran out of memory, its six changes, and this project's step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from grade.experiments.formulas import token_forwards_cached, token_forwards_uncached
from grade.memory.settings import StepConfig
from grade.memory.trace import Trace

START = dict(method="gumbel_legacy", gumbel_topk=0, reward="trunk", dtype="float32", base_copies=3)
"""The document's step: three float32 models, soft tokens over the whole vocabulary, every prefix re-run."""

LABELS = {
    "start": "start",
    "half_batch": "1 half the batch",
    "shorter": "2 shorter completions",
    "bfloat16": "3 bfloat16, eager",
    "checkpointed": "4 layers checkpointed",
    "freeing": "5 explicit freeing",
    "autocast": "6 autocast",
    "all_six": "all six",
    "all_six_kept": "all six, without checkpointing",
    "loop": "bfloat16, sdpa, sizes of 1 and 2",
    "loop_checkpointed": "… layers checkpointed",
    "replay": "replay, one base",
    "replay_checkpointed": "replay, layers checkpointed",
    "lean": "replay, checkpointed, ste, K = 256, bag",
}
"""Configurations, and what figures call them."""


def configurations(
    model: str, prompt_tokens: int, batch_sizes: tuple[int, int], lengths: tuple[int, int]
) -> dict[str, StepConfig]:
    """The document's start, each of its changes alone, all together, and this project's step at the same size.

    Configurations by name, as in `LABELS`. Accumulation is left out of change 1 (4 to 8 microbatches): a second
    microbatch also holds the adapter's gradients of the first, 45 MiB for Qwen3-4B, and needs nothing else.
    """
    start = START | dict(model=model, prompt_tokens=prompt_tokens, batch_size=batch_sizes[0], max_new_tokens=lengths[0])
    changes: dict[str, dict[str, Any]] = {
        "half_batch": dict(batch_size=batch_sizes[1]),
        "shorter": dict(max_new_tokens=lengths[1]),
        "bfloat16": dict(dtype="bfloat16", attention="eager"),
        "checkpointed": dict(gradient_checkpointing=True),
        "freeing": dict(explicit_freeing=True),
        "autocast": dict(autocast=True),
    }
    together: dict[str, Any] = {}
    for change in changes.values():
        together |= change
    small = dict(batch_size=batch_sizes[1], max_new_tokens=lengths[1], dtype="bfloat16")
    ours = dict(model=model, prompt_tokens=prompt_tokens, method="gumbel", reward="trunk", gumbel_topk=0, **small)
    steps = {"start": start} | {name: start | change for name, change in changes.items()}
    steps |= {
        "all_six": start | together,
        "all_six_kept": start | together | dict(gradient_checkpointing=False),
        "loop": start | small,
        "loop_checkpointed": start | small | dict(gradient_checkpointing=True),
        "replay": ours,
        "replay_checkpointed": ours | dict(gradient_checkpointing=True),
        "lean": ours | dict(method="ste", gumbel_topk=256, reward="bag", gradient_checkpointing=True),
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


def configurations_table(steps: Mapping[str, StepConfig], traces: Mapping[str, Trace]) -> pd.DataFrame:
    """What each configuration needs.

    One row per configuration: its name; bytes at the peak (peak_bytes), of the weights (weights_bytes), of the step
    beyond weights, adapter and optimizer (step_bytes); peak_phase; token_forwards; flops of one optimizer step.
    """
    return pd.DataFrame(
        dict(
            configuration=name, peak_bytes=traces[name].peak, weights_bytes=traces[name].categories["weights"],
            step_bytes=traces[name].step_bytes, peak_phase=traces[name].peak_phase,
            token_forwards=token_forwards(config), flops=traces[name].flops,
        )
        for name, config in steps.items()
    )  # fmt: skip


def largest_table(trace: Trace) -> pd.DataFrame:
    """The largest tensors at a trace's peak.

    Columns nbytes, shape (text, for example ``2 x 63 x 151936``), dtype, category, module (none: made in backward
    or in a loss), phase; largest first.
    """
    rows = [
        dict(nbytes=t.nbytes, shape=" x ".join(map(str, t.shape)), dtype=t.dtype, category=t.category,
             module=t.module or "none", phase=t.phase)
        for t in trace.largest
    ]  # fmt: skip
    return pd.DataFrame(rows)
