"""Profiles run in workspaces that leave the project alone, stages side by side."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from grade.cli.main import main
from grade.errors import InputError
from grade.experiments.compare.measure.peers import PeersConfig
from grade.pipeline.params import profile_values, profiles
from grade.pipeline.profiles import prepare_workspace, run
from grade.pipeline.schedule import Timings
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
def project(tmp_path):
    """A small project with two stages in a git checkout, profiles cpu and full."""
    files = {
        "grade/__init__.py": "WHO = 'the first version'",
        "steps/step.py": STEP,
        "dvc.yaml": DVC_YAML,
        "fail_switch": "",
        "old.txt": "",
        ".dvc/config": "[core]\n    analytics = false\n    check_update = false\n",
        ".dvc/.gitignore": "/config.local\n/tmp\n/cache\n",
        ".dvcignore": "/.workspaces\n__pycache__\n",
        ".gitignore": "/.workspaces/\nbig\nfail\n__pycache__/\n",
        "params/cpu/suite.yaml": "profile: cpu\noutputs: outputs\n",
        "params/full/suite.yaml": "profile: full\noutputs: outputs/full\n",
    }
    root = tmp_path / "project"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "-A"], cwd=root, check=True)
    return root


def stage_lines(capfd):
    lines = capfd.readouterr().out.splitlines()
    return [line for line in lines if line.startswith("[") and "took" not in line]


def test_the_default_profile_runs_in_place_and_then_has_nothing_to_do(project, capfd):
    assert run(project) == 0
    assert stage_lines(capfd) == ["[1/2] first: the first step", "[2/2] second: the second step"]
    assert (project / "outputs/second/metrics.json").read_text() == '{"profile": "cpu"}'
    assert not (project / ".workspaces").exists()
    assert run(project) == 0
    assert "0 of 2 stages to run" in capfd.readouterr().out


def test_another_profile_runs_in_a_workspace_is_resumed_and_brings_its_results_back(project, capfd):
    (project / "dvc.lock").write_text("schema: '2.0'\nstages: {}\n")
    before = {name: (project / name).read_bytes() for name in ("dvc.lock", "dvc.yaml")}
    workspace = prepare_workspace(project, "full")
    (workspace / "fail").touch()
    assert run(project, "full") != 0
    out = capfd.readouterr().out
    assert "second stopped after" in out and "using the first version" in out
    log = ".workspaces/full/.dvc/tmp/logs/second.log"
    assert out.splitlines()[-1].startswith("full: failed after") and out.splitlines()[-1].endswith(
        f": second (log: {log})"
    )
    assert "exited with 3" in (project / log).read_text()
    assert not (project / "outputs").exists()

    (workspace / "fail").unlink()
    (project / "outputs" / "full").mkdir(parents=True)
    (project / "outputs" / "full" / "stale").touch()
    (workspace / "outputs/full/README.md").write_text("the page")  # in the folder itself, and no out of a stage
    (workspace / "outputs/full/first/timings.json").write_text("{}")
    assert run(project, "full") == 0
    assert stage_lines(capfd) == ["[2/2] second: the second step"]
    found = sorted(p.relative_to(project).as_posix() for p in project.glob("outputs/**/*") if p.is_file())
    assert [name for name in found if not name.endswith("full/timings.json")] == [
        "outputs/full/README.md", "outputs/full/first/metrics.json", "outputs/full/first/timings.json",
        "outputs/full/second/metrics.json",
    ]  # fmt: skip
    assert (project / "outputs/full/first/metrics.json").read_text() == '{"profile": "full"}'
    assert {name: (project / name).read_bytes() for name in before} == before

    # An edit in the project arrives in the workspace, and the stage uses the workspace's copy of the package.
    (project / "grade" / "__init__.py").write_text("WHO = 'the second version'")
    assert run(project, "full", ["first"]) == 0
    assert "using the second version" in capfd.readouterr().out


def test_a_stage_that_does_not_make_its_output_says_so_in_its_log(project, capfd):
    (project / "steps/step.py").write_text("")
    assert run(project, dvc_arguments=["first"]) != 0
    assert "output 'outputs/first/big' does not exist" in (project / ".dvc/tmp/logs/first.log").read_text()
    assert capfd.readouterr().out.splitlines()[-1].endswith("first (log: .dvc/tmp/logs/first.log)")


def kept(project):
    (project / "outputs/first").mkdir(parents=True)
    (project / "outputs/first/metrics.json").write_text("of cpu")
    return project / "outputs/first/metrics.json"


@pytest.mark.parametrize(
    "change, message",
    [
        ({}, "params/mine/suite.yaml: outputs: got 'outputs'; allowed: 'outputs/mine', the profile's own"),
        ({"outputs": "outputs/full"}, "outputs: got 'outputs/full'; allowed: 'outputs/mine'"),
        ({"outputs": "outputs/mine/../full"}, "allowed: 'outputs/mine'"),
        ({"outputs": "."}, "allowed: 'outputs/mine'"),
        ({"outputs": None}, "allowed: 'outputs/mine'"),
        ({"outputs": "outputs/mine"}, "params/mine/suite.yaml: profile: got 'cpu'; allowed: 'mine'"),
        ({"outputs": "outputs/mine", "profile": "mine", "jobs": 0}, "jobs: got 0; allowed: a number of at least 1"),
        ({"outputs": "outputs/mine", "profile": "mine", "jobs": "two"}, "jobs: got 'two'"),
    ],
)
def test_a_copied_profile_cannot_replace_the_results_of_another(project, change, message, monkeypatch, capsys):
    before, values = kept(project), yaml.safe_load((project / "params/cpu/suite.yaml").read_text())
    shutil.copytree(project / "params/cpu", project / "params/mine")
    (project / "params/mine/suite.yaml").write_text(yaml.safe_dump(values | change))
    monkeypatch.chdir(project)
    for command in (["repro", "mine"], ["results", "--profile", "mine"], ["check", "--profile", "mine"]):
        assert main(command) == 2
        err = capsys.readouterr().err
        assert message in err and err.count("\n") == 1
    assert before.read_text() == "of cpu" and not (project / ".workspaces").exists()


def test_a_profile_cannot_have_the_name_of_a_result(project):
    (project / "params/first").mkdir()
    (project / "params/first/suite.yaml").write_text("profile: first\noutputs: outputs/first\n")
    before = kept(project)
    with pytest.raises(InputError, match="outputs/first/big is a result of profile cpu"):
        run(project, "first")
    assert before.read_text() == "of cpu"


def test_results_that_could_not_come_back_are_refused_before_anything_runs(project):
    (project / "outputs").mkdir()
    (project / "outputs/full").touch()
    with pytest.raises(InputError, match="outputs: got .*not a file"):
        run(project, "full")
    assert not (project / ".workspaces/full/outputs").exists()


def test_a_workspace_shares_the_projects_cache_wherever_the_project_lies(project, tmp_path):
    # What DVC's settings or a shell would take for a comment, a list, a variable or a placeholder, and a file's name
    # that is not UTF-8.
    project = project.rename(tmp_path / "a, 'b' #c %(d)s $e %")
    (project / os.fsdecode(b"\xff\n.txt")).touch()
    cached = project / ".dvc/cache/files/md5"
    # Two big files, which are the same for both profiles, and one small one, which is not.
    for profile, objects in (("cpu", 3), ("full", 4)):
        assert run(project, profile) == 0
        assert len([path for path in cached.glob("**/*") if path.is_file()]) == objects
    workspace = project / ".workspaces/full"
    assert not (workspace / ".dvc/cache").exists()
    assert (project / "outputs/full/first/metrics.json").read_text() == '{"profile": "full"}'

    # Lost, an output comes back out of the cache, without its stage: the other profile's objects are the same ones.
    (workspace / "outputs/full/second/big").unlink()
    (workspace / "steps/step.py").unlink()
    subprocess.run([sys.executable, "-m", "dvc", "checkout", "-q"], cwd=workspace, check=True)
    assert (workspace / "outputs/full/second/big").read_text() == "second" * 100

    (project / os.fsdecode(b"\xff\n.txt")).unlink()
    prepare_workspace(project, "full")
    assert not (workspace / os.fsdecode(b"\xff\n.txt")).exists() and (workspace / "steps/step.py").exists()


@pytest.mark.parametrize("name, allowed", [(b"a\xff", "UTF-8"), (b"a:b", "':'"), (b"a{b}", "'{'"), (b"a\nb", "n'")])
def test_a_path_that_dvc_or_python_cannot_use_is_one_line(project, tmp_path, name, allowed):
    project = project.rename(tmp_path / os.fsdecode(name))
    for profile in ("cpu", "full"):
        with pytest.raises(InputError, match=f"a path .*{allowed}") as error:
            run(project, profile)
        assert "\n" not in str(error.value)
    assert not (project / ".workspaces").exists()


def test_a_part_of_the_pipeline_does_not_replace_results(project):
    (project / "outputs" / "full").mkdir(parents=True)
    (project / "outputs" / "full" / "committed").touch()
    assert run(project, "full", ["first"]) == 0
    assert [path.name for path in (project / "outputs" / "full").iterdir()] == ["committed"]


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
    assert run(meeting, jobs=2) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "last | the end" in lines and not any("Updating lock" in line for line in lines)
    order = [line.split()[1].rstrip(":") for line in lines if line.startswith("[") and "took" not in line]
    assert set(order[:2]) == {"one", "two"} and set(order[2:]) == {"last", "alone"}  # what others wait for comes first
    assert run(meeting, jobs=2) == 0


def test_nothing_new_starts_after_a_failure_but_what_runs_goes_on(meeting, capfd):
    (meeting / "dvc.yaml").write_text((meeting / "dvc.yaml").read_text().replace("meet.py two one", "meet.py two four"))
    text = MEETING.replace("60", "1")  # the second gives up after the first has ended
    (meeting / "meet.py").write_text(text)
    assert run(meeting, jobs=2) != 0
    out = capfd.readouterr().out
    assert "one took" in out and "two stopped after" in out and "] last:" not in out
    assert (meeting / "one").exists() and "one:" in (meeting / "dvc.lock").read_text()


def test_named_stages_run_with_what_they_need(meeting, capfd):
    assert run(meeting, dvc_arguments=["alone"], jobs=2) == 0
    assert [line.split()[1] for line in stage_lines(capfd)] == ["alone:"]
    assert run(meeting, dvc_arguments=["last", "--dry"], jobs=2) == 0
    assert not (meeting / "one").exists()
    assert {line.split()[1] for line in stage_lines(capfd)} == {"one:", "two:", "last:"}
    assert run(meeting, dvc_arguments=["alone", "--force"], jobs=2) == 0
    assert "alone: needs nobody" in capfd.readouterr().out
    with pytest.raises(InputError, match="stage: got 'lost'; allowed: one of one, two, last, alone"):
        run(meeting, dvc_arguments=["lost"])
    with pytest.raises(InputError, match="jobs: got 0; allowed: at least 1"):
        run(meeting, jobs=0)


def test_a_workspace_follows_the_project_but_keeps_what_it_made(project):
    (project / "outputs").mkdir()
    (project / "outputs" / "metrics.json").write_text("of the default profile")
    (project / "dvc.lock").write_text("of the default profile")
    workspace = prepare_workspace(project, "full")
    assert "params/full/suite.yaml" in (workspace / "dvc.yaml").read_text()
    assert (workspace / "old.txt").exists() and not (workspace / "outputs").exists()
    (workspace / "dvc.lock").write_text("of the workspace")
    (project / "old.txt").unlink()
    (project / "new.txt").write_text("untracked, not ignored")
    unchanged = (workspace / "steps" / "step.py").stat().st_mtime_ns
    prepare_workspace(project, "full")
    assert not (workspace / "old.txt").exists() and (workspace / "new.txt").exists()
    assert (workspace / "dvc.lock").read_text() == "of the workspace"
    assert (workspace / "steps" / "step.py").stat().st_mtime_ns == unchanged


@pytest.mark.parametrize("text", ["vars: []\n", DVC_YAML + "# params/cpu/suite.yaml\n"])
def test_the_line_that_names_the_profile_must_be_there_once(project, text):
    (project / "dvc.yaml").write_text(text)
    with pytest.raises(InputError, match="exactly one mention"):
        prepare_workspace(project, "full")


def test_bad_input_is_one_line_and_exit_code_2(project, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(project)
    assert main(["repro", "fulll"]) == 2
    assert capsys.readouterr().err == "grade repro: profile: got 'fulll'; allowed: one of cpu, full\n"
    monkeypatch.chdir(tmp_path)
    assert main(["repro"]) == 2
    assert "the folder with dvc.yaml" in capsys.readouterr().err


def test_a_profile_lies_over_another_and_its_workspace_has_the_whole(project):
    (project / "params/cpu/train.yaml").write_text("steps: 8\nlora: {r: 4, alpha: 8}\n")
    (project / "params/cpu/data.yaml").write_text("seed: 0\n")
    (project / "params/full/train.yaml").write_text("over: ../cpu/train.yaml\nlora: {r: 16}\n")
    (project / "params/full/suite.yaml").write_text("over: ../cpu/suite.yaml\nprofile: full\noutputs: outputs/full\n")
    assert profile_values(project, "full", "train") == {"steps": 8, "lora": {"r": 16, "alpha": 8}}
    assert profile_values(project, "full", "data") == {"seed": 0}
    workspace = prepare_workspace(project, "full")
    train = yaml.safe_load((workspace / "params/full/train.yaml").read_text())
    assert train == profile_values(project, "full", "train")
    assert yaml.safe_load((workspace / "params/full/data.yaml").read_text()) == {"seed": 0}
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
    PeersConfig.parse(profile_values(ROOT, profile, "peers"), f"{profile}/peers.yaml")


def test_what_stages_take_is_known_before_they_run_again(meeting, capfd):
    (meeting / "outputs").mkdir()
    rows = {"one": {"seconds": 120, "peak_memory_bytes": 2**30}, "two": {"seconds": 60, "peak_memory_bytes": 3 * 2**30}}
    (meeting / "outputs" / "timings.json").write_text(json.dumps(rows))
    assert run(meeting, jobs=2) == 0
    # max(180 s / 2, 120 s) for two at once, whose memory adds up
    expected = "4 of 4 stages to run: about 2 min 0 s with 2 at once, at most 4.0 GiB of memory"
    assert expected in capfd.readouterr().out
    timings = Timings(meeting / "outputs" / "timings.json")
    timings.record("last", 1.0, 1)  # nothing but DVC's own second: not recorded
    timings.record("alone", 10.0, 5)
    assert set(json.loads((meeting / "outputs" / "timings.json").read_text())) == {"one", "two", "alone"}


def test_published_results_are_made_again_once_in_every_clone(project, capfd):
    assert run(project) == 0
    (project / ".dvc/tmp/ran_here").unlink()  # as in a clone, where DVC finds every result up to date
    capfd.readouterr()
    assert run(project) == 0
    assert capfd.readouterr().out.count("using the first version") == 2
    assert run(project) == 0
    assert "0 of 2 stages to run" in capfd.readouterr().out
