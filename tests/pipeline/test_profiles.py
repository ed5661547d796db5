"""A profile runs in a workspace that leaves the project alone; publishing is a command."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grade.cli.main import main
from grade.config_files import read_yaml
from grade.errors import InputError
from grade.pipeline.profiles import prepare_workspace, profile_values, profiles, publish, repro
from grade.training.config import TrainConfig

ROOT = Path(__file__).parents[2]


# --- running it ---

# In a folder of its own, so that `import grade` finds what PYTHONPATH says and not what lies beside the script.
STEP = """\
import pathlib, sys, grade
name, profile, output = sys.argv[1:]
if pathlib.Path("fail").exists() and name == "second":
    sys.exit(3)
print("using", grade.WHO, flush=True)
output = pathlib.Path(output)
output.mkdir(parents=True, exist_ok=True)
(output / "metrics.json").write_text('{"profile": "%s"}' % profile)
(output / "big").write_text(name * 100)
"""
DVC_YAML = """\
vars:
  - params/cpu/suite.yaml
stages:
  first:
    cmd: python steps/step.py first ${profile} ${outputs}/first
    deps: [steps/step.py, grade/__init__.py]
    outs:
      - ${outputs}/first/big
    metrics:
      - ${outputs}/first/metrics.json:
          cache: false
  second:
    cmd: python steps/step.py second ${profile} ${outputs}/second
    deps: ["${outputs}/first/metrics.json", fail_switch]
    outs:
      - ${outputs}/second/big
    metrics:
      - ${outputs}/second/metrics.json:
          cache: false
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A small project with two stages in a git checkout, profiles cpu and full; the working folder."""
    files = {
        "grade/__init__.py": "WHO = 'the first version'",
        "steps/step.py": STEP,
        "dvc.yaml": DVC_YAML,
        "fail_switch": "",
        ".dvc/config": "[core]\n    analytics = false\n    check_update = false\n",
        ".dvc/.gitignore": "/config.local\n/tmp\n/cache\n",
        ".dvcignore": "/.workspaces\n__pycache__\n",
        ".gitignore": "/.workspaces/\nbig\n__pycache__/\n",
        "params/cpu/suite.yaml": "profile: cpu\noutputs: outputs\n",
        "params/full/suite.yaml": "profile: full\noutputs: outputs/full\n",
    }
    root = tmp_path / "a project"
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.chdir(root)
    commit(root)
    return root


def commit(root):
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=root, check=True)


def changed(root):
    """What git says has changed."""
    return subprocess.run(["git", "status", "--short"], cwd=root, capture_output=True, text=True).stdout.splitlines()


def test_a_run_stays_in_its_workspace_until_it_is_published(project, capfd):
    (project / "outputs").mkdir()
    (project / "outputs/mine").write_text("kept")
    commit(project)
    with pytest.raises(InputError, match="one that has run"):
        publish(project, "cpu")
    assert repro(project, "cpu", ["first"]) == 0
    with pytest.raises(InputError, match="outputs/second/metrics.json is deleted"):
        publish(project, "cpu")
    assert repro(project, "cpu") == 0
    assert capfd.readouterr().out.count("using the first version") == 2  # the first stage ran once
    assert changed(project) == []

    workspace = project / ".workspaces/cpu"
    (workspace / "outputs/README.md").write_text("the page")  # in the folder itself, and no out of a stage
    (workspace / "outputs/first/timings.json").write_text("{}")
    whole = (workspace / "outputs/first/metrics.json").read_text()
    (workspace / "outputs/first/metrics.json").write_text("edited")
    with pytest.raises(InputError, match="outputs/first/metrics.json is modified"):
        publish(project, "cpu")
    (workspace / "outputs/first/metrics.json").write_text(whole)
    assert main(["publish"]) == 0
    small = ["README.md", "first/metrics.json", "first/timings.json", "second/metrics.json"]
    assert {line.split()[1] for line in changed(project)} >= {"dvc.lock", "outputs/README.md", "outputs/first/"}
    assert all((project / "outputs" / name).is_file() for name in small)
    assert (project / "outputs/mine").read_text() == "kept" and not (project / "outputs/first/big").exists()

    # The published lock is true of the project: DVC there takes what is big out of the cache.
    subprocess.run([sys.executable, "-m", "dvc", "checkout", "-q"], check=True)
    assert (project / "outputs/second/big").read_text() == "second" * 100


def test_a_failed_stage_stops_the_pipeline_which_then_goes_on_from_there(project, capfd):
    place = prepare_workspace(project, "full")
    (place / "fail").touch()
    assert repro(project, "full") != 0
    (place / "fail").unlink()
    capfd.readouterr()
    assert repro(project, "full") == 0
    assert capfd.readouterr().out.count("using the first version") == 1
    assert (place / "outputs/full/first/metrics.json").read_text() == '{"profile": "full"}' and not changed(project)
    publish(project, "full")
    assert changed(project) == ["?? outputs/"] and not (project / "dvc.lock").exists()

    # An edit in the project arrives in the workspace, and the stage uses the workspace's copy of the package.
    (project / "grade" / "__init__.py").write_text("WHO = 'the second version'")
    assert repro(project, "full", ["first"]) == 0
    assert "using the second version" in capfd.readouterr().out


def test_dvcs_own_command_runs_the_default_profile_in_place(project):
    subprocess.run([sys.executable, "-m", "dvc", "repro", "-q"], env=os.environ | {"PYTHONPATH": "."}, check=True)
    assert (project / "outputs/second/metrics.json").read_text() == '{"profile": "cpu"}'


def test_a_workspace_follows_the_project_and_keeps_what_it_made(project):
    (project / "new.txt").touch()
    place = prepare_workspace(project, "cpu")
    (place / "made").touch()
    assert (place / "new.txt").exists() and not (place / "outputs").exists()
    (project / "new.txt").unlink()
    prepare_workspace(project, "cpu")
    assert not (place / "new.txt").exists() and (place / "made").exists() and (place / "steps/step.py").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        ("outputs: outputs\nprofile: mine", "params/mine/suite.yaml: outputs: got 'outputs'; allowed: 'outputs/mine'"),
        ("outputs: outputs/mine\nprofile: cpu", "params/mine/suite.yaml: profile: got 'cpu'; allowed: 'mine'"),
        ("outputs: outputs/mine\nprofile: mine\nseed: [4]", "params/mine/suite.yaml: got 'seed'; .*mean 'seeds'"),
    ],
)
def test_a_profile_that_would_replace_anothers_results_or_is_misspelt_is_refused(project, change, message, capsys):
    (project / "params/mine").mkdir()
    (project / "params/mine/suite.yaml").write_text(change)
    assert main(["repro", "mine"]) == 2
    err = capsys.readouterr().err
    assert re.search(message, err) and err.count("\n") == 1
    assert not (project / ".workspaces").exists()


# --- parameters ---


def test_a_profile_lies_over_another_and_its_workspace_has_the_whole(project):
    (project / "params/cpu/train.yaml").write_text("steps: 8\nlora: {r: 4, alpha: 8}\n")
    (project / "params/cpu/data.yaml").write_text("seed: 0\n")
    (project / "params/full/train.yaml").write_text("over: ../cpu/train.yaml\nlora: {r: 16}\n")
    (project / "params/full/suite.yaml").write_text("over: ../cpu/suite.yaml\nprofile: full\noutputs: outputs/full\n")
    assert profile_values(project, "full", "train") == {"steps": 8, "lora": {"r": 16, "alpha": 8}}
    assert profile_values(project, "full", "data") == {"seed": 0}
    workspace = prepare_workspace(project, "full")
    train = read_yaml(workspace / "params/full/train.yaml")
    assert train == profile_values(project, "full", "train")
    assert read_yaml(workspace / "params/full/data.yaml") == {"seed": 0}
    (project / "params/full/trian.yaml").write_text("steps: 9\n")  # which no stage would read
    with pytest.raises(InputError, match="params/full: got 'trian.yaml'; allowed: .*train"):
        prepare_workspace(project, "full")
    (project / "params/full/trian.yaml").unlink()
    # A profile that lies over none has the code's own defaults where it has no file.
    (project / "params/full/suite.yaml").write_text("profile: full\noutputs: outputs/full\n")
    assert profile_values(project, "full", "data") == {}


@pytest.mark.parametrize("profile", profiles(ROOT))
def test_every_profiles_training_runs_are_valid_settings(profile):
    shared = profile_values(ROOT, profile, "train")
    for name in profile_values(ROOT, profile, "suite")["runs"]:
        values = shared | profile_values(ROOT, profile, f"train_{name}")
        config = TrainConfig.parse(values, f"{profile}/train_{name}.yaml")
        # What a default would change without notice, or make depend on where the project lies.
        assert {"method", "seed", "beta", "learning_rate", "lr_scheduler_type", "eval_strategy"} <= set(values)
        assert config.base_name == config.model and (config.use_cpu or profile == "h100")
