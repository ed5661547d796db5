"""The layout: who may import whom, how long a chain of imports is, one word for an experiment."""

from functools import cache

import pytest
from imports import ROOT, imports_at_once, imports_of, modules

FLOORS = {
    "": 0, "models": 1, "pipeline": 1, "gradients": 2, "rewards": 2, "data": 2, "training": 3, "memory": 3,
    "entropy": 4, "experiments": 5, "cli": 6,
}  # fmt: skip
# What experiments share; otherwise none imports another.
SHARED = (
    "claims", "enumeration", "formulas", "frontier", "measured", "moments", "run", "setting", "traced", "training_runs",
)  # fmt: skip
LONGEST_CHAIN = 10
MOST_LINES = 400
ENTRANCES = ("grade", "grade.__main__")  # they name what lies above them, and import it when asked


def wing(module):
    """The folder of grade that a module is in; "" for the ground."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else ""


@pytest.mark.parametrize("module", [module for module in modules() if module not in ENTRANCES])
def test_a_module_imports_only_from_its_own_wing_and_the_floors_below(module):
    here = wing(module)
    for other in imports_of(module):
        there = wing(other)
        assert here == there or FLOORS[there] < FLOORS[here], f"{module} imports {other}"
        if here == there == "experiments":
            mine, theirs = module.split(".")[2], other.split(".")[2]
            assert mine == theirs or theirs in SHARED, f"{module} imports {other}"


def test_no_chain_of_imports_is_longer_than_ten_and_none_is_a_circle():
    @cache
    def chain(module):
        return max((chain(other) for other in imports_at_once(module)), key=len, default=()) + (module,)

    longest = max(map(chain, modules()), key=len)  # a circle would never end
    assert len(longest) <= LONGEST_CHAIN, " < ".join(longest)


@pytest.mark.parametrize("module", modules())
def test_packages_import_nothing_and_modules_are_short(module):
    path = ROOT / modules()[module]
    if path.name == "__init__.py":
        assert not imports_of(module)
    assert len(path.read_text().splitlines()) <= MOST_LINES


def test_the_ground_holds_only_what_knows_no_model():
    ground = {path.name for path in (ROOT / "grade").glob("*.py")}
    assert ground == {
        "__init__.py", "__main__.py", "config.py", "errors.py", "files.py", "outputs.py", "plotting.py", "results.py", "stats.py",
    }  # fmt: skip


def test_an_experiment_has_one_word_everywhere():
    words = {path.name for path in (ROOT / "grade" / "experiments").iterdir() if (path / "__init__.py").is_file()}
    notebooks = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert words == notebooks - {"tutorial", "your_own_task"}
    tests = [path.stem for path in (ROOT / "tests" / "experiments").glob("test_*.py")]
    for word in words:
        assert (ROOT / "params" / "cpu" / f"{word}.yaml").is_file()
        assert any(test == f"test_{word}" or test.startswith(f"test_{word}_") for test in tests), word
