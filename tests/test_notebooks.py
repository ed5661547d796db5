"""Rules that every notebook keeps, checked without running it (nbval does that)."""

import ast
import importlib
from pathlib import Path

import nbformat
import pytest
from nbstripout import strip_output

from grade.pipeline.notebook import check_parameters, default_parameters
from grade.pipeline.profiles import profile_values, profiles

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_FUNCTION_LINES = 5

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@each_notebook
def test_it_is_stripped(path):
    notebook = nbformat.read(path, as_version=4)
    stripped = strip_output(nbformat.read(path, as_version=4), keep_output=False, keep_count=False, keep_id=False)
    assert notebook == stripped, f"run: nbstripout notebooks/{path.name}"
    # What JupyterLab adds on saving, and nbstripout keeps, would make the pipeline's stage stale.
    assert "language_info" not in notebook.metadata
    assert [cell.id for cell in notebook.cells if {"editable", "slideshow"} & set(cell.metadata)] == []


@each_notebook
def test_it_names_the_kernel_that_every_environment_has(path):
    kernel = nbformat.read(path, as_version=4).metadata.kernelspec
    assert (kernel.name, kernel.display_name, kernel.language) == ("python3", "Python 3 (ipykernel)", "python")


@each_notebook
def test_it_has_one_parameters_cell_of_literals_each_explained(path):
    assert default_parameters(path)  # raises unless one cell of literals
    cells = [c for c in code(nbformat.read(path, as_version=4)) if "parameters" in c.metadata.get("tags", [])]
    assert [line for line in cells[0].source.splitlines() if line.strip() and "#" not in line] == []


@each_notebook
def test_it_narrates_and_the_library_computes(path):
    for cell in code(nbformat.read(path, as_version=4)):
        for node in ast.walk(ast.parse(cell.source)):
            assert not isinstance(node, ast.ClassDef), f"class {node.name} belongs in grade/"
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno - node.lineno < MAX_FUNCTION_LINES, f"{node.name} belongs in grade/"


# --- experiments ---

EXPERIMENTS = sorted(path.parent.parent.name for path in ROOT.glob("grade/experiments/*/measure/tables.py"))
OF_THE_RUN = {"profile", "measured_dir", "output_dir"}  # parameters that no number depends on


def settings_of(experiment):
    return importlib.import_module(f"grade.experiments.{experiment}.measure.tables").Settings


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_notebooks_parameters_are_the_settings_defaults(experiment):
    given = default_parameters(ROOT / "notebooks" / f"{experiment}.ipynb")
    assert list(given)[:3] == ["profile", "measured_dir", "output_dir"]
    values, settings = {name: given[name] for name in given if name not in OF_THE_RUN}, settings_of(experiment)
    assert set(values) == set(settings.model_fields)
    assert settings.parse(values) == settings()


@pytest.mark.parametrize("profile", profiles(ROOT))
def test_every_profile_gives_only_parameters_that_the_notebook_has(profile):
    suite = profile_values(ROOT, profile, "suite")
    for path in NOTEBOOKS:
        check_parameters(path, profile_values(ROOT, profile, path.stem))
    for key, experiment in (suite["alone"] | suite["experiments"]).items():
        values = profile_values(ROOT, profile, key)
        settings_of(experiment).parse(values, f"{profile}/{key}.yaml")
        check_parameters(ROOT / "notebooks" / f"{experiment}.ipynb", values)
