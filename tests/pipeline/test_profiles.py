"""dvc.yaml holds what it promises, and profiles run in workspaces that leave the project alone."""

import ast
import json
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml
from dvc.repo import Repo
from dvc.utils.serialize import load_yaml as load_yaml_as_dvc
from imports import closure, imported_modules, module_path

from grade.cli.main import COMMANDS
from grade.config import read_yaml
from grade.errors import InputError
from grade.pipeline.profiles import main, prepare_workspace, run

ROOT = Path(__file__).parents[2]
PROFILES = sorted(path.parent.name for path in ROOT.glob("params/*/suite.yaml"))
PARAMS = sorted(ROOT.glob("params/**/*.yaml"))
STAGES = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]


# --- dvc.yaml: dependencies ---

# What no result depends on: input checks, writing of files, and what only finds and starts a command.
NEUTRAL = ("grade/errors.py", "grade/config.py", "grade/results.py", "grade/cli/", "grade/pipeline/")


def needed_code(stage):
    """The files of grade that a stage's command executes: what its two functions use, and what a notebook imports."""
    words = stage["cmd"].split()
    assert words[:3] == ["python", "-m", "grade"]
    start = used_modules(f"grade.cli.{COMMANDS[words[3]][0]}", {f"run_{words[3]}", f"add_{words[3]}_arguments"})
    for word in words:
        if word.startswith("notebooks/"):
            start |= imported_modules(ast.parse(notebook_source(ROOT / word)))
    files = {module_path(module) for module in closure(start)}
    return {file for file in files if not file.startswith(NEUTRAL) and not file.endswith("__init__.py")}


def used_modules(module, functions):
    """Modules of grade from which some functions of a module take names, helpers of the same module included."""
    tree = ast.parse((ROOT / module_path(module)).read_text())
    bodies = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    todo, seen, names, found = set(functions), set(), set(), set()
    while todo:
        body = bodies[todo.pop()]
        seen.add(body.name)
        names |= {node.id for node in ast.walk(body) if isinstance(node, ast.Name)}
        found |= imported_modules(body)
        todo |= (names & set(bodies)) - seen
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and names & {alias.asname or alias.name for alias in node.names}:
            found |= imported_modules(node)
    return found


def notebook_source(path):
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_depends_on_exactly_the_wings_that_it_imports(name):
    needed = needed_code(STAGES[name])
    listed = {dep for dep in STAGES[name]["deps"] if dep.startswith("grade")}
    uncovered = {file for file in needed if not any(covers(dep, file) for dep in listed)}
    needless = {dep for dep in listed if not any(covers(dep, file) for file in needed)}
    assert not uncovered and not needless, f"{name}: missing {sorted(uncovered)}, needless {sorted(needless)}"


def covers(dependency, file):
    return file == dependency or file.startswith(dependency + "/")


def test_the_dependencies_of_a_command_are_those_of_its_functions():
    assert "grade/data/fetch.py" in needed_code(STAGES["fetch"])
    assert not any("models" in file for file in needed_code(STAGES["fetch"]) | needed_code(STAGES["data"]))
    assert {"grade/gradients/replay.py", "grade/rewards/gold.py"} <= needed_code(STAGES["train"])


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_depends_on_the_files_that_its_command_names(name):
    stage = STAGES[name]
    known = {str(dep) for dep in stage["deps"]} | {key for entry in stage.get("params", []) for key in entry}
    outs = [next(iter(o)) if isinstance(o, dict) else o for k in ("outs", "metrics", "plots") for o in stage.get(k, [])]
    roots = ("data/", "models/", "notebooks/", "params/")
    for word in stage["cmd"].split():
        if word.startswith(roots) and word not in outs:
            assert word in known, f"{name}'s command reads {word}"


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_says_what_it_does_and_is_skipped_when_nothing_changed(name):
    assert STAGES[name]["desc"]
    assert not {"always_changed", "frozen"} & set(STAGES[name])


# --- dvc.yaml: outputs ---


@cache
def outs():
    with Repo(str(ROOT)) as repo:
        return [(Path(out.fs_path).relative_to(ROOT).as_posix(), out.use_cache) for out in repo.index.outs]


def is_ignored(path, checkout):
    return subprocess.run(["git", "check-ignore", "-q", path], cwd=checkout).returncode == 0


@pytest.mark.parametrize("profile", [profile for profile in PROFILES if profile != "smoke"])
def test_small_results_can_be_committed_and_big_ones_cannot(profile, tmp_path):
    # The rules in a checkout of their own: whatever is tracked by now, and wherever the project lies.
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    folder = read_yaml(ROOT / "params" / profile / "suite.yaml")["outputs"]
    found = [(path.replace("outputs/", f"{folder}/", 1), cached) for path, cached in outs()]
    assert [path for path, cached in found if is_ignored(path, tmp_path) != cached] == []


# --- params ---


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_has_every_file_that_the_pipeline_reads(profile):
    suite = read_yaml(ROOT / "params" / profile / "suite.yaml")
    assert suite["profile"] == profile
    assert suite["outputs"] == ("outputs" if profile == "cpu" else f"outputs/{profile}")
    assert outs()  # every ${...} in dvc.yaml has a value
    for stage in STAGES.values():
        if "${larger}" in stage.get("matrix", {}).values() and not suite["larger"]:
            continue
        for key in (key for entry in stage.get("params", []) for key in entry):
            for run_name in suite["runs"] if "${item.run}" in key else [""]:
                path = key.replace("${profile}", profile).replace("${item.run}", run_name)
                assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("path", PARAMS, ids=lambda path: path.relative_to(ROOT / "params").as_posix())
def test_a_params_file_reads_the_same_everywhere(path):
    # YAML 1.1 (PyYAML: ours) and 1.2 (ruamel: DVC's) differ: 1e-5 is text to one and a number to the other.
    ours, dvcs = read_yaml(path), load_yaml_as_dvc(str(path))
    assert json.dumps(ours, sort_keys=True) == json.dumps(dvcs, sort_keys=True)


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
    assert stage_lines(capfd) == ["[1/2] first: the first step; 1 left", "[2/2] second: the second step; 0 left"]
    assert (project / "outputs/second/metrics.json").read_text() == '{"profile": "cpu"}'
    assert not (project / ".workspaces").exists()
    assert run(project) == 0
    assert stage_lines(capfd) == ["[1/2] first: unchanged; 1 left", "[2/2] second: unchanged; 0 left"]


def test_another_profile_runs_in_a_workspace_is_resumed_and_brings_its_results_back(project, capfd):
    (project / "dvc.lock").write_text("schema: '2.0'\nstages: {}\n")
    before = {name: (project / name).read_bytes() for name in ("dvc.lock", "dvc.yaml")}
    workspace = prepare_workspace(project, "full")
    (workspace / "fail").touch()
    assert run(project, "full") != 0
    out = capfd.readouterr().out
    assert "second stopped after" in out and "full: failed" in out and "using the first version" in out
    assert not (project / "outputs").exists()

    (workspace / "fail").unlink()
    (project / "outputs" / "full").mkdir(parents=True)
    (project / "outputs" / "full" / "stale").touch()
    assert run(project, "full") == 0
    assert stage_lines(capfd) == ["[1/2] first: unchanged; 1 left", "[2/2] second: the second step; 0 left"]
    found = sorted(p.relative_to(project).as_posix() for p in project.glob("outputs/**/*") if p.is_file())
    assert found == ["outputs/full/first/metrics.json", "outputs/full/second/metrics.json"]
    assert (project / found[0]).read_text() == '{"profile": "full"}'
    assert {name: (project / name).read_bytes() for name in before} == before

    # An edit in the project arrives in the workspace, and the stage uses the workspace's copy of the package.
    (project / "grade" / "__init__.py").write_text("WHO = 'the second version'")
    assert run(project, "full", ["first"]) == 0
    assert "using the second version" in capfd.readouterr().out


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
    order = [line.split()[1].rstrip(":") for line in lines if line.startswith("[") and "left" in line]
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
    assert "alone: needs nobody; 0 left" in capfd.readouterr().out
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
    assert main(["fulll"]) == 2
    assert capsys.readouterr().err == "error: profile: got 'fulll'; allowed: one of cpu, full\n"
    monkeypatch.chdir(tmp_path)
    assert main([]) == 2
    assert "the folder with dvc.yaml" in capsys.readouterr().err


def test_the_real_pipeline_names_its_profile_once():
    assert (ROOT / "dvc.yaml").read_text().count("params/cpu/suite.yaml") == 1
