"""A profile runs in a workspace that leaves the project alone, stages side by side; publishing is a command."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from psutil import Process

from grade.cli.main import main
from grade.config import read_yaml
from grade.errors import InputError
from grade.pipeline.profiles import prepare_workspace, profile_values, profiles, publish
from grade.pipeline.schedule import run
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
    desc: the first step
    cmd: python steps/step.py first ${profile} ${outputs}/first
    deps: [steps/step.py, grade/__init__.py]
    outs:
      - ${outputs}/first/big
    metrics:
      - ${outputs}/first/metrics.json:
          cache: false
  second:
    desc: the second step
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
    root = tmp_path / "a, 'b' #c %(d)s $e"  # what a shell or DVC's settings could take for something else
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


def lines_of(capfd, start):
    return [line for line in capfd.readouterr().out.splitlines() if line.startswith(start)]


def test_a_run_stays_in_its_workspace_until_it_is_published(project, capfd):
    (project / "outputs/mine").write_text("kept")
    commit(project)
    with pytest.raises(InputError, match="one that has run"):
        publish(project, "cpu")
    assert run(project, "cpu", ["first"]) == 0
    with pytest.raises(InputError, match="outputs/second/metrics.json is deleted"):
        publish(project, "cpu")
    assert run(project, "cpu") == 0
    assert lines_of(capfd, "[") == ["[1/1] first: the first step", "[1/1] second: the second step"]
    assert run(project, "cpu") == 0
    assert lines_of(capfd, "stages to run: 0")
    assert changed(project) == []

    workspace = project / ".workspaces/cpu"
    (workspace / "outputs/README.md").write_text("the page")  # in the folder itself, and no out of a stage
    (workspace / "outputs/first/timings.json").write_text("{}")
    whole = (workspace / "outputs/first/metrics.json").read_text()
    (workspace / "outputs/first/metrics.json").write_text("")  # the disk was full, say
    with pytest.raises(InputError, match="outputs/first/metrics.json is modified"):
        publish(project, "cpu")
    (workspace / "outputs/first/metrics.json").write_text(whole)
    assert main(["publish"]) == 0
    small = ["README.md", "first/metrics.json", "first/timings.json", "second/metrics.json"]
    assert {line.split()[1] for line in changed(project)} >= {"dvc.lock", "outputs/README.md", "outputs/first/"}
    assert all((project / "outputs" / name).is_file() for name in small)
    assert (project / "outputs/mine").read_text() == "kept" and not (project / "outputs/first/big").exists()

    # The published lock is true of the project: `dvc repro` there takes what is big out of the cache, and runs nothing.
    (project / "steps/step.py").rename(project / "moved.py")
    subprocess.run([sys.executable, "-m", "dvc", "checkout", "-q"], check=True)
    assert (project / "outputs/second/big").read_text() == "second" * 100


def test_a_failed_stage_stops_the_pipeline_which_then_goes_on_from_there(project, capfd):
    place = prepare_workspace(project, "full")
    (place / "fail").touch()
    assert run(project, "full") != 0
    out, log = capfd.readouterr().out, ".workspaces/full/.dvc/tmp/logs/second.log"
    assert "second stopped after" in out and "using the first version" in out
    assert out.splitlines()[-1].startswith(f"full: failed: second (log: {log})")
    assert "exited with 3" in (project / log).read_text()
    (place / "fail").unlink()
    assert run(project, "full") == 0
    assert lines_of(capfd, "[") == ["[1/1] second: the second step"]
    assert (place / "outputs/full/first/metrics.json").read_text() == '{"profile": "full"}' and not changed(project)
    publish(project, "full")
    assert changed(project) == ["?? outputs/full/"] and not (project / "dvc.lock").exists()

    # An edit in the project arrives in the workspace, and the stage uses the workspace's copy of the package.
    (project / "grade" / "__init__.py").write_text("WHO = 'the second version'")
    assert run(project, "full", dry=True) == 0
    assert capfd.readouterr().out.split() == ["first", "second"]  # which needs what has changed
    assert run(project, "full", ["first"]) == 0
    assert "using the second version" in capfd.readouterr().out


def test_dvcs_own_command_runs_the_default_profile_in_place(project):
    subprocess.run([sys.executable, "-m", "dvc", "repro", "-q"], env=os.environ | {"PYTHONPATH": "."}, check=True)
    assert (project / "outputs/second/metrics.json").read_text() == '{"profile": "cpu"}'


def test_a_workspace_follows_the_project_and_keeps_what_it_made(project):
    odd = os.fsdecode(b"\xff\n.txt")
    (project / odd).touch()
    place = prepare_workspace(project, "cpu")
    (place / "made").touch()
    assert (place / odd).exists()
    assert not (place / "outputs").exists()
    (project / odd).unlink()
    prepare_workspace(project, "cpu")
    assert not (place / odd).exists() and (place / "made").exists() and (place / "steps/step.py").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        ("outputs: outputs\nprofile: mine", "params/mine/suite.yaml: outputs: got 'outputs'; allowed: 'outputs/mine'"),
        ("outputs: outputs/mine\nprofile: cpu", "params/mine/suite.yaml: profile: got 'cpu'; allowed: 'mine'"),
        ("outputs: outputs/mine\nprofile: mine\nruns:", "params/mine/suite.yaml: runs: got None; allowed: a value"),
        ("outputs: outputs/mine\nprofile: mine\nseeds: 0", "params/mine/suite.yaml: seeds: got 0; allowed: a value"),
        ("outputs: outputs/mine\nprofile: mine\njob: 4", "params/mine/suite.yaml: got 'job'; allowed: .*mean 'jobs'"),
    ],
)
def test_a_profile_that_would_replace_anothers_results_or_is_misspelt_is_refused(project, change, message, capsys):
    (project / "params/mine").mkdir()
    (project / "params/mine/suite.yaml").write_text(change)
    for command in (["repro", "mine"], ["publish", "mine"], ["results", "--profile", "mine"]):
        assert main(command) == 2
        err = capsys.readouterr().err
        assert re.search(message, err) and err.count("\n") == 1
    assert not (project / ".workspaces").exists()


def test_a_profile_cannot_have_the_name_of_a_result(project):
    (project / "params/first").mkdir()
    (project / "params/first/suite.yaml").write_text("profile: first\noutputs: outputs/first\n")
    (project / "outputs/first").mkdir(parents=True)
    assert run(project, "first") == 0
    with pytest.raises(InputError, match="outputs/first holds something else"):
        publish(project, "first")


def test_a_wrong_place_profile_stage_or_number_is_one_line(project, tmp_path, monkeypatch, capsys):
    for words in (["nowhere"], ["cpu", "--jobs", "0"], ["cpu", "third"]):
        assert not (project / ".workspaces").exists()
        assert main(["repro", *words]) == 2
        assert ": got" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(["repro"]) == 2
    project.rename(tmp_path / "a:b")  # PYTHONPATH cannot quote it
    monkeypatch.chdir(tmp_path / "a:b")
    assert main(["repro"]) == 2


MEETING = """\
import pathlib, sys, time
mine, other = sys.argv[1:]
pathlib.Path(mine).write_text(mine)
end = time.monotonic() + 60
while not pathlib.Path(other).exists():
    assert time.monotonic() < end, "alone"
    time.sleep(0.05)
"""
MEETING_YAML = """\
vars:
  - params/cpu/suite.yaml
stages:
  one:
    desc: wait for the other
    cmd: python meet.py one two
    deps: [meet.py]
    outs: [one]
  two:
    desc: wait for the other
    cmd: python meet.py two one
    deps: [meet.py]
    outs: [two]
  last:
    cmd: echo the end
    deps: [one, two]
  alone:
    desc: needs nobody
    cmd: echo alone > three
    outs: [three]
"""


@pytest.fixture
def meeting(project):
    """Two stages of which neither ends before the other has begun, one that needs both, and one that needs none."""
    (project / "meet.py").write_text(MEETING)
    (project / "dvc.yaml").write_text(MEETING_YAML)
    return project


def test_stages_that_do_not_need_each_other_run_side_by_side(meeting, capfd):
    assert run(meeting, "cpu", jobs=2) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "last | the end" in lines and lines[0] == "stages to run: 4"
    assert not any("Updating lock" in line for line in lines)


def test_the_longest_chain_of_stages_goes_first(meeting, capfd):
    place = prepare_workspace(meeting, "cpu")
    (place / "outputs").mkdir(exist_ok=True)
    (place / "outputs/timings.json").write_text('{"alone": {"seconds": 100}, "one": {"seconds": 20}}')
    assert main(["repro", "cpu", "--jobs", "2", "--dry"]) == 0
    assert set(capfd.readouterr().out.split()) == {"one", "two", "last", "alone"}
    assert run(meeting, "cpu", jobs=2) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "stages to run: 4"
    assert [line for line in lines if line.startswith("[")][0] == "[1/4] alone: needs nobody"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_pipeline_with_all_that_it_started(meeting, number, tmp_path):
    (meeting / "meet.py").write_text("import time; print('begun', flush=True); time.sleep(600)")
    words = [sys.executable, "-P", "-m", "grade", "repro", "--jobs", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    # As a script's background job, which ignores SIGINT.
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) as process:  # fmt: skip
        seen = []
        while sum(line.endswith("| begun\n") for line in seen) < 2:
            line = process.stdout.readline()
            assert line, seen
            seen.append(line)
        children = Process(process.pid).children(recursive=True)
        assert len(children) >= 4
        with pytest.raises(InputError, match="whose pipeline is not running"):
            run(meeting, "cpu")
        process.send_signal(number)
        rest = process.stdout.read()
    assert process.returncode == 130 and rest.endswith("grade repro: interrupted\n"), rest
    deadline = time.monotonic() + 10
    while any(child.is_running() and child.status() != "zombie" for child in children):
        assert time.monotonic() < deadline
        time.sleep(0.1)


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
