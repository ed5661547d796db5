"""The tables of experiment 4: the step that ran out of memory, its six changes, and this project's step."""

from functools import cached_property
from typing import Any

import pandas as pd

from grade.config import Config
from grade.experiments.formulas import token_forwards_uncached
from grade.experiments.measured import Size
from grade.experiments.traced import categories_table, timelines_table, trace_all
from grade.memory.settings import StepConfig
from grade.memory.trace import Trace, trace

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
_TIMELINES = ("loop", "replay")
"""Configurations whose live bytes are shown over a step: the re-running loop and the replay, at equal sizes."""


class Settings(Config):
    """Sizes of the traced step."""

    model: str = "tiny"  # shape of the model; the document's is qwen3-4b
    prompt_tokens: Size = 4  # P
    batch_before: Size = 2  # B of the step that failed, 4 in the document
    batch_after: Size = 1  # B after change 1, 2 in the document
    tokens_before: Size = 2  # T of the step that failed, 48 in the document
    tokens_after: Size = 1  # T after change 2, 32 in the document
    processes: Size = 1  # traces that run at once

    @cached_property
    def steps(self) -> dict[str, StepConfig]:
        """The document's start, each of its changes alone, all together, and this project's step at the same size.

        Names as in `LABELS`. Accumulation is left out of change 1 (4 to 8 microbatches): a second microbatch also holds
        the adapter's gradients of the first, 45 MiB for Qwen3-4B, and needs nothing else.
        """
        sizes = dict(model=self.model, prompt_tokens=self.prompt_tokens)
        # Three float32 models, soft tokens over the whole vocabulary, every prefix re-run.
        start = sizes | dict(method="gumbel_legacy", gumbel_topk=0, reward="trunk", dtype="float32", base_copies=3,
                             batch_size=self.batch_before, max_new_tokens=self.tokens_before)  # fmt: skip
        changes: dict[str, dict[str, Any]] = {
            "half_batch": dict(batch_size=self.batch_after),
            "shorter": dict(max_new_tokens=self.tokens_after),
            "bfloat16": dict(dtype="bfloat16", attention="eager"),
            "checkpointed": dict(gradient_checkpointing=True),
            "freeing": dict(explicit_freeing=True),
            "autocast": dict(autocast=True),
        }
        together: dict[str, Any] = {}
        for change in changes.values():
            together |= change
        small = changes["half_batch"] | changes["shorter"] | dict(dtype="bfloat16")
        ours = sizes | dict(method="gumbel", reward="trunk", gumbel_topk=0) | small
        again = changes["checkpointed"]
        steps = {"start": start} | {name: start | change for name, change in changes.items()}
        steps |= {
            "all_six": start | together,
            "all_six_kept": start | together | dict(gradient_checkpointing=False),
            "loop": start | small,
            "loop_checkpointed": start | small | again,
            "replay": ours,
            "replay_checkpointed": ours | again,
            "lean": ours | again | dict(method="ste", gumbel_topk=256, reward="bag"),
        }
        return {name: StepConfig(**values) for name, values in steps.items()}

    @cached_property
    def traces(self) -> dict[str, Trace]:
        """Traces of the steps."""
        return trace_all(self.steps, self.processes)


def token_forwards(config: StepConfig) -> int:
    """Tokens that the policy processes forward in one optimizer step, recomputation in backward included."""
    prompt, new = config.prompt_tokens, config.max_new_tokens
    sequences, passes = config.batch_size, 2 if config.gradient_checkpointing else 1
    if config.engine_name == "replay":
        again = 1 + (config.hops + 1 if config.gradient_checkpointing else 0)
        return sequences * (1 + again) * (prompt + new - 1)
    passes += config.engine_name == "checkpointed"
    return sequences * passes * token_forwards_uncached(prompt, new)


def _configurations(s: Settings) -> pd.DataFrame:
    """What each configuration needs: bytes at the peak, of the weights, of the step beyond what is always there."""
    return pd.DataFrame(
        dict(configuration=name, peak_bytes=t.peak, weights_bytes=t.categories["weights"], step_bytes=t.step_bytes,
             peak_phase=t.peak_phase, token_forwards=token_forwards(s.steps[name]), flops=t.flops)
        for name, t in s.traces.items()
    )  # fmt: skip


def _largest(s: Settings) -> pd.DataFrame:
    """The largest tensors at the loop's peak, by the module that made them; none: made in backward or in a loss."""
    return pd.DataFrame(
        dict(nbytes=t.nbytes, shape=" x ".join(map(str, t.shape)), dtype=t.dtype, category=t.category,
             module=t.module or "none", phase=t.phase)
        for t in s.traces["loop"].largest
    )  # fmt: skip


TABLES = {
    "configurations": _configurations,
    "categories": lambda s: categories_table(s.traces),
    "timelines": lambda s: timelines_table({name: trace(s.steps[name], all_layers=True) for name in _TIMELINES}),
    "largest": _largest,
}
TIMED = {}
