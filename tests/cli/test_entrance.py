"""The entrance: what is installed, and options that reach the config."""

import os
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import save_toy_base
from fresh_process import script
from imports import ROOT

from grade.cli.main import parse


def unpack_built(kind, source, installed):
    build = f"from setuptools.build_meta import build_{kind}; build_{kind}('..')"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
    (wheel,) = source.parent.glob("*.whl")
    shutil.unpack_archive(wheel, installed, "zip")


def test_the_wheel_is_the_library_and_runs_the_readme_without_a_checkout(tmp_path):
    source, installed, empty = tmp_path / "source", tmp_path / "installed", tmp_path / "empty"
    shutil.copytree(ROOT / "grade", source / "grade", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    unpack_built("wheel", source, installed)
    held = {path.relative_to(installed / "grade").parts[0] for path in installed.glob("grade/*")}
    assert "gradients" in held and not held & {"experiments", "pipeline", "tests"}
    # Without the site module: it would find an editable installation.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), *site.getsitepackages()])}
    save_toy_base(empty / "models/backbone")  # in place of SmolLM2
    (snippet,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    commands = "assert not main(['show', 'runs/short']) and not main(['merge', 'runs/short', 'runs/short-merged'])"
    script = f"{snippet}\nfrom grade.cli.main import main\n{commands}\nimport grade\nprint(grade.__file__)"
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", script], env=environment, cwd=empty, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.endswith(f"{installed}/grade/__init__.py\n"), done.stderr


def test_an_editable_installation_is_found_beside_a_checkout_called_grade(tmp_path):
    checkout, installed = tmp_path / "grade", tmp_path / "installed"
    (checkout / "grade").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "grade/__init__.py", "grade/errors.py"):
        shutil.copy(ROOT / name, checkout / name)
    unpack_built("editable", checkout, installed)
    script = f"import site; site.addsitedir({str(installed)!r}); import grade.errors; print(grade.__file__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", script]  # without the site module, as above
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == f"{checkout}/grade/__init__.py\n", done.stderr


@pytest.mark.parametrize(
    "words, values",
    [("--learning_rate 1e-3", ["learning_rate=1e-3"]), ("--learning-rate=1e-3", ["learning_rate=1e-3"]),
     ("--lora.r 3 --set beta=1 --use_cpu --beta -0.5", ["beta=1", "lora.r=3", "use_cpu=true", "beta=-0.5"])],
)  # fmt: skip
def test_a_key_may_be_written_as_an_option(words, values):
    args = parse(f"train --output_dir out {words}".split())
    assert args.set == values and args.output_dir == "out"


@pytest.mark.parametrize(
    "words, said",
    [("--help", "num_generations [rloo, grpo, tilt] (8)"), ("--no-such 1", "got 'no_such'"),
     ("--method grpo --hops 1", "only gumbel, ste, gumbel_rao, reinmax, st have hops")],
)  # fmt: skip
def test_what_is_said_of_settings_waits_for_no_large_package(words, said, tmp_path):
    done, _ = script(Path(__file__).with_name("imported.py"), tmp_path, "train", "--output-dir", "x", *words.split())
    assert said in done.stdout + done.stderr and done.stdout.endswith("[]\n")
