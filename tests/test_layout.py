"""The layout: who may import whom, one word for an experiment."""

from graphlib import TopologicalSorter

import pytest
from imports import ROOT, imports_of, modules

FLOORS = {
    "": 0, "models": 1, "rewards": 2, "data": 2, "gradients": 3, "training": 4, "memory": 4, "entropy": 5,
    "experiments": 6, "pipeline": 7, "cli": 8, "commands": 9,
}  # fmt: skip
CHECKOUT = ("experiments", "pipeline", "commands")
ENTRANCES = ("grade", "grade.__main__")  # they name what lies above them, and import it when asked


def wing(module):
    """The folder of grade that a module is in; "" for the ground."""
    parts = module.replace("pipeline.commands", "commands").split(".")
    return parts[1] if len(parts) > 1 and parts[1] in FLOORS else ""


@pytest.mark.parametrize("module", [module for module in modules() if module not in ENTRANCES])
def test_a_module_imports_only_from_its_own_wing_and_the_floors_below(module):
    here = wing(module)
    for other in imports_of(module):
        there = wing(other)
        assert here in CHECKOUT or there not in CHECKOUT, f"{module} imports {other}, which no wheel has"
        assert here == there or FLOORS[there] < FLOORS[here], f"{module} imports {other}"


def test_packages_import_nothing():
    for module, path in modules().items():
        assert not (path.endswith("__init__.py") and imports_of(module)), path


def test_importing_never_goes_round_in_a_circle():
    """Also not through a function's imports, or those that only annotations need."""
    prepared = TopologicalSorter({module: imports_of(module) for module in modules()})
    prepared.prepare()  # raises CycleError, which names one


def test_an_experiment_has_one_word_everywhere():
    notebooks = {path.stem for path in (ROOT / "notebooks").glob("*.ipynb")}
    assert notebooks - {"beside_trl"} <= {path.stem for path in (ROOT / "params" / "cpu").glob("*.yaml")}
