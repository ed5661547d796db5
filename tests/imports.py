"""Who imports whom in grade, read from the syntax trees."""

import ast
from functools import cache
from pathlib import Path

import grade
from grade.config_files import read_yaml

ROOT = Path(__file__).parents[1]
PROFILES = ("cpu", "full", "h100", "smoke")
"""Folders of params/ with sizes of the whole pipeline."""


def profile_values(profile, name):
    """The values of one of a profile's files, with those that it lies over."""
    return read_yaml(ROOT / "params" / profile / f"{name}.yaml")


def suite_of(profile):
    """The file that is params/suite.yaml in a profile."""
    return ROOT / "params" / ("suite.yaml" if profile == "cpu" else f"{profile}/suite.yaml")


@cache
def modules():
    """Every module of grade by its dotted name, with its path from the root."""
    paths = sorted(path.relative_to(ROOT) for path in (ROOT / "grade").rglob("*.py"))
    return {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path.as_posix() for path in paths}


def module_path(module):
    return modules()[module]


def imported_modules(tree, lookups=False):
    """Modules of grade that a syntax tree imports, also inside functions; a name of a package is its submodule.

    With lookups also those that it names in a string.
    """
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "absolute imports only"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                found.add(submodule if submodule in modules() else node.module)
                if node.module == "grade":  # a public name is imported from its own module
                    found.add(grade._PUBLIC.get(alias.name, "grade"))
        elif lookups and isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # import_module("grade.pipeline.report")
    return found & set(modules())


@cache
def imports_of(module):
    return imported_modules(ast.parse((ROOT / module_path(module)).read_text()))


def closure(start):
    found, todo = set(), set(start)
    while todo:
        module = todo.pop()
        found.add(module)
        todo |= imports_of(module) - found
    return found
