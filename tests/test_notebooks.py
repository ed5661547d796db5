"""Rules that every notebook keeps, checked without running it (nbval does that), and published ones, run again."""

import ast
import os
import subprocess
import sys

import nbformat
import pytest
from imports import PROFILES, ROOT

from grade.config_files import read_yaml
from grade.pipeline.notebook import check_parameters, default_parameters

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_FUNCTION_LINES = 5
ALL_CASES = os.environ.get("GRADE_ALL_CASES") == "1"

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


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


@pytest.mark.parametrize("profile", PROFILES)
@each_notebook
def test_every_profile_gives_only_parameters_that_it_has(path, profile):
    for file in (ROOT / "params" / profile).glob(f"{path.stem}*.yaml"):
        check_parameters(path, read_yaml(file))


def run_again(root, path, how):
    """nbval's report on an executed notebook in a checkout that has neither data nor models."""
    for shared in ("conftest.py", "grade", "notebooks", "pyproject.toml", "tests"):
        (root / shared).symlink_to(ROOT / shared)
    own = ("GRADE_PROGRESS", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")  # who calls nbval sets none of them
    environment = {key: value for key, value in os.environ.items() if key not in own} | {"PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "pytest", how, "-p", "no:cacheprovider", path]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True).stdout


# Traces are the same on every processor. What a tiny model writes is not: of the tutorial a tagged cell is compared.
PUBLISHED = {"tutorial": "--nbval-lax"} | ({"exp4": "--nbval", "tracer": "--nbval"} if ALL_CASES else {})


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_notebook_that_needs_no_data_has_the_same_outputs_again(tmp_path, name):
    path = f"outputs/{name}/{name}.ipynb"
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text((ROOT / path).read_text())
    report = run_again(tmp_path, path, PUBLISHED[name])
    assert " passed" in report and " failed" not in report, report


def test_nbval_finds_a_changed_number_and_neither_last_digits_nor_bars(tmp_path):
    cells = [
        ("print('a loss of 1.23456')", "a loss of 1.23987\n"),
        ("from grade.results import progress\nprint(sum(progress([1, 2], 'bar')))", "3\n"),
        ("print('a loss of 1.23456')", "a loss of 1.24456\n"),
        ("print('0.001234 and 1234 bytes')", "0.001234 and 1235 bytes\n"),
    ]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    for source, output in cells:
        stream = nbformat.v4.new_output("stream", name="stdout", text=output)
        notebook.cells.append(nbformat.v4.new_code_cell(source, execution_count=1, outputs=[stream]))
    nbformat.write(notebook, tmp_path / "executed.ipynb")
    report = run_again(tmp_path, "executed.ipynb", "--nbval")
    assert [f"FAILED executed.ipynb::Cell {n}" in report for n in range(4)] == [False, False, True, True], report
    assert "2 failed, 2 passed" in report
