"""The colours and marks of names."""

from grade.experiments.plotting import color, marker
from grade.gradients.methods import POLICY_GRADIENTS
from grade.plugins import ESTIMATORS


def test_every_method_has_a_colour_and_a_mark_of_its_own():
    variants = ["ste_legacy", "gumbel_legacy", "ste_trunk", "gumbel_trunk"]
    methods = [*ESTIMATORS, *POLICY_GRADIENTS, *variants]
    assert len({color(name) for name in methods}) == len(methods)
    # In print, where colours fade, no two of one figure look alike: marks differ within a family of methods.
    for family in (("ste", "gumbel", "gumbel_rao", "reinmax", "st"), POLICY_GRADIENTS):
        assert len({marker(name) for name in family}) == len(family)
