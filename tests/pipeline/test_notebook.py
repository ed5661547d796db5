"""The notebook runner: strict parameters, the same bytes twice, and a clear failure."""

import json
from types import SimpleNamespace

import nbformat
import pytest
from imports import ROOT
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from grade.errors import InputError
from grade.pipeline.notebook import NotebookError, check_parameters, default_parameters, execute, strip_on_save

PARAMETERS = """\
lr = 1.0e-3  # step size
seed = 0
method = "a=b#c"
runs = ["ste", "gumbel"]
use_kl = True
model = None
shapes = {
    "T": [16, 32],
}
"""


def write(path, *sources, parameters=PARAMETERS):
    cells = [new_markdown_cell("# Question"), new_code_cell(parameters, metadata={"tags": ["parameters"]})]
    cells += [new_code_cell(source) for source in sources]
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    path.parent.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
    return path


def test_defaults_are_read_whatever_the_literals_hold(tmp_path):
    assert default_parameters(write(tmp_path / "n.ipynb")) == {
        "lr": 1e-3,
        "seed": 0,
        "method": "a=b#c",
        "runs": ["ste", "gumbel"],
        "use_kl": True,
        "model": None,
        "shapes": {"T": [16, 32]},
    }


@pytest.mark.parametrize("source", ["n = 2 * 3", "import os", "a = b = 1", "n: int = 1", "n = ("])
def test_a_parameters_cell_of_anything_else_than_literals_is_refused(tmp_path, source):
    with pytest.raises(InputError, match="n.ipynb: parameters cell"):
        check_parameters(write(tmp_path / "n.ipynb", parameters=source), {})


def test_good_parameters_are_converted_to_the_type_of_the_default(tmp_path):
    given = {"lr": 1, "seed": 7, "runs": [], "model": "x", "use_kl": False}
    checked = check_parameters(write(tmp_path / "n.ipynb"), given)
    assert checked == given and type(checked["lr"]) is float


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"sed": 1}, "did you mean 'seed'"),
        ({"zzz": 1}, "n.ipynb: zzz: got 'zzz'; allowed: one of lr, method"),
        ({"lr": "1e-5"}, "n.ipynb: lr: got '1e-5'; allowed: a valid number"),
        ({"seed": True}, "a valid integer"),
        ({"runs": ["ste", 1]}, "runs.1: got 1; allowed: a valid string"),
    ],
)
def test_a_wrong_parameter_is_an_error_before_anything_runs(tmp_path, parameters, message):
    with pytest.raises(InputError, match=message):
        execute(write(tmp_path / "n.ipynb"), tmp_path / "out" / "n.ipynb", parameters)
    assert not (tmp_path / "out").exists()


def test_two_runs_give_the_same_bytes_and_see_the_parameters(tmp_path):
    # Prints with pauses between them: where papermill cuts the stream must not matter.
    loop = "import time\nfor i in range(3):\n    print(i, seed, lr, flush=True)\n    time.sleep(0.2)"
    here = "import pathlib, grade\nprint(pathlib.Path.cwd().name, grade.__file__ is not None)"
    source = write(tmp_path / "notebooks" / "n.ipynb", loop, here)
    before = source.read_bytes()
    first, second = tmp_path / "a" / "n.ipynb", tmp_path / "b" / "n.ipynb"
    for output in (first, second):
        execute(source, output, {"seed": 7, "lr": 1})
    assert first.read_bytes() == second.read_bytes()
    assert source.read_bytes() == before
    assert [path.name for path in first.parent.iterdir()] == ["n.ipynb"]
    cells = nbformat.read(first, as_version=4).cells
    assert [output.text for output in cells[3].outputs] == ["0 7 1.0\n1 7 1.0\n2 7 1.0\n"]
    assert cells[4].outputs[0].text == "notebooks True\n"


def test_a_failing_cell_is_one_line_and_the_old_output_stays(tmp_path):
    source = write(tmp_path / "n.ipynb", "print('before')", "raise ValueError('first\\nsecond')", "print('after')")
    output = tmp_path / "out" / "n.ipynb"
    output.parent.mkdir()
    output.write_text("old")
    with pytest.raises(NotebookError) as error:
        execute(source, output, {"seed": 7})
    # Cells 1 and 2 are the defaults and the injected parameters.
    assert "n.ipynb, cell In [4]: ValueError: first second" in str(error.value) and "\n" not in str(error.value)
    assert output.read_text() == "old"
    assert sorted(path.name for path in output.parent.iterdir()) == ["n.failed.ipynb", "n.ipynb"]
    text = (output.parent / "n.failed.ipynb").read_text()
    assert "before" in text and "Traceback" in text


# --- saving in JupyterLab ---


def lab_content(notebook):
    """What JupyterLab sends after Run All."""
    content = nbformat.read(notebook, as_version=4)
    content.metadata["language_info"] = {"name": "python", "version": "3.11.7"}
    for number, cell in enumerate(content.cells):
        cell.id = f"random-{number}"
        if cell.cell_type == "code":
            cell.execution_count, cell.metadata["execution"] = number, {"iopub.status.busy": "2026-01-01"}
            cell.metadata["editable"] = True
            cell.outputs = [nbformat.v4.new_output("stream", text="0.8\n")]
    return content


def saved(path, content, root):
    model = {"type": "notebook", "content": json.loads(nbformat.writes(content))}
    strip_on_save(model, path, contents_manager=SimpleNamespace(root_dir=str(root)))
    return nbformat.writes(nbformat.from_dict(model["content"])).rstrip("\n") + "\n"


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/*.ipynb")), ids=lambda path: path.stem)
def test_run_all_and_save_leaves_the_source_as_it_was_and_keeps_a_copy_with_outputs(path, tmp_path):
    content = lab_content(path)
    assert saved(f"notebooks/{path.name}", content, tmp_path) == path.read_text()
    assert nbformat.read(tmp_path / "outputs/scratch/lab" / path.name, as_version=4) == content
