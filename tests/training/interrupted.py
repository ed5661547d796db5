"""Kill training runs at random moments, resume them, compare every bit with the uninterrupted run.

    python tests/training/interrupted.py FOLDER --kills 50 --terms 10 --interrupts 10

Every run is forked from this process, which has imported everything and has no threads, so that one trial takes as long
as training does. Methods take turns.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from runs import in_child, settings, toy_project, wait

from grade.gradients.methods import METHODS
from grade.training.config import TrainConfig
from grade.training.folder import last_checkpoint
from grade.training.run import train
from grade.training.trainer import LEARNER_FILE

SAME = ("adapter/adapter_model.safetensors", "adapter/optimizer.pt", "history.csv", "metrics.json", "samples.json")
"""What must be the same bytes; everything but times. With it the learner's state in the last checkpoint."""


def run(config: TrainConfig, resume: str) -> int:
    """One run in a child process, to its end."""
    return wait(in_child(lambda: train(config, lambda line: None, resume)))


def trial(number: int, method: str, common: dict, root: Path, seconds: float, expected: dict) -> list[str]:
    """Interrupt one run, resume it; what went wrong."""
    output, kind = root / f"trial-{number}", common["signal"]
    config = settings(method, common["settings"], output)
    child = in_child(lambda: train(config, lambda line: None))
    moment = common["random"].uniform(0, seconds)
    time.sleep(moment)
    finished = os.waitpid(child, os.WNOHANG)
    if finished[0] == 0:
        os.kill(child, kind)
        wait(child)
    wrong, stopped = [], last_checkpoint(output)
    code = run(config, "yes")
    if code:
        wrong.append(f"resumed run ended with {code}")
    else:
        wrong += [name for name, content in expected.items() if (output / name).read_bytes() != content]
        wrong += [p.name for p in output.iterdir() if p.name.endswith(".adapter")]
    shutil.rmtree(output, ignore_errors=True)
    at = stopped.name if stopped else "start"
    ended = wrong or "equal"
    print(f"{number:3} {method:14} signal {kind:2} after {moment:5.2f} s, resumed from {at}: {ended}", flush=True)
    return wrong


def main() -> int:
    """Run the trials; exit code 1 if one fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    for name, default in (("--kills", 50), ("--terms", 10), ("--interrupts", 10), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    common = {"settings": toy_project(args.folder), "random": random.Random(args.seed)}
    seconds, expected, failed, number = {}, {}, 0, 0
    signals = [signal.SIGKILL] * args.kills + [signal.SIGTERM] * args.terms + [signal.SIGINT] * args.interrupts
    for number, kind in enumerate(signals):
        method = args.methods[number % len(args.methods)]
        if method not in expected:
            output, start = args.folder / f"whole-{method}", time.perf_counter()
            code = run(settings(method, common["settings"], output), "no")
            if code:
                print(f"{method}: the uninterrupted run ended with {code}")
                return 1
            seconds[method] = time.perf_counter() - start
            learned = [str(file.relative_to(output)) for file in last_checkpoint(output).glob(LEARNER_FILE)]
            expected[method] = {name: (output / name).read_bytes() for name in (*SAME, *learned)}
        failed += bool(trial(number, method, common | {"signal": kind}, args.folder, seconds[method], expected[method]))
    print(f"{len(signals) - failed} of {len(signals)} runs ended with the same bits")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
