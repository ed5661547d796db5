"""What the figures show: data, labels, units, n and colours. Not pixels."""

from __future__ import annotations

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402 - the backend comes first
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
import pytest  # noqa: E402
from matplotlib.colors import to_hex  # noqa: E402

from grade import plotting  # noqa: E402
from grade.errors import InputError  # noqa: E402
from grade.experiments.exp6 import figures


@pytest.fixture(autouse=True)
def style():
    with mpl.rc_context():
        plotting.use_style()
        yield
    plt.close("all")


@pytest.fixture
def ax():
    return plt.subplots()[1]


def history(start: float = 0.5, seconds: float = 2.0, run: str = "ste-0") -> pd.DataFrame:
    """Steps 0..4 of 8 samples, evaluated at 0, 2 and 4; the reward rises by 0.1 each evaluation."""
    rows = []
    for step in range(5):
        row = {"run": run, "step": step, "samples": 8 * step, "seconds": seconds * step}
        row |= {"train/reward": start, "train/kl": 0.1 * step}
        row |= {"train/grad_norm": 1.0 + step}
        if step % 2 == 0:
            row |= {"val/reward_mean": start + 0.05 * step, "val/reward_stderr": 0.02, "val/reward_n": 64}
            row |= {"val/gold_mean": 0.45, "val/gold_stderr": 0.01, "val/gold_n": 32}
        rows.append(row)
    return pd.DataFrame(rows)


def lines(ax):
    return {line.get_label(): line for line in ax.get_lines() if not line.get_label().startswith("_")}


def legend_texts(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


@pytest.mark.parametrize(("run", "method"), [("ste-0", "ste"), ("ste_trunk-12", "ste_trunk"), ("a-b", "a-b")])
def test_method_of_strips_only_a_seed(run, method):
    assert figures.method_of(run) == method


def test_reward_of_one_run_with_its_own_standard_error(ax):
    assert figures.plot_reward(ax, history(), "seconds") is ax
    reward, gold = lines(ax)["ste: held-out reward (n=64)"], lines(ax)["ste: gold judge (n=32)"]
    np.testing.assert_allclose(reward.get_xdata(), [0, 4, 8])  # only evaluated rows
    np.testing.assert_allclose(reward.get_ydata(), [0.5, 0.6, 0.7])
    np.testing.assert_allclose(gold.get_ydata(), [0.45] * 3)
    assert to_hex(reward.get_color()).upper() == plotting.color("ste")
    assert gold.get_linestyle() == "--" != reward.get_linestyle()
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose([band.min(), band.max()], [0.48, 0.72])
    assert "seconds" in ax.get_xlabel() and "standard error" in ax.get_ylabel()
    assert ax.get_ylim()[0] <= 0.44 and ax.get_ylim()[1] == 1  # nothing is cut off


def test_reward_of_several_seeds_is_their_mean_with_the_standard_error_over_runs(ax):
    both = pd.concat([history(0.5), history(0.6, 4.0, "ste-1")])
    figures.plot_reward(ax, both, "seconds", gold=False)
    mean = lines(ax)["ste: held-out reward (n=64, 2 runs)"]
    np.testing.assert_allclose(mean.get_ydata(), [0.55, 0.65, 0.75])
    np.testing.assert_allclose(mean.get_xdata(), [0, 6, 12])
    assert len(ax.get_lines()) == 3  # the mean and each run
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    # sd of (.5, .6) is .0707 with n - 1, over sqrt(2): .05
    np.testing.assert_allclose([band.min(), band.max()], [0.50, 0.80])


def test_reward_without_a_gold_judge(ax):
    frame = history(run="gumbel").drop(columns=["val/gold_mean", "val/gold_stderr", "val/gold_n"])
    figures.plot_reward(ax, frame)
    np.testing.assert_allclose(ax.get_lines()[0].get_xdata(), [0, 16, 32])
    assert "samples" in ax.get_xlabel()
    assert legend_texts(ax) == ["gumbel: held-out reward (n=64)"]


def test_reward_refuses_a_history_without_the_columns_or_without_evaluations(ax):
    with pytest.raises(InputError, match="val/reward_stderr"):
        figures.plot_reward(ax, history().drop(columns="val/reward_stderr"))
    with pytest.raises(InputError, match="evaluation"):
        figures.plot_reward(ax, history().assign(**{"val/reward_mean": np.nan}))


def test_training_curves_have_an_axes_each_with_units():
    axes = figures.plot_training_curves(plt.subplots(1, 3)[1], pd.concat([history(), history(0.7, run="ste-1")]))
    assert [ax.get_ylabel() for ax in axes] == [
        "reward, P(positive)",
        "KL, nats per token",
        "gradient norm before clipping",
    ]
    np.testing.assert_allclose(lines(axes[0])["ste (2 runs)"].get_ydata(), [0.6] * 5)
    np.testing.assert_allclose(lines(axes[1])["ste (2 runs)"].get_ydata(), 0.1 * np.arange(5))
    assert axes[2].get_yscale() == "log"
    with pytest.raises(InputError, match="3 Axes"):
        figures.plot_training_curves(plt.subplots(1, 2)[1], history())
    with pytest.raises(InputError, match="train/kl"):
        figures.plot_training_curves(plt.subplots(1, 3)[1], history().drop(columns="train/kl"))


def test_time_shows_the_fitted_exponent(ax):
    rows = [
        {"engine": engine, "T": t, "seconds": c * t**p * noise}
        for engine, c, p in (("unrolled", 0.01, 2.0), ("replay", 0.1, 1.0))
        for t in (16, 32, 64)
        for noise in (0.5, 1.5)
    ]
    figures.plot_time_against_tokens(ax, pd.DataFrame(rows))
    assert legend_texts(ax) == ["unrolled: $T^{2.00}$", "replay: $T^{1.00}$"]
    np.testing.assert_allclose(ax.get_lines()[1].get_ydata(), [1.6, 3.2, 6.4])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert "tokens" in ax.get_xlabel() and "seconds" in ax.get_ylabel()
    with pytest.raises(InputError, match="greater than 0"):
        figures.plot_time_against_tokens(ax, pd.DataFrame([{"engine": "replay", "T": 16, "seconds": 0.0}]))


def test_one_length_has_no_exponent(ax):
    figures.plot_time_against_tokens(ax, pd.DataFrame([{"engine": "replay", "T": 16, "seconds": 1.0}]))
    assert legend_texts(ax) == ["replay"]


def test_kept_bytes_are_labelled_in_decimal_mb_in_their_engines_colours(ax):
    frame = pd.DataFrame({"option": ["all", "other"], "engine": ["unrolled", "replay"], "bytes": [3e9, 1.5e6]})
    figures.plot_kept_bytes(ax, frame)
    assert [bar.get_width() for bar in ax.patches] == [3000, 1.5]
    assert [text.get_text() for text in ax.texts] == ["3,000", "1.5"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["all", "other"]
    assert ax.yaxis_inverted() and "MB" in ax.get_xlabel() and ax.get_xscale() == "linear"
    colors = [to_hex(bar.get_facecolor()).upper() for bar in ax.patches]
    assert colors == [plotting.color("unrolled"), plotting.color("replay")]
    with pytest.raises(InputError, match="bytes"):
        figures.plot_kept_bytes(ax, frame.assign(bytes=-1))


def test_support_mass_draws_what_is_missing(ax):
    frame = pd.DataFrame({"tau": [1, 1, 0.5, 0.5], "K": [256, 64, 64, 256], "mass": [0.99, 0.9, 0.999, 1.0], "n": 500})
    figures.plot_support_mass(ax, frame)
    np.testing.assert_allclose(lines(ax)["tau = 1"].get_xdata(), [64, 256])
    np.testing.assert_allclose(lines(ax)["tau = 1"].get_ydata(), [0.1, 0.01])
    np.testing.assert_allclose(lines(ax)["tau = 0.5"].get_ydata(), [0.001, np.nan])  # nothing missing: no point
    assert "n=500" in ax.get_legend().get_title().get_text()
    with pytest.raises(InputError, match="mass"):
        figures.plot_support_mass(ax, frame.assign(mass=1.5))


def test_hops_have_a_panel_for_each_policy_and_a_line_for_each_estimator():
    rows = [(policy, "ste", hops, 0.1**hops) for policy in ("untrained", "trained") for hops in (0, 1)]
    frame = pd.DataFrame(rows, columns=["policy", "estimator", "hops", "error"])
    axes = figures.plot_hops(plt.subplots(1, 2)[1], frame)
    assert [ax.get_title(loc="left") for ax in axes] == ["untrained policy", "trained policy"]
    (line,) = axes[0].get_lines()
    np.testing.assert_allclose(line.get_ydata(), [1, 0.1])
    assert (line.get_label(), axes[0].get_yscale()) == ("ste", "log")
    with pytest.raises(InputError, match="estimator"):
        figures.plot_hops(plt.subplots(1, 2)[1], frame.drop(columns="estimator"))


def test_a_run_of_ones_own_is_drawn_as_well(ax):
    figures.plot_reward(ax, history(run="mine-0"))
    assert to_hex(ax.get_lines()[0].get_color()).upper() == plotting.color("neutral")
