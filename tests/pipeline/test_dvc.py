"""dvc.yaml holds what it promises, in every profile."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
from dvc.repo import Repo
from imports import PROFILES, ROOT, closure, imported_modules, module_path, profile_values, suite_of

from grade.cli.main import COMMANDS
from grade.config_files import parse_yaml, read_yaml
from grade.training.config import TrainConfig

# What no result depends on: input checks, writing of files, and what only finds and starts a command.
NEUTRAL = ("grade/errors.py", "grade/config.py", "grade/config_files.py", "grade/files.py", "grade/results.py",
           "grade/cli/", "grade/pipeline/commands/", "grade/pipeline/notebook.py")  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """A stage as DVC resolves it."""

    cmd: str
    deps: set[str]  # parameter files among them
    outs: set[str]


def stages(profile, folder):
    """Stages of a profile, whose suite.yaml is copied over that of the project, in a folder of their own."""
    shutil.copy(ROOT / "dvc.yaml", folder)
    shutil.copytree(ROOT / "params", folder / "params")
    shutil.copy(suite_of(profile), folder / "params/suite.yaml")
    Repo.init(str(folder), no_scm=True).close()

    def name(part):
        return Path(part.fs_path).relative_to(folder).as_posix()

    with Repo(str(folder)) as repo:
        return {
            stage.name: Stage(stage.cmd, {name(d) for d in stage.deps}, {name(o) for o in stage.outs})
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
    for name, stage in (resolved("full") | resolved("cpu")).items():
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


def test_a_stage_depends_on_the_files_that_its_command_names(pipeline):
    roots = ("data/", "models/", "notebooks/", "params/")
    for name, stage in pipeline[1].items():
        known = stage.deps | stage.outs
        for word in stage.cmd.split():
            if word.startswith(roots):
                assert any(covers(path, word) for path in known), f"{name}'s command reads {word}"


def test_a_stage_depends_on_the_files_that_its_parameters_name(pipeline):
    profile, found = pipeline
    for name, stage in found.items():
        for file in (dep for dep in stage.deps if dep.startswith(f"params/{profile}/")):
            for path in re.findall(r"\b(?:data|models|outputs)/[\w/-]+", str(profile_values(profile, Path(file).stem))):
                # Of a folder of runs, those that are read; or what another stage reads is written.
                known = stage.deps | stage.outs
                assert any(covers(dep, path) or covers(path, dep) for dep in known), f"{name} reads {path}"


# --- lock ---


def test_the_published_results_are_of_this_code_and_these_parameters():
    """`dvc status`, but for what only DVC's cache has: data, models, trained adapters."""
    with Repo(str(ROOT)) as repo:
        status = repo.status()
    found = {}
    for stage, changes in status.items():
        for change in changes:
            parts = change if isinstance(change, dict) else {"": {change: "changed command"}}
            for path, what in (pair for part in parts.values() for pair in part.items()):
                if what not in ("deleted", "not in cache"):
                    found.setdefault(stage, {})[path] = what
    assert not found, "dvc repro, or dvc commit where nothing that computes has changed"


# --- params ---


def test_a_profile_names_itself_and_its_folder_and_every_file_of_it_is_read(pipeline):
    profile, found = pipeline
    suite = read_yaml(suite_of(profile))
    assert suite["profile"] == profile
    assert suite["outputs"] == ("outputs" if profile == "cpu" else f"outputs/{profile}")
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "params" / profile).glob("*.yaml")}
    # The notebook beside TRL needs the extra `peers`, so no stage runs it.
    assert files - {f"params/{profile}/suite.yaml", "params/full/beside_trl.yaml"} == {
        dep for stage in found.values() for dep in stage.deps if dep.startswith(f"params/{profile}/")
    }


def test_a_file_that_a_profile_lies_over_is_a_parameter_too(pipeline):
    profile, found = pipeline
    for stage in found.values():
        for dep in stage.deps:
            if dep.startswith("params/"):
                below = (parse_yaml((ROOT / dep).read_text()) or {}).get("over")
                assert below is None or (ROOT / dep).parent.joinpath(below).resolve() in {
                    (ROOT / other).resolve() for other in stage.deps
                }, dep


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profiles_training_runs_are_valid_settings(profile):
    for name in ("ste", "gumbel", "ste_trunk"):
        values = profile_values(profile, "train") | profile_values(profile, f"train_{name}")
        config = TrainConfig.parse(values, f"{profile}/train_{name}.yaml")
        # What a default would change without notice, or make depend on where the project lies.
        assert {"method", "seed", "beta", "learning_rate", "lr_scheduler_type", "eval_strategy"} <= set(values)
        assert config.base_name == config.model and (config.use_cpu or profile == "h100")


def test_make_runs_each_stage_once_and_after_those_that_it_reads(tmp_path):
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # of the make that tests
    run = partial(subprocess.run, capture_output=True, text=True, check=True, env=own)
    rules = run(["make", "-s", f"VENV={sys.prefix}", "rules"], cwd=ROOT).stdout
    (tmp_path / "stages.mk").write_text(rules)
    told = run(["make", "-n", "-f", "stages.mk", "all"], cwd=tmp_path)
    order = [line.split()[-1] for line in told.stdout.splitlines()]
    graph = Repo(str(ROOT)).index.graph  # an edge leads to what a stage reads
    assert sorted(order) == sorted(stage.addressing for stage in graph)
    assert all(order.index(one.addressing) > order.index(other.addressing) for one, other in graph.edges)
    waits = set(re.findall(r"^(\S+)\.stage: (\S+)\.stage$", rules, re.M))
    assert waits == {(one.addressing, other.addressing) for one, other in graph.edges}
