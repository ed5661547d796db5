"""What the leanest step needs beside its weights, and how long the search for settings that fit takes."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time

import pandas as pd

from grade.memory.settings import StepConfig
from grade.memory.trace import trace

GIB = 2**30


def lean_table(model: str, batch: int, tokens: int) -> pd.DataFrame:
    """Bytes of the leanest step by phase: replay on one base in three roles, layers recomputed, reward on the table.

    Columns phase, peak_bytes, weights_bytes, over_weights_gib: one row for each phase and one, ``step``, for the whole
    step. Over its weights are adapter, optimizer, and what the step itself needs. ``tokens``: P and T.
    """
    step = StepConfig(
        model=model, batch_size=batch, prompt_tokens=tokens, max_new_tokens=tokens, method="ste", reward="bag",
        gradient_checkpointing=True,
    )  # fmt: skip
    traced = trace(step, all_passes=False)
    parts = traced.phases | {"step": traced.categories}
    rows = [(name, sum(bytes_of.values()), bytes_of["weights"]) for name, bytes_of in parts.items()]
    table = pd.DataFrame(rows, columns=["phase", "peak_bytes", "weights_bytes"])
    return table.assign(over_weights_gib=(table.peak_bytes - table.weights_bytes) / GIB)


def fits_table(model: str, budget: str, repeats: int) -> pd.DataFrame:
    """Seconds of ``grade memory --fits`` as users run it, in a process of its own: start and imports count.

    Columns run, wall_seconds, cpu_seconds (user and system), settings (rows of the table of settings), batch_size,
    max_new_tokens (the largest that fit).
    """
    command = [sys.executable, "-m", "grade", "memory", "--model", model, "--fits", budget, "--json"]
    rows = []
    for run in range(repeats):
        before, start = _cpu_seconds(), time.perf_counter()
        done = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
        wall, data = time.perf_counter() - start, json.loads(done.stdout)
        largest = {fit["quantity"]: fit["value"] for fit in data["fits"]}
        rows.append(
            dict(run=run, wall_seconds=wall, cpu_seconds=_cpu_seconds() - before, settings=len(data["settings"]),
                 batch_size=largest["batch_size"], max_new_tokens=largest["max_new_tokens"])
        )  # fmt: skip
    return pd.DataFrame(rows)


def _cpu_seconds() -> float:
    """Of processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
