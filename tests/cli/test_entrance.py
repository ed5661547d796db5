"""The entrance: public names import, a closed pipe ends quietly, and an error names where its value comes from."""

import atexit
import gc
import importlib
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import grade
from grade.cli.main import entry, import_command, main


@pytest.mark.parametrize("name", grade.__all__)
def test_a_public_name_imports_and_is_listed(name):
    assert getattr(grade, name) is not None and name in dir(grade)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        grade.nothing  # noqa: B018


def test_the_console_script_is_the_module():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"grade": f"{entry.__module__}:{entry.__name__}"}


def test_a_process_of_its_own_does_not_search_for_garbage_at_its_end(monkeypatch, capsys):
    registered = []
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(sys, "argv", ["grade", "show", "no/such/folder"])
    assert entry() == 2 and "no/such/folder" in capsys.readouterr().err
    assert registered == [gc.freeze]


@pytest.mark.parametrize("collecting", [True, False])
def test_nothing_is_searched_for_garbage_while_a_command_is_imported(monkeypatch, collecting):
    def imported(name):
        assert not gc.isenabled()
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", imported)
    try:
        (gc.enable if collecting else gc.disable)()
        with pytest.raises(ImportError, match="grade.cli.runs"):
            import_command("show")
        assert gc.isenabled() == collecting
    finally:
        gc.enable()


def test_a_reader_that_leaves_ends_the_command_quietly():
    command = [sys.executable, "-m", "grade", "memory", "--model", "tiny"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()  # before anything is written
        assert process.stderr.read() == b""
        assert process.wait() == 141


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "repetitions=x"], "grade measure: --set repetitions: got 'x'"),
        (["--set", "etas=[x]"], "grade measure: --set etas.0: got 'x'"),
        (["--config", "FILE"], "grade measure: bad.yaml: repetitions: got 'y'"),
        (["--config", "FILE", "--set", "repetitions=x"], "grade measure: --set repetitions: got 'x'"),
    ],
)
def test_an_error_names_where_the_value_comes_from(options, message, tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("repetitions: y\n")
    options = [str(tmp_path / "bad.yaml") if word == "FILE" else word for word in options]
    assert main(["measure", "validation", "--output-dir", str(tmp_path / "x"), *options]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_an_option_of_its_own_goes_over_set_and_is_not_named_set(capsys):
    assert main(["memory", "--model", "tiny", "--batch-size", "0", "--set", "batch_size=1"]) == 2
    assert capsys.readouterr().err.startswith("grade memory: batch_size: got 0")
