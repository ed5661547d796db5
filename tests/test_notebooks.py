"""Rules that every notebook keeps, checked without running it (nbval does that)."""

import ast

import nbformat
import pytest
from imports import PROFILES, ROOT

from grade.config_files import read_yaml
from grade.pipeline.notebook import check_parameters, default_parameters

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_FUNCTION_LINES = 5

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
