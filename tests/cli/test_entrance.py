"""The entrance: public names import, a closed pipe ends quietly, and an error names where its value comes from."""

import os
import re
import shutil
import site
import subprocess
import sys
import tomllib

import pytest
from conftest import save_texts, save_toy_base
from imports import ROOT

import grade
from grade.cli.main import entry, main, parse


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        grade.nothing  # noqa: B018


def test_the_console_script_is_the_module():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"grade": f"{entry.__module__}:{entry.__name__}"}


def test_the_wheel_is_the_library_and_runs_the_readme_without_a_checkout(tmp_path):
    source, installed, empty = tmp_path / "source", tmp_path / "installed", tmp_path / "empty"
    shutil.copytree(ROOT / "grade", source / "grade", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", "..", "."], cwd=source, check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(installed), str(wheel)], check=True)
    held = {path.relative_to(installed / "grade").parts[0] for path in installed.glob("grade/*")}
    assert "gradients" in held and not held & {"experiments", "pipeline", "tests"}
    # Without the site module: it would find an editable installation.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), *site.getsitepackages()])}

    def run(*words):
        command = [sys.executable, "-S", "-P", *words]
        return subprocess.run(command, env=environment, cwd=empty, capture_output=True, text=True)

    save_toy_base(empty / "models/backbone")  # in place of SmolLM2
    save_texts(empty / "data/reviews/policy.jsonl")
    (snippet,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    trained = run("-c", snippet + "\nimport grade\nprint(grade.__file__)")
    assert trained.returncode == 0 and trained.stdout.endswith(f"{installed}/grade/__init__.py\n"), trained.stderr
    for words in ("show runs/short --html run.html", "merge runs/short runs/short-merged"):
        done = run("-m", "grade", *words.split())
        assert done.returncode == 0 and done.stdout and not done.stderr, (words, done.stderr)
    checkout = run("-m", "grade", "measure", "exp4")
    assert checkout.returncode == 2 and checkout.stderr.startswith("grade measure: needs a checkout")


def test_a_reader_that_leaves_ends_the_command_quietly():
    command = [sys.executable, "-m", "grade", "env"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()  # before anything is written
        assert process.stderr.read() == b""
        assert process.wait() == 141


def test_output_to_a_full_disk_is_one_line():
    command, buffered = f"{sys.executable} -m grade env > /dev/full", {**os.environ, "PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, shell=True, env=buffered, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr == "grade: stdout: No space left on device\n"


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", ""])
def test_a_closed_stream_and_one_that_is_not_utf8_are_no_error(closed, tmp_path):
    (tmp_path / "run.json").write_text('{"settings": {"reward": "\\u00fc"}}')
    command = f"{sys.executable} -m grade show {tmp_path} {closed}"
    plain = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    done = subprocess.run(command, shell=True, env=plain, capture_output=True)
    assert done.returncode == 0 and not done.stderr and (closed or rb"\xfc" in done.stdout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "repetitions=x"], "grade measure: repetitions: got 'x'"),
        (["--set", "etas=[x]"], "grade measure: etas.0: got 'x'"),
        (["--config", "FILE"], "grade measure: bad.yaml: repetitions: got 'y'"),
        (["--config", "FILE", "--set", "repetitions=x"], "grade measure: repetitions: got 'x'"),
    ],
)
def test_an_error_names_where_the_value_comes_from(options, message, tmp_path, capsys):
    (tmp_path / "bad.yaml").write_text("repetitions: y\n")
    options = [str(tmp_path / "bad.yaml") if word == "FILE" else word for word in options]
    assert main(["measure", "validation", "--output-dir", str(tmp_path / "x"), *options]) == 2
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("command", ["train", "memory"])
def test_a_config_may_come_from_a_pipe(command, tmp_path, capsys):
    reader, writer = os.pipe()
    os.write(writer, b"max_grad_norm: -1\n" if command == "train" else b"batch_size: 0\n")
    os.close(writer)
    out = ["--output-dir", str(tmp_path / "x")] if command == "train" else ["--model", "tiny"]
    assert main([command, *out, "--config", f"/dev/fd/{reader}"]) == 2
    os.close(reader)
    name = "max_grad_norm: got -1" if command == "train" else "batch_size: got 0"
    assert capsys.readouterr().err.startswith(f"grade {command}: {reader}: {name}")


def test_the_last_option_counts(capsys):
    assert main(["memory", "--model", "tiny", "--set", "batch_size=1", "--batch-size", "0"]) == 2
    assert capsys.readouterr().err.startswith("grade memory: batch_size: got 0")


@pytest.mark.parametrize(
    "words, values",
    [("--learning_rate 1e-3", ["learning_rate=1e-3"]), ("--learning-rate=1e-3", ["learning_rate=1e-3"]),
     ("--set beta=1 --lora.r 3 --use_cpu --beta -0.5", ["beta=1", "lora.r=3", "use_cpu=true", "beta=-0.5"])],
)  # fmt: skip
def test_a_key_may_be_written_as_an_option(words, values):
    args = parse(f"train --output_dir out {words}".split())
    assert args.set == values and args.output_dir == "out"


def test_an_output_folder_may_have_any_name(tmp_path, capsys):
    assert main(["train", "--output-dir", str(tmp_path / "out😀"), "--set", "model=nowhere"]) == 2
    assert "backbone: got 'nowhere'" in capsys.readouterr().err
