"""Train in one process with twice the microbatches, then in two; used by test_processes.py, test_sharded.py and
test_sampler.py, from a fresh process.

    python tests/training/processes.py FOLDER REWARD METHOD...           # and rloo on that reward, on two processes
    python tests/training/processes.py FOLDER --sharded METHOD...        # the base divided between two processes
    python tests/training/processes.py FOLDER --settings JSON            # of one run
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from runs import in_child, settings, toy_project, wait

from grade.cli.main import main as command_line
from grade.errors import InputError
from grade.gradients import objective, policy_gradient, replay
from grade.models.backbone import Backbone
from grade.models.sharded import divide
from grade.rewards.model import HeadSettings, RewardModel
from grade.training.config import TrainConfig
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

    def make(method: str, processes: int) -> TrainConfig:
        values = common | {"gradient_accumulation_steps": 2 // processes}
        values |= {"target_kl": 0.5} if method in TARGETED else {}
        values |= {"reward": [], "teacher": "base", "teacher_context": "A good film. "} if method == "teacher" else {}
        return settings(method, values, root / f"{method}-{processes}")

    return int(any(both_ways(partial(make, method), method, environment) for method in methods))


def both_ways(make, name: str, environment: dict[str, str]) -> int:
    """Train on one process, then on two; exit code 1 if one of them fails."""
    for processes in (1, 2):
        # Settings say on which process they are as soon as they are made: so they are made there.
        def work(processes=processes):
            return train(make(processes), lambda line: None)

        codes = [wait(in_child(work))] if processes == 1 else in_two(work, **environment)
        if any(codes):
            print(f"{name} on {processes}: exit codes {codes}")
            return 1
    return 0


def given_settings(root: Path, values: dict) -> int:
    """One run both ways."""

    def make(processes: int) -> TrainConfig:
        return TrainConfig.parse(
            values | {"gradient_accumulation_steps": 2 // processes, "output_dir": f"{root}/{processes}"}
        )

    return both_ways(make, values["method"], {})


def failing(root: Path, values: dict, environment: dict[str, str], before=lambda: None) -> list[int]:
    """Exit codes of a run on the command line; errors go to the log."""
    (root / "train.yaml").write_text(json.dumps(values))

    def work():
        before()
        with open(os.environ["INTERRUPTED_LOG"], "a") as sys.stderr:
            code = command_line(["train", "--config", f"{root}/train.yaml", "--output-dir", f"{root}/failing"])
        os._exit(code)

    return in_two(work, **environment)


def sharded(root: Path, methods: list[str]) -> int:
    """Every method both ways, with a base divided between two processes; then, of sharded ones alone, in results.json:

    - ``interrupted``: exit codes of the last method's run, begun on one process, continued on two, then on one;
    - ``breaking``: exit codes of two processes of which the second one fails in the middle of a step;
    - ``recorded``: exit codes of two processes that compare hidden states.
    """
    common, environment = sharded_project(root), {"ACCELERATE_USE_FSDP": "true"}
    if one_and_two(root, methods, common, environment):
        return 1
    results = {"interrupted": interrupted(root, methods[-1], common, environment)}
    breaking = common | {"method": methods[0]}
    results["breaking"] = failing(root, breaking, environment, break_second_process)
    results["recorded"] = recorded(common["model"])
    (root / "results.json").write_text(json.dumps(results))
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


def break_second_process() -> None:
    """Let the second process's first loss be refused, in the middle of a step."""
    plain = objective.check_finite

    def check(reward, loss):
        plain(reward, loss)
        if os.environ["RANK"] == "1":
            raise InputError("loss", float("nan"), "finite numbers on the second process")

    replay.check_finite = policy_gradient.check_finite = check


def recorded(model: str) -> list[int]:
    """Exit codes of two processes that compare a divided base's hidden states with the whole one's.

    FSDP2 changes the class by which transformers finds them.
    """

    def states(base: Backbone) -> torch.Tensor:
        ids = torch.arange(1, 7).view(1, -1)
        outputs = base.outputs(base.embed(ids), torch.ones_like(ids), output_hidden_states=True)
        return outputs.hidden_states[1]

    def work():
        dist.init_process_group("gloo")
        base = Backbone.load(model)
        expected = states(base)
        divide(base, torch.device("cpu"))
        assert torch.equal(states(base), expected)

    return in_two(work)


def main(root: Path, kind: str, *rest: str) -> int:
    """One of the uses above."""
    if kind == "--sharded":
        return sharded(root, list(rest))
    if kind == "--settings":
        return given_settings(root, json.loads(rest[0]))
    common = toy_project(root) | {"max_steps": 3, "logging_steps": 1, "dtype": "float64"}
    code = one_and_two(root, list(rest), common, {})
    print(json.dumps(failing(root, common | {"reward": kind, "method": "rloo", "num_generations": 4}, {})))
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
