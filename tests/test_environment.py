"""The environment's files agree: pyproject says what, constraints.txt which version, environment.yml only defers."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
DIRECT = [Requirement(line) for group in (PROJECT["dependencies"], *EXTRAS.values()) for line in group]
PINS = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]


def test_every_constraint_is_one_exact_version_from_the_index():
    # A local version (1.0+cpu), a path or a URL would only install on the machine that froze it.
    assert [line for line in PINS if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.!]*", line)] == []
    names = [canonicalize_name(line.split("==")[0]) for line in PINS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("requirement", DIRECT, ids=lambda requirement: requirement.name)
def test_every_direct_dependency_is_pinned_within_its_range(requirement):
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in PINS)}
    assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)], prereleases=True)


def test_make_installs_pinned_versions_by_their_hashes():
    text = (ROOT / "requirements.txt").read_text().replace("\\\n", " ")
    hashed = {canonicalize_name(line.split("==")[0]): line for line in text.splitlines() if "==" in line}
    pins = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in PINS}
    assert {name: line.split()[0].split("==")[1] for name, line in hashed.items()} == {n: pins[n] for n in hashed}
    assert [line for line in hashed.values() if not re.fullmatch(r"\S+( +--hash=sha256:[0-9a-f]{64})+", line)] == []
    asked = {canonicalize_name(Requirement(line).name) for line in (*PROJECT["dependencies"], *EXTRAS["test"])}
    assert asked - set(hashed) == {"torch"}  # whose file depends on the accelerator
