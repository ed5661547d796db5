"""Train in one process with twice the microbatches, then in two, from a fresh process.

python tests/training/processes.py FOLDER REWARD METHOD...           # and rloo on that reward, on two processes
python tests/training/processes.py FOLDER --sharded METHOD...        # the base divided between two processes
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path

import torch
from runs import in_child, settings, toy_project, wait

from grade.cli.main import main as command_line
from grade.models.backbone import Backbone
from grade.rewards.model import HeadSettings, RewardModel
from grade.training.loop import GradeTrainer
from grade.training.run import train

TARGETED = ("gumbel", "ppo")
"""Methods with a budget for KL."""


def free_port() -> int:
    """A port for the processes to meet at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def in_two(work, **environment: str) -> list[int]:
    """Do the work in two processes that find each other, as ``accelerate launch`` starts them; their exit codes."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    children = []
    for rank in range(2):
        os.environ.update(address | environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        children.append(in_child(work))
    for name in (*address, *environment, "RANK", "LOCAL_RANK"):
        del os.environ[name]
    return [wait(child) for child in children]


def one_and_two(root: Path, methods: list[str], common: dict, environment: dict[str, str]) -> int:
    """Every method both ways; exit code 1 if a run fails."""
    for method, processes in ((method, processes) for method in methods for processes in (1, 2)):
        values = common | {"gradient_accumulation_steps": 2 // processes}
        values |= {"target_kl": 0.5} if method in TARGETED else {}
        values |= {"reward": [], "teacher": "base", "teacher_context": "A good film. "} if method == "teacher" else {}

        # Settings say on which process they are as soon as they are made: so they are made there.
        def work(method=method, values=values, output=root / f"{method}-{processes}"):
            return train(settings(method, values, output), lambda line: None)

        codes = [wait(in_child(work))] if processes == 1 else in_two(work, **environment)
        if any(codes):
            print(f"{method} on {processes}: exit codes {codes}")
            return 1
    return 0


def failing(root: Path, values: dict) -> list[int]:
    """Exit codes of a run on the command line; errors go to the log."""
    (root / "train.yaml").write_text(json.dumps(values))

    def work():
        with open(os.environ["INTERRUPTED_LOG"], "a") as sys.stderr:
            code = command_line(["train", "--config", f"{root}/train.yaml", "--output-dir", f"{root}/failing"])
        os._exit(code)

    return in_two(work)


def sharded(root: Path, methods: list[str]) -> int:
    """Every method both ways, with a base divided between two processes; then the last one's run, twice interrupted.

    Its exit codes are printed: it begins on one process, and goes on on two, then on one.
    """
    common, environment = sharded_project(root), {"ACCELERATE_USE_FSDP": "true"}
    if one_and_two(root, methods, common, environment):
        return 1
    print(json.dumps(interrupted(root, methods[-1], common, environment)))
    return 0


def sharded_project(root: Path) -> dict:
    """Five steps with what makes processes wait for each other.

    A trunk reward, batches of an evaluation that differ in number and in KL, completions that end early.
    """
    common = toy_project(root)
    generation = root / "base" / "generation_config.json"
    every_second = {"eos_token_id": list(range(0, 300, 2))}
    generation.write_text(json.dumps(json.loads(generation.read_text()) | every_second))
    base = Backbone.load(common["model"])
    torch.manual_seed(1)
    RewardModel("trunk", base, HeadSettings(dropout=0.0)).save(root / "trunk")
    return common | {
        "max_steps": 5, "logging_steps": 1, "reward": [common["reward"], str(root / "trunk")],
        "per_device_eval_batch_size": 6, "kl_eval_prompts": 6,
    }  # fmt: skip


def interrupted(root: Path, method: str, common: dict, environment: dict[str, str]) -> list[list[int]]:
    """A run that is killed twice, and goes on with another number of processes each time."""

    def work(processes: int, last: int):
        def stopping(self, *args, plain=GradeTrainer.training_step):
            assert self.backbone.lockstep == (processes == 2)
            if self.state.global_step == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return plain(self, *args)

        GradeTrainer.training_step = stopping
        values = common | {"gradient_accumulation_steps": 2 // processes}
        return train(settings(method, values, root / "across"), lambda line: None, "yes")

    first = [wait(in_child(lambda: work(1, 2)))]
    return [first, in_two(lambda: work(2, 4), **environment), [wait(in_child(lambda: work(1, 0)))]]


def main(root: Path, kind: str, *rest: str) -> int:
    """One of the uses above."""
    if kind == "--sharded":
        return sharded(root, list(rest))
    common = toy_project(root) | {"max_steps": 3, "logging_steps": 1, "dtype": "float64"}
    code = one_and_two(root, list(rest), common, {})
    print(json.dumps(failing(root, common | {"reward": kind, "method": "rloo", "num_generations": 4})))
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
