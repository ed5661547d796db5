"""What every experiment's notebook does around its story: settings, tables, figures, verdicts, files.

An experiment is a folder with

- ``measure/tables.py``: its settings and its tables (`grade.experiments.measured`). Nothing there knows a figure, so a
  colour never costs a measurement;
- ``metrics.py``, ``figures.py``, ``claims.yaml``: what is computed from the tables, drawn and judged in seconds.

The notebook opens a `Run`. It reads the tables from ``measured_dir`` where a stage of the pipeline has written them, or
the published ones of its ``profile``, and measures toy sizes where there are none. Times differ from run to run;
whatever holds one goes to a folder ``timings`` of its own, and everything else stays the same bytes.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from IPython.display import Markdown, display
from matplotlib.figure import Figure

from grade.config_files import read_values
from grade.errors import InputError
from grade.experiments.claims import Claim, write_claims
from grade.experiments.findings import save_figure, show_claims
from grade.experiments.measured import Tables, write_environment, write_table
from grade.pipeline.profiles import profile_values
from grade.results import write_metrics

TOY = "Toy sizes: every figure below shows that the code runs, and means nothing else."


class Run:
    """One execution of an experiment's notebook; ``toy``: with the sizes of a smoke test."""

    def __init__(self, experiment: ModuleType, parameters: Mapping[str, Any]) -> None:
        """Open a run of a module ``measure.tables`` with a notebook's ``globals()``, in the project's folder."""
        self.name = experiment.__name__.split(".")[2]  # grade.experiments.<name>.measure...
        _enter_project()
        values = {name: parameters[name] for name in experiment.Settings.model_fields}
        self.profile, measured_dir = parameters["profile"], parameters["measured_dir"]
        self.settings = experiment.Settings.parse(values, "parameters")
        if self.profile and not measured_dir:  # the pipeline gives both, and the values of the key that it runs
            if self.settings != experiment.Settings():
                raise InputError("profile", self.profile, '"", with which sizes of the parameters cell are measured')
            values |= profile_values(Path.cwd(), self.profile, self.name)
            folder = f"{_outputs(self.profile)}/{self.name}/measured"
            if Path(folder).is_dir():
                measured_dir = folder
                if "runs_dir" in values and not values["runs_dir"]:
                    values["runs_dir"] = f"{_outputs(self.profile)}/train"
                self.settings = experiment.Settings.parse(values, f"{self.name}.yaml of profile {self.profile}")
        self.toy = self.profile == "smoke" or self.settings == experiment.Settings()
        self.folder = Path(parameters["output_dir"])
        self.tables = Tables(experiment, self.settings, measured_dir)
        self.published = Path(measured_dir).parent / "metrics.json"
        if self.toy:
            display(Markdown(f"> **{TOY}**"))

    def show(self, figure: Figure, name: str, timed: bool = False) -> None:
        """Save a figure as ``figures/<name>.png`` and show it.

        One of times is saved below ``timings`` and shown as a link to that file, so that the executed notebook stays
        the same when times differ.
        """
        shown = save_figure(figure, self.folder / ("timings" if timed else "figures") / f"{name}.png")
        display(Markdown(f"![{name}](timings/{name}.png)") if timed and _executed() else shown)

    def show_timed(self, table: Any, name: str) -> None:
        """Show a table of times; in an executed notebook a link to ``timings/<name>.csv`` stands in its place."""
        if _executed():
            write_table(self.folder / "timings" / name, table)
            table = Markdown(f"[{name}.csv](timings/{name}.csv): times of this machine")
        display(table)

    def verdicts(self, claims: Iterable[Claim]) -> None:
        """Show the verdicts; none are given on toy sizes, and the figures of timed ones stand below ``timings``."""
        if self.toy:
            display(Markdown("No verdicts: these are toy sizes."))
            return
        show_claims([claim.without_times() if _executed() else claim for claim in claims])

    def finish(
        self, metrics: Mapping[str, Any], timed: Mapping[str, Any] | None = None, claims: Iterable[Claim] = ()
    ) -> None:  # fmt: skip
        """Write ``metrics.json`` and ``claims.csv``, and what holds times (``timed``) below ``timings``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_metrics(self.folder / "metrics.json", metrics)
        if timed:
            write_metrics(self.folder / "timings" / "metrics.json", timed)
        claims = list(claims)
        write_claims(self.folder / "claims.csv", [claim.without_times() for claim in claims])
        if any(claim.timed for claim in claims):
            write_claims(self.folder / "timings" / "claims.csv", [claim for claim in claims if claim.timed])
        write_environment(self.folder / "timings" / "environment.json")


def _executed() -> bool:
    """Whether the pipeline executes the notebook (a person looks at it otherwise)."""
    return os.environ.get("GRADE_EXECUTED") == "1"


def _enter_project() -> None:
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / "dvc.yaml").is_file():
            os.chdir(folder)
            return


def _outputs(profile: str) -> str:
    return read_values([f"params/{profile}/suite.yaml"]).get("outputs", "outputs")
