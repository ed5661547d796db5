"""Steps with a teacher, traced and run."""

import pandas as pd

from grade.memory.settings import StepConfig
from grade.memory.step import build, make_step
from grade.memory.trace import run_tracked, trace


def taught_steps() -> dict[str, StepConfig]:
    """Steps by name: another model of the same shape as teacher, the base with a context, alone and beside a reward."""
    common = dict(model="tiny", dtype="float32", batch_size=4, prompt_tokens=8, max_new_tokens=8)
    other, base = dict(method="teacher", teacher="tiny"), dict(teacher="base", teacher_context_tokens=16)
    groups = dict(teacher="tiny", num_generations=2)
    steps = {f"beta {beta:g}": other | dict(teacher_beta=beta) for beta in (0.0, 0.5, 1.0)} | {
        "in bfloat16": other | dict(teacher_dtype="bfloat16"),
        "layers recomputed": other | dict(gradient_checkpointing=True),
        "autocast": other | dict(autocast=True),
        "base with a context": base | dict(method="teacher"),
        "beside a reward, rloo": groups | dict(method="rloo"),
        "beside a reward, rloo, base with a context": base | dict(method="rloo", num_generations=2),
        "beside a reward, grpo, layers recomputed": groups | dict(method="grpo", gradient_checkpointing=True),
        "beside a reward, distilled": groups | dict(method="distilled", distil_window=64),
    }
    return {name: StepConfig(**common | step) for name, step in steps.items()}


def traces_table() -> pd.DataFrame:
    """Peaks in bytes of `taught_steps`, traced, and counted while they run on a CPU with random weights."""
    rows = []
    for name, config in taught_steps().items():
        traced, tracked = trace(config, device="cpu"), run_tracked(make_step(config, *build(config, device="cpu"))).peak
        rows.append((name, traced.peak, tracked, traced.peak / tracked - 1))
    return pd.DataFrame(rows, columns=["step", "traced", "tracked", "rel_error"])
