"""How long the search for settings that fit takes: the command as users run it, in a process of its own."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time

import pandas as pd


def fits_table(model: str = "qwen3-4b", budget: str = "24GiB", repeats: int = 1) -> pd.DataFrame:
    """Run ``grade memory --fits`` and time it: settings, largest sizes, single changes, and the allocator's share.

    Start and imports count. On a machine that is busy with other work ``cpu_seconds`` is the better number; the search
    runs on one core.

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
