"""Kill training runs at random moments, resume them, compare every bit with the uninterrupted run.

    python tests/training/interrupted.py FOLDER METHOD...

Every method is killed once. Every run is forked from this process, which has imported everything and has no threads, so
that one trial takes as long as training does.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

from runs import in_child, settings, toy_project, wait

from grade.training.checkpoint import last_checkpoint
from grade.training.config import TrainConfig
from grade.training.run import train

SAME = ("adapter/adapter_model.safetensors", "adapter/optimizer.pt", "history.csv", "metrics.json", "samples.json")
"""What must be the same bytes; everything but times."""


def run(config: TrainConfig, resume: str = "no") -> int:
    """Start a run in a child process; its id."""
    return in_child(lambda: train(config, lambda line: None, resume))


def trial(config: TrainConfig, moment: float, whole: Path) -> bool:
    """Kill one run, resume it; whether it ended as the whole one."""
    child = run(config)
    time.sleep(moment)
    if os.waitpid(child, os.WNOHANG)[0] == 0:
        os.kill(child, signal.SIGKILL)
        wait(child)
    stopped, output = last_checkpoint(config.output_dir), Path(config.output_dir)
    equal = wait(run(config, "yes")) == 0 and all(
        (output / name).read_bytes() == (whole / name).read_bytes() for name in SAME
    )
    at = stopped.name if stopped else "start"
    print(f"{config.method:14} killed after {moment:5.2f} s, resumed from {at}: {equal}", flush=True)
    return equal


def main(root: Path, *methods: str) -> int:
    """Run the trials; exit code 1 if one fails."""
    common, draw, equal = toy_project(root), random.Random(1), []
    for method in methods:
        whole, start = root / f"whole-{method}", time.perf_counter()
        equal.append(wait(run(settings(method, common, whole))) == 0)
        seconds = time.perf_counter() - start
        equal.append(trial(settings(method, common, root / method), draw.uniform(0, seconds), whole))
    return int(not all(equal))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
