"""The tables of the experiment on scale, and the settings that they depend on."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, get_args

import pandas as pd
from pydantic import AfterValidator, Field

from grade.config import Config
from grade.experiments.measured import Seeds, Size, read_table
from grade.experiments.scale.measure import sampling, sharded
from grade.gradients.methods import MethodName
from grade.memory.plan import parse_bytes
from grade.memory.settings import Sharding, StepConfig
from grade.memory.trace import trace
from grade.models.samplers import known_sampler

GIB = 2**30


def _budget(text: str) -> str:
    parse_bytes(text, "fits_budget")
    return text


_Step = Literal[tuple(sharded.STEPS)]
_Budget = Annotated[str, AfterValidator(_budget)]
_Sampler = Annotated[str, AfterValidator(known_sampler)]


class Settings(Config):
    """Sizes of the experiment on scale."""

    model: str = "tiny"  # shape of the traced model
    batch: Size = 2  # B of the traced step
    prompt_tokens: Size = 8  # P
    new_tokens: Size = 8  # T
    lean_tokens: Size = 8  # P and T of the lean step, of two prompts
    gpus: list[Size] = Field([1, 2], min_length=1)  # GPUs that train together, traced
    methods: list[MethodName] = []  # methods that are trained in one process and in two
    steps: Size = 5  # optimizer steps of each
    sharded_steps: list[_Step] = []  # steps whose traced peak is held against two real processes
    fits_model: str = ""  # shape of the model that a budget is searched for; empty: no search
    fits_budget: _Budget = "24GiB"  # that budget
    policy_dir: str = ""  # folder of the policy that samplers are compared on; empty: none
    samplers: list[_Sampler] = Field(["own", "shared"], min_length=1)  # samplers; own first
    draws: Size = 20_000  # draws of one position
    training_seeds: Seeds = []  # seeds of a training with each sampler
    training_steps: Size = 20  # its optimizer steps
    sampling_dir: str = ""  # folder of the policy whose sampling is timed; empty: none
    sampling_file: str = ""  # table of an earlier timing, with TRL in it; empty: timed here


def _gpus(s: Settings) -> pd.DataFrame:
    """Traced peaks of one of several GPUs: columns gpus, sharding, peak, received, and a category each, bytes."""
    step = StepConfig(model=s.model, batch_size=s.batch, prompt_tokens=s.prompt_tokens, max_new_tokens=s.new_tokens)
    rows = []
    for sharding in get_args(Sharding):
        for gpus in s.gpus:
            traced = trace(step, processes=gpus, sharding=sharding)
            rows.append(dict(gpus=gpus, sharding=sharding, peak=traced.peak, received=traced.received)
                        | dict(traced.categories))  # fmt: skip
    return pd.DataFrame(rows)


def _lean(s: Settings) -> pd.DataFrame:
    """Bytes of the leanest step by phase: replay on one base in three roles, layers recomputed, reward on the table.

    One row for each phase and one, ``step``, for the whole step. Over its weights are adapter, optimizer, and what the
    step itself needs.
    """
    step = StepConfig(
        model=s.model, batch_size=2, prompt_tokens=s.lean_tokens, max_new_tokens=s.lean_tokens, method="ste",
        reward="bag", gradient_checkpointing=True,
    )  # fmt: skip
    traced = trace(step)
    parts = traced.phases | {"step": traced.categories}
    rows = [(name, sum(bytes_of.values()), bytes_of["weights"]) for name, bytes_of in parts.items()]
    table = pd.DataFrame(rows, columns=["phase", "peak_bytes", "weights_bytes"])
    return table.assign(over_weights_gib=(table.peak_bytes - table.weights_bytes) / GIB)


def _fits(s: Settings) -> list[tuple]:
    """Seconds of ``grade memory --fits`` as users run it, in a process of its own: start and imports count."""
    command = [sys.executable, "-m", "grade", "memory", "--model", s.fits_model, "--fits", s.fits_budget, "--json"]
    before, start = os.times(), time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True)
    wall, after, data = time.perf_counter() - start, os.times(), json.loads(done.stdout)
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    largest = {fit["quantity"]: fit["value"] for fit in data["fits"]}
    return [(wall, cpu, len(data["settings"]), largest["batch_size"], largest["max_new_tokens"])]


def _where(
    asked: str, columns: str, rows: Callable[[Settings], Iterable[tuple | dict[str, Any]]]
) -> Callable[[Settings], pd.DataFrame]:
    """A table of these columns, without rows where the settings ask for none (a smoke test)."""
    return lambda s: pd.DataFrame(rows(s) if getattr(s, asked) else [], columns=columns.split())


_sampling = _where("sampling_dir", "batch round sampler seconds cpu_seconds", lambda s: sampling.sampling_seconds(
    s.sampling_dir))  # fmt: skip
TABLES = {
    "fsdp2": _where("methods", "method max_rel_diff bytes bytes_0 bytes_1 adapter_bytes",
                    lambda s: sharded.fsdp2_differences(s.steps, s.methods)),
    "sharded": _where("sharded_steps", "step rank traced tracked rel_error traced_received tracked_received whole",
                      lambda s: sharded.sharded_memory(s.sharded_steps)),
    "gpus": _gpus,
    "lean": _lean,
    "law": _where("policy_dir", "sampler n p mean_ratio largest_difference",
                  lambda s: sampling.law_rows(s.draws, s.policy_dir, s.samplers)),
    "training": _where("training_seeds", "seed sampler before after mean_ratio largest_difference", lambda s:
                       sampling.training_rows(s.training_seeds, s.samplers, max_steps=s.training_steps)),
}  # fmt: skip
TIMED = {
    "fits": _where("fits_model", "wall_seconds cpu_seconds settings batch_size max_new_tokens", _fits),
    "sampling": lambda s: read_table(s.sampling_file.removesuffix(".csv")) if s.sampling_file else _sampling(s),
}
