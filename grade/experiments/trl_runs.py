"""TRL's trainers beside this project's: the same settings, a clock for both, and processes of their own.

TRL is an optional extra: ``pip install -e ".[peers]"``.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from transformers import TrainerCallback

from grade.errors import InputError
from grade.experiments.measured import write_table
from grade.models.adapter import LoraSettings
from grade.models.backbone import load_pretrained
from grade.results import environment
from grade.training.config import TrainConfig

SAME = (
    "learning_rate", "weight_decay", "max_grad_norm", "max_steps", "per_device_train_batch_size",
    "gradient_accumulation_steps", "max_completion_length", "temperature", "top_p", "top_k", "gradient_checkpointing",
    "bf16", "use_cpu", "seed",
)  # fmt: skip
"""Settings of `TrainConfig` that all of TRL's trainers which sample have by the same name."""
Observe = Callable[[Mapping[str, Tensor], int, float], None]
"""Takes the adapter's values (none: untrained), the step and the seconds of training so far."""


def have_trl() -> bool:
    """Whether TRL is installed; a folder of that name, such as a clone of it, is not TRL."""
    spec = find_spec("trl")
    return spec is not None and spec.origin is not None


def require_peer(name: str) -> None:
    """Say how TRL is installed, where it is not."""
    if not have_trl():
        raise InputError("peer", name, "the package trl, installed: pip install -e '.[peers]'")


def write_contest(folder: str | Path, tables: Mapping[str, pd.DataFrame | None], **about: Any) -> None:
    """Write the tables by name, and ``environment.json`` with TRL's version (and ``about``)."""
    for name, table in tables.items():
        if table is not None:
            write_table(Path(folder, name), table)
    write_table(Path(folder, "environment"), environment() | {"trl": have_trl() and version("trl")} | about)


def same_settings(config: TrainConfig) -> dict[str, Any]:
    """Settings of TRL's trainers for a run of ours; all others keep TRL's defaults."""
    return {name: getattr(config, name) for name in SAME} | {
        "lr_scheduler_type": config.lr_scheduler_type.value,
        "generation_kwargs": {"min_new_tokens": config.min_completion_length},
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


class Clock(TrainerCallback):
    """Times the steps, and shows the adapter every ``eval_steps`` and after the last; what looks at it does not count.

    ``start``: values of the adapter before training; None: the trainer's own.

    Attributes:
        seconds: Of each step, by the clock.
        cpu_seconds: Of each step, of the processor.
    """

    def __init__(self, config: TrainConfig, observe: Observe, start: Mapping[str, Tensor] | None = None) -> None:
        self.config, self.observe, self.start = config, observe, start
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Set the adapter."""
        if self.start is not None:
            set_peft_model_state_dict(model, dict(self.start))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock."""
        self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Stop the clock, and show the adapter if it is time."""
        self.seconds.append(time.perf_counter() - self._began[0])
        self.cpu_seconds.append(time.process_time() - self._began[1])
        if state.global_step % self.config.eval_steps == 0 or state.global_step == self.config.max_steps:
            with torch.random.fork_rng(devices=[]):  # a Trainer seeds torch, whose generator the peer samples with
                self.observe(get_peft_model_state_dict(model), state.global_step, sum(self.seconds))


def trl_trainer(
    base: str, dtype: torch.dtype, trainer: Callable[..., Any], arguments: Callable[..., Any],
    columns: Mapping[str, Sequence[Any]], lora: LoraSettings, folder: str, **options: Any,
) -> Any:  # fmt: skip
    """One of TRL's trainers with LoRA on a copy of a base (two adapters on one base would wrap each other).

    Its dataset has these columns.
    """
    from datasets import Dataset
    from datasets.table import InMemoryTable

    model, tokenizer = load_pretrained(base, dtype)
    tokenizer.padding_side = "left"
    adapter = LoraConfig(r=lora.r, lora_alpha=lora.alpha, lora_dropout=0.0, target_modules=lora.target_modules,
                         task_type="CAUSAL_LM")  # fmt: skip
    # Named, because hashing the table's content fails with some versions of pyarrow.
    dataset = Dataset(InMemoryTable.from_pydict(dict(columns)), fingerprint="prompts")
    return trainer(model=model, args=arguments(output_dir=folder), train_dataset=dataset, processing_class=tokenizer,
                   peft_config=adapter, **options)  # fmt: skip


def train_trl(
    base: str, dtype: torch.dtype, trainer: Callable[..., Any], arguments: Callable[..., Any],
    columns: Mapping[str, Sequence[Any]], clock: Clock,
) -> None:  # fmt: skip
    """Train a `trl_trainer` with a clock."""
    with tempfile.TemporaryDirectory() as folder:
        made = trl_trainer(base, dtype, trainer, arguments, columns, clock.config.lora, folder, callbacks=[clock])
        made.train()


def alone(function: Callable[..., Any], *args: Any) -> Any:
    """A function's result from a fresh process of one thread, whose seconds and peak memory are its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        return pool.submit(function, *args).result()
