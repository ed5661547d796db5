"""Train in one process with twice the microbatches, then in two; used by test_processes.py, from a fresh process.

    python tests/training/processes.py FOLDER METHOD...
    python tests/training/processes.py FOLDER --reward REWARD METHOD     # two processes only; prints their exit codes
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

from runs import in_child, settings, toy_project, wait

from grade.cli.main import main as command_line
from grade.training.run import train

TARGETED = ("gumbel", "reinforce")
"""Methods whose beta is adjusted on the way."""


def free_port() -> int:
    """A port for the processes to meet at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def in_two(work) -> list[int]:
    """Do the work in two processes that find each other, as ``accelerate launch`` starts them; their exit codes."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    children = []
    for rank in range(2):
        os.environ.update(address | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        children.append(in_child(work))
    for name in (*address, "RANK", "LOCAL_RANK"):
        del os.environ[name]
    return [wait(child) for child in children]


def one_and_two(root: Path, methods: list[str]) -> int:
    """Every method both ways; exit code 1 if a run fails."""
    common = toy_project(root) | {"max_steps": 3, "logging_steps": 1}
    for method in methods:
        for processes in (1, 2):
            values = common | {"gradient_accumulation_steps": 2 // processes}
            values |= {"target_kl": 0.5} if method in TARGETED else {}
            output = root / f"{method}-{processes}"

            # Settings say on which process they are as soon as they are made: so they are made there.
            def work(values=values, output=output, method=method):
                return train(settings(method, values, output), lambda line: None)

            codes = [wait(in_child(work))] if processes == 1 else in_two(work)
            if any(codes):
                print(f"{method} on {processes}: exit codes {codes}")
                return 1
    return 0


def failing(root: Path, reward: str, method: str) -> int:
    """A run on the command line; errors go to the log."""
    values = toy_project(root) | {"reward": reward, "method": method, "num_generations": 4}
    (root / "train.yaml").write_text(json.dumps(values))

    def work():
        with open(os.environ["INTERRUPTED_LOG"], "a") as sys.stderr:
            code = command_line(["train", "--config", f"{root}/train.yaml", "--output-dir", f"{root}/run"])
        os._exit(code)

    print(json.dumps(in_two(work)))
    return 0


if __name__ == "__main__":
    if "--reward" in sys.argv:
        sys.exit(failing(Path(sys.argv[1]), sys.argv[3], sys.argv[4]))
    sys.exit(one_and_two(Path(sys.argv[1]), sys.argv[2:]))
