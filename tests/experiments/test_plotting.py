"""Figures that several experiments share, and the colours and marks of names."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from grade.errors import InputError
from grade.experiments.plotting import GIB, categories_figure, color, marker, timelines_figure
from grade.gradients.estimators import ESTIMATORS
from grade.gradients.methods import POLICY_GRADIENTS

BARS = pd.DataFrame(
    [("a", "weights", 2 * GIB), ("a", "logits", GIB), ("b", "weights", 20 * GIB), ("b", "logits", 0)],
    columns=["configuration", "category", "bytes"],
)
LINES = pd.DataFrame(
    [("x", "forward", GIB), ("x", "forward", 3 * GIB), ("x", "backward", 2 * GIB), ("y", "forward", GIB)],
    columns=["configuration", "phase", "bytes"],
)


@pytest.mark.parametrize(("unit", "size"), [("GiB", GIB), ("GB", 10**9)])
def test_categories_are_stacked_from_top_to_bottom_with_their_total(unit, size):
    small = pd.concat([BARS, pd.DataFrame([("b", "rollout", GIB // 100)], columns=BARS.columns)])
    fig = categories_figure(small, "title", {"a": "A"}, unit, budget=16 * size)
    (ax,) = fig.axes
    assert [t.get_text() for t in ax.get_yticklabels()] == ["A", "b"] and ax.yaxis_inverted()
    weights, logits, _ = ax.containers
    assert [p.get_width() for p in weights] == pytest.approx([2 * GIB / size, 20 * GIB / size])
    assert [p.get_x() for p in logits] == pytest.approx([2 * GIB / size, 20 * GIB / size])
    assert to_hex(weights[0].get_facecolor(), keep_alpha=False).upper() == color("weights")
    assert [t.get_text() for t in fig.legends[0].get_texts()] == ["weights", "logits"]  # the rest is too small to see
    plt.close(fig)


def test_timelines_have_equal_axes_from_zero_and_a_colour_for_each_phase():
    fig = timelines_figure(LINES, ["X", "Y"])
    assert [ax.get_title(loc="left") or ax.get_title() for ax in fig.axes] == ["X", "Y"]
    assert fig.axes[0].get_ylim() == fig.axes[1].get_ylim() and fig.axes[0].get_ylim()[0] == 0
    assert [line.get_color() for line in fig.axes[0].lines] == [color("forward"), color("backward")]
    plt.close(fig)


def test_every_method_has_a_colour_and_a_mark_of_its_own():
    variants = ["ste_legacy", "gumbel_legacy", "ste_trunk", "gumbel_trunk", "trl_grpo"]
    variants += ["distilled", "auto", "plug_in", "corrected"]
    methods = [*ESTIMATORS, *POLICY_GRADIENTS, *variants]
    assert len({color(name) for name in methods}) == len(methods)
    # In print, where colours fade, no two of one figure look alike: marks differ within a family of methods.
    ours = ("rloo", "auto", "plug_in", "corrected")
    for family in (("ste", "gumbel", "gumbel_rao", "reinmax", "st"), POLICY_GRADIENTS, ours):
        assert len({marker(name) for name in family}) == len(family)


def test_a_setting_has_its_methods_colour_and_an_unknown_name_is_an_error():
    assert color("gumbel_rao_m8_tau1_hops0") == color("gumbel_rao") != color("gumbel")
    with pytest.raises(InputError, match="name of a colour or mark: got 'stee'"):
        color("stee")
