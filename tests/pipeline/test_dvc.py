"""dvc.yaml holds what it promises, in every profile."""

import ast
import json
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from dvc.repo import Repo
from imports import ROOT, closure, imported_modules, module_path

from grade.cli.main import COMMANDS
from grade.config_files import parse_yaml
from grade.pipeline.profiles import profile_values, profiles, resolved_files

PROFILES = profiles(ROOT)

# What no result depends on: input checks, writing of files, and what only finds and starts a command.
NEUTRAL = ("grade/errors.py", "grade/config.py", "grade/config_files.py", "grade/files.py", "grade/results.py",
           "grade/cli/", "grade/experiments/commands/", "grade/pipeline/")  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """A stage as DVC resolves it."""

    cmd: str
    deps: set[str]  # parameter files among them
    outs: list[tuple[str, bool]]  # and whether DVC's cache has it


def stages(profile, folder):
    """Stages of a profile: dvc.yaml and the profile's resolved parameters in a folder of their own."""
    text = (ROOT / "dvc.yaml").read_text().replace("params/cpu/suite.yaml", f"params/{profile}/suite.yaml")
    (folder / "dvc.yaml").write_text(text)
    for name, content in resolved_files(ROOT, profile).items():
        path = folder / "params" / profile / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    Repo.init(str(folder), no_scm=True).close()

    def name(part):
        return Path(part.fs_path).relative_to(folder).as_posix()

    with Repo(str(folder)) as repo:
        return {
            stage.name: Stage(stage.cmd, {name(d) for d in stage.deps}, [(name(o), o.use_cache) for o in stage.outs])
            for stage in repo.index.stages
        }


@pytest.fixture(scope="module")
def resolved(tmp_path_factory):
    return cache(lambda profile: stages(profile, tmp_path_factory.mktemp(profile)))


@pytest.fixture(params=PROFILES)
def pipeline(request, resolved):
    return request.param, resolved(request.param)


@pytest.fixture
def default(resolved):
    return resolved("cpu")


# --- dependencies ---


def needed_code(stage):
    """Files of grade that a command executes: what its function uses, a notebook's imports, what is measured."""
    words = stage.cmd.split()
    assert words[:3] == ["python", "-m", "grade"]
    start = used_modules(f"grade.{COMMANDS[words[3]][0]}", {f"_{words[3]}"})
    if words[3] == "measure":
        start.add(f"grade.experiments.{words[4]}.measure.tables")
    for word in words:
        if word.startswith("notebooks/"):
            start |= imported_modules(ast.parse(notebook_source(ROOT / word)))
    files = {module_path(module) for module in closure(start)}
    files |= {name for file in files if (ROOT / (name := file.replace(".py", ".yaml"))).is_file()}  # rows that it reads
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
        found |= imported_modules(body, lookups=True)
        todo |= (names & set(bodies)) - seen
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and names & {alias.asname or alias.name for alias in node.names}:
            found |= imported_modules(node)
    return {name for name in found if not name.startswith("grade.cli")}  # options, and names of folders


def notebook_source(path):
    cells = json.loads(path.read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def covers(dependency, file):
    return file == dependency or file.startswith(dependency + "/")


def test_a_stage_depends_on_the_wings_that_it_imports_and_a_family_on_no_other(resolved):
    wrong, family_needs, family_lists = {}, {}, {}
    studies = {name: stage for name, stage in resolved("smoke").items() if name.startswith("study")}
    for name, stage in (resolved("cpu") | studies).items():
        needed, listed = needed_code(stage), {dep for dep in stage.deps if dep.startswith("grade")}
        missing = sorted(file for file in needed if not any(covers(dep, file) for dep in listed))
        wrong |= {name: missing} if missing else {}
        family = name.partition("@")[0]  # members share one list; what one of them needs is not needless
        family_needs.setdefault(family, set()).update(needed)
        family_lists.setdefault(family, set()).update(listed)
    assert not wrong
    for family, listed in family_lists.items():
        needless = {dep for dep in listed if not any(covers(dep, file) for file in family_needs[family])}
        assert not needless, family


def test_a_drawing_never_costs_a_measurement(default):
    for name, stage in default.items():
        if name.startswith("measure"):
            drawing = ("plotting.py", "figures.py", "claims.py", "metrics.py")
            assert not {file for file in needed_code(stage) if file.endswith(drawing)}


def test_a_stage_depends_on_the_files_that_its_command_names(pipeline):
    roots = ("data/", "models/", "notebooks/", "params/")
    for name, stage in pipeline[1].items():
        known = stage.deps | {out for out, _ in stage.outs}
        for word in stage.cmd.split():
            if word.startswith(roots):
                assert any(covers(path, word) for path in known), f"{name}'s command reads {word}"


# --- outputs ---


def is_ignored(path, checkout):
    return subprocess.run(["git", "check-ignore", "-q", path], cwd=checkout).returncode == 0


def test_small_results_can_be_committed_and_big_ones_cannot(pipeline, tmp_path):
    # The rules in a checkout of their own: whatever is tracked by now, and wherever the project lies.
    profile, found = pipeline
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    shutil.copy(ROOT / ".gitignore", tmp_path)
    outs = [out for stage in found.values() for out in stage.outs]
    stay = profile == "smoke"  # all its results stay in its workspace
    assert outs and [path for path, cached in outs if is_ignored(path, tmp_path) != (cached or stay)] == []


@pytest.mark.parametrize("run", ["outputs/train/ste-0", "outputs/full/train/gumbel-1"])
def test_what_a_run_is_continued_from_is_no_result_for_git_or_for_dvc(run, tmp_path):
    # DVC removes a stage's outs before it runs it again, and `measure` stages depend on outputs/train.
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    for name in (".gitignore", ".dvcignore"):
        shutil.copy(ROOT / name, tmp_path)
    ours = ("checkpoint-8/optimizer.pt", "completions/eval_00000.parquet", "grade_state.json",
            ".saving/checkpoint-8/optimizer.pt")  # fmt: skip
    results = ("metrics.json", "history.csv", "samples.json")
    with Repo.init(str(tmp_path), no_scm=True) as repo:
        for names, ignored in ((ours, True), (results, False)):
            for name in names:
                path = f"{run}/{name}"
                assert is_ignored(path, tmp_path) == ignored, path
                assert repo.dvcignore.is_ignored_file(str(tmp_path / path)) == ignored, path
    assert not is_ignored("outputs/README.md", tmp_path), "the page of results"


def test_no_out_holds_times(pipeline):
    # Times differ from run to run: a stage that depended on them would never be up to date.
    ignored = (ROOT / ".dvcignore").read_text()
    assert "/outputs/**/timings*" in ignored
    assert not [out for stage in pipeline[1].values() for out, _ in stage.outs if "timings" in out]


# --- params ---


def test_a_profile_names_itself_and_its_folder(pipeline):
    profile, found = pipeline
    suite = profile_values(ROOT, profile, "suite")
    assert suite["profile"] == profile
    assert suite["outputs"] == ("outputs" if profile == "cpu" else f"outputs/{profile}")
    assert found["results"].cmd.endswith(f" --profile {profile}")


@pytest.mark.parametrize("profile", [profile for profile in PROFILES if profile != "cpu"])
def test_a_profile_holds_only_what_differs(profile):
    for path in (ROOT / "params" / profile).glob("*.yaml"):
        own = parse_yaml(path.read_text()) or {}
        below = own.pop("over", None)
        assert own, f"{path}: nothing differs, so the file can go"
        if below:
            base = parse_yaml((path.parent / below).read_text())
            assert {key for key in own if own[key] == base.get(key)} <= {"profile"}, path
