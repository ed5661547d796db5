"""The tables of the experiment on teachers, and the settings that they depend on.

``python -m grade teacher-peers`` measures beside TRL, which needs its package, and writes a folder ``peers``.
"""

from functools import cached_property
from pathlib import Path
from typing import Self

import pandas as pd
from pydantic import Field, model_validator

from grade.config import Config
from grade.experiments.measured import Share, Size, read_csv
from grade.experiments.sums import sums_folder
from grade.experiments.teachers.measure.divergences import divergence_table
from grade.experiments.teachers.measure.hinted import HintedBench, HintedRuns, hint_table, hinted_runs
from grade.experiments.teachers.measure.traces import traces_table
from grade.experiments.training_runs import train_all


class Settings(Config):
    """Sizes."""

    betas: list[Share] = Field([0.5], min_length=1)  # divergences: 0 forward KL, 1 reverse KL
    runs: HintedRuns = HintedRuns()  # training runs with hints
    peers: str = ""  # folder of what was measured beside TRL; empty: none
    processes: Size = 1  # worker processes of one thread each, for training

    @model_validator(mode="after")
    def _check(self) -> Self:
        for run in hinted_runs(self.runs):
            _ = run.config  # a wrong setting of a method is refused
        return self

    @property
    def base(self) -> str:
        """Folder of the base that reads hints."""
        return sums_folder(self.runs.pretraining_steps, hinted=True).name

    @cached_property
    def trained_runs(self) -> pd.DataFrame:
        """All runs with hints."""
        bench = HintedBench({"policy": self.base}, runs=self.runs)
        return train_all(bench, hinted_runs(self.runs), self.processes)[0]

    def peer_table(self, name: str) -> pd.DataFrame | None:
        """A table of what was measured beside TRL; None where there is none."""
        file = Path(self.peers, name)
        return read_csv(str(file)) if self.peers and file.is_file() else None


TABLES = {
    "divergence": lambda s: divergence_table(s.betas),
    "traces": lambda s: traces_table(),
    "hints": lambda s: hint_table(s.base, s.runs.eval_repeats),
    "runs": lambda s: s.trained_runs.drop(columns="seconds"),
    "peers": lambda s: s.peer_table("curves.csv"),
    "trl_traces": lambda s: s.peer_table("trl_traces.csv"),
}
TIMED = {"peer_costs": lambda s: s.peer_table("timings/costs.csv")}
