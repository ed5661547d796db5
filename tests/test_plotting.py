"""Figures that several experiments share, and the colours and marks of names."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from grade.errors import InputError
from grade.gradients.estimators import ESTIMATORS
from grade.gradients.methods import POLICY_GRADIENTS
from grade.plotting import GIB, color, marker, plot_categories, plot_timelines

BARS = pd.DataFrame(
    [("a", "weights", 2 * GIB), ("a", "logits", GIB), ("b", "weights", 20 * GIB), ("b", "logits", 0)],
    columns=["configuration", "category", "bytes"],
)
LINES = pd.DataFrame(
    [("x", "forward", GIB), ("x", "forward", 3 * GIB), ("x", "backward", 2 * GIB), ("y", "forward", GIB)],
    columns=["configuration", "phase", "bytes"],
)


@pytest.fixture
def axes():
    fig, axes = plt.subplots(1, 2)
    yield axes
    plt.close(fig)


def test_a_name_or_a_setting_of_it_has_one_colour_and_mark():
    assert color("gumbel_rao_m8_tau1") == color("gumbel_rao") != color("gumbel")
    assert marker("gumbel_rao_m8_tau1") == marker("gumbel_rao") != marker("gumbel")
    with pytest.raises(InputError, match="name of a colour"):
        color("gumbelrao")


@pytest.mark.parametrize(("unit", "size"), [("GiB", GIB), ("GB", 10**9)])
def test_categories_are_stacked_from_top_to_bottom_with_their_total(axes, unit, size):
    ax = plot_categories(axes[0], BARS, budget=16 * size, unit=unit)
    assert [t.get_text() for t in ax.get_yticklabels()] == ["a", "b"] and ax.yaxis_inverted()
    weights, logits = ax.containers
    assert [p.get_width() for p in weights] == pytest.approx([2 * GIB / size, 20 * GIB / size])
    assert [p.get_x() for p in logits] == pytest.approx([2 * GIB / size, 20 * GIB / size])
    assert to_hex(weights[0].get_facecolor(), keep_alpha=False).upper() == color("weights")
    totals = [3 * GIB / size, 20 * GIB / size]
    assert [t.get_text() for t in ax.texts] == [f"{totals[0]:.2f}", f"{totals[1]:.1f}", f"16 {unit}"]
    assert unit in ax.get_xlabel() and ax.get_xlim()[0] == 0


def test_a_category_too_small_to_see_has_no_name(axes):
    small = pd.concat([BARS, pd.DataFrame([("b", "rollout", GIB // 100)], columns=BARS.columns)])
    ax = plot_categories(axes[0], small)
    assert ax.get_legend_handles_labels()[1] == ["weights", "logits"]


def test_timelines_have_equal_axes_from_zero_and_a_colour_for_each_phase(axes):
    plot_timelines(axes, LINES)
    assert [ax.get_title(loc="left") or ax.get_title() for ax in axes] == ["x", "y"]
    assert axes[0].get_ylim() == axes[1].get_ylim() == (0, pytest.approx(3.15))
    assert [line.get_color() for line in axes[0].lines] == [color("forward"), color("backward")]
    assert [t.get_text() for t in axes[0].get_legend().get_texts()] == ["forward", "backward"]


def test_a_table_without_a_column_is_refused(axes):
    with pytest.raises(InputError, match="category"):
        plot_categories(axes[0], BARS.drop(columns="category"))
    with pytest.raises(InputError, match="phase"):
        plot_timelines(axes, LINES.drop(columns="phase"))


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
