"""Run a notebook with parameters, strictly: papermill, without its silences.

Papermill only warns about a parameter that the notebook does not have, and takes any type; here both are errors, raised
before anything runs. Its output differs on every run (timings, random cell ids); here two runs of a deterministic
notebook give the same bytes, so that DVC sees no change where there is none.

Left out: any other kernel than ``python3``, which is the environment of the calling process, and progress bars, which
would leave timings in the output.
"""

from __future__ import annotations

import ast
import os
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Union
from unittest.mock import patch

import nbformat
from nbstripout import strip_output
from pydantic import create_model

import grade
from grade.config import Config
from grade.errors import InputError
from grade.files import write_text

# What differs between two runs, or says when they were, and nothing about the result.
VOLATILE_KEYS = ("metadata.papermill", "cell.metadata.papermill", "cell.metadata.execution")


# What JupyterLab adds when it saves.
FRONT_END_KEYS = ("metadata.language_info", *(f"cell.metadata.{key}" for key in ("execution", "editable", "slideshow")))

SOURCES = "notebooks"
"""Folder of the source notebooks, which are kept without outputs."""
KEPT = "outputs/scratch/lab"
"""Where JupyterLab's save leaves a source notebook with its outputs."""


class NotebookError(RuntimeError):
    """A cell of a notebook raised: one line that names the cell, the exception and the partially executed copy."""


def default_parameters(notebook: str | Path) -> dict[str, Any]:
    """Read the parameters of a notebook and their defaults.

    The cell is parsed, not matched: papermill's own inspection misses a value that holds "=" or "#".
    """
    content = _read(notebook)
    cells = [cell for cell in content.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1 or cells[0].cell_type != "code":
        raise InputError(f"{Path(notebook).name}: cells tagged 'parameters'", len(cells), "exactly one code cell")
    defaults: dict[str, Any] = {}
    try:
        for statement in ast.parse(cells[0].source).body:
            match statement:
                case ast.Assign([ast.Name(name)], value):
                    defaults[name] = ast.literal_eval(value)
                case _:
                    raise ValueError(f"line {statement.lineno} is something else")
    except (SyntaxError, ValueError) as error:
        allowed = f"only lines like 'name = literal' ({error})"
        raise InputError(f"{Path(notebook).name}: parameters cell", cells[0].source, allowed) from None
    return defaults


def check_parameters(notebook: str | Path, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Check parameters against the notebook's own, by name and by the type of the default, and return them converted.

    An int is a float where the default is one; anything goes where the default is None; items of a list must have a
    type that the default's items have, if it has any.
    """
    fields = {name: (_type_of(default), default) for name, default in default_parameters(notebook).items()}
    checked = create_model("Parameters", __base__=Config, **fields).parse(parameters, Path(notebook).name)
    return {name: getattr(checked, name) for name in parameters}


def execute(notebook: str | Path, output: str | Path, parameters: Mapping[str, Any]) -> None:
    """Execute a notebook in its own folder and write the executed copy, the same bytes for the same results.

    The copy is replaced only when every cell has run. Where one raises, `NotebookError` names it, and the partially
    executed copy is ``<stem of output>.failed.ipynb`` beside it.
    """
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    notebook, output = Path(notebook), Path(output)
    parameters = check_parameters(notebook, parameters)
    output.parent.mkdir(parents=True, exist_ok=True)
    failed = output.with_name(f"{output.stem}.failed.ipynb")
    temporary = output.with_name(f".{output.stem}.{os.getpid()}.ipynb")  # not `atomic`: it is kept after a failure
    try:
        with _kernel_environment():
            papermill.execute_notebook(
                str(notebook),
                str(temporary),
                parameters,
                kernel_name="python3",
                cwd=str(notebook.parent),
                progress_bar=False,
                coalesce_streams=True,  # else where a stream is cut depends on timing
                extra_arguments=["--log-level=CRITICAL"],  # a kernel warns of its transport, and of being stopped
            )
        content = nbformat.read(temporary, as_version=4)
        # Also replaces the cell ids, of which papermill draws one at random, by the cells' positions.
        strip_output(content, keep_output=True, keep_count=True, keep_id=False, extra_keys=list(VOLATILE_KEYS))
        nbformat.write(content, temporary)
        os.replace(temporary, output)
        failed.unlink(missing_ok=True)
    except PapermillExecutionError as error:
        os.replace(temporary, failed)
        reason = f"{error.ename}: {error.evalue[:500]}"
        message = f"{notebook.name}, cell In [{error.exec_count}]: {reason} (see {failed})"
        raise NotebookError(" ".join(message.split())) from None
    except DeadKernelError as error:
        raise NotebookError(f"{notebook.name}: a cell ended its kernel ({error})") from None
    finally:
        temporary.unlink(missing_ok=True)


def strip_on_save(model: dict[str, Any], path: str, contents_manager: Any, **_: Any) -> None:
    """Jupyter's hook before saving: source notebooks are written as they are in git, whatever was run in them.

    So Run All and save leaves git and DVC without a change. What was run is kept as a copy in `KEPT`. Notebooks
    elsewhere are saved as they are.
    """
    if model.get("type") == "notebook" and Path(path).parts[:1] == (SOURCES,):
        content = nbformat.from_dict(model["content"])
        if any(cell.get("outputs") for cell in content.cells):
            write_text(Path(contents_manager.root_dir, KEPT, Path(path).name), nbformat.writes(content) + "\n")
        strip_output(content, keep_output=False, keep_count=False, keep_id=False, extra_keys=list(FRONT_END_KEYS))
        model["content"] = content


def _read(notebook: str | Path) -> nbformat.NotebookNode:
    # What nbformat warns of, it mends: cells with the same id.
    with warnings.catch_warnings(action="ignore"):
        return nbformat.read(notebook, as_version=4)


def _type_of(default: Any) -> Any:
    if isinstance(default, list) and default:
        return list[Union[tuple(map(_type_of, default))]]  # noqa: UP007 - of types known at run time
    return Any if default is None else type(default)


def _kernel_environment() -> AbstractContextManager[Any]:
    # The kernel starts in the notebook's folder, where `import grade` would find an installed copy. It has to use the
    # same one as this process: a pipeline workspace runs its own.
    root = str(Path(grade.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    # What the copy shows must not depend on time.
    return patch.dict(os.environ, PYTHONPATH=path, GRADE_PROGRESS="0")
