"""What the figures show: data, labels, units, n and colours. Not pixels."""

from __future__ import annotations

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402 - the backend comes first
import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
import pytest  # noqa: E402
from matplotlib.colors import to_hex, to_rgb  # noqa: E402

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


def history(start: float = 0.5, seconds: float = 2.0) -> pd.DataFrame:
    """Steps 0..4, evaluated at 0, 2 and 4; the reward rises by 0.1 each evaluation."""
    rows = []
    for step in range(5):
        row = {"step": step, "seconds": seconds * step, "train/reward": start, "train/kl": 0.1 * step}
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


def test_every_color_is_its_own_and_is_told_apart_in_grey_or_by_its_mark():
    assert len(set(plotting.METHOD_COLORS.values())) == len(plotting.METHOD_COLORS)
    assert set(plotting.METHOD_MARKERS) == set(plotting.METHOD_COLORS)
    assert {"gumbel", "ste", "gumbel_legacy", "ste_legacy", "ste_trunk", "gumbel_trunk"} < set(plotting.METHOD_COLORS)
    luminance = {name: np.dot(to_rgb(c), (0.2126, 0.7152, 0.0722)) for name, c in plotting.METHOD_COLORS.items()}
    for one in luminance:
        for other in luminance:
            same_grey = abs(luminance[one] - luminance[other]) < 0.05
            assert one == other or not same_grey or plotting.METHOD_MARKERS[one] != plotting.METHOD_MARKERS[other]


@pytest.mark.parametrize(("run", "method"), [("ste-0", "ste"), ("ste_trunk-12", "ste_trunk"), ("a-b", "a-b")])
def test_method_of_strips_only_a_seed(run, method):
    assert figures.method_of(run) == method


def test_reward_of_one_run_with_its_own_standard_error(ax):
    assert figures.plot_reward_against_seconds(ax, {"ste-0": history()}) is ax
    reward, gold = lines(ax)["ste: held-out reward (n=64)"], lines(ax)["ste: gold judge (n=32)"]
    np.testing.assert_allclose(reward.get_xdata(), [0, 4, 8])  # only evaluated rows
    np.testing.assert_allclose(reward.get_ydata(), [0.5, 0.6, 0.7])
    np.testing.assert_allclose(gold.get_ydata(), [0.45] * 3)
    assert to_hex(reward.get_color()).upper() == plotting.METHOD_COLORS["ste"]
    assert gold.get_linestyle() == "--" != reward.get_linestyle()
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    np.testing.assert_allclose([band.min(), band.max()], [0.48, 0.72])
    assert "seconds" in ax.get_xlabel() and "standard error" in ax.get_ylabel()
    assert ax.get_ylim()[0] <= 0.44 and ax.get_ylim()[1] == 1  # nothing is cut off


def test_reward_of_several_seeds_is_their_mean_with_the_standard_error_over_runs(ax):
    figures.plot_reward_against_seconds(ax, {"ste-0": history(0.5), "ste-1": history(0.6, 4.0)}, gold=False)
    mean = lines(ax)["ste: held-out reward (n=64, 2 runs)"]
    np.testing.assert_allclose(mean.get_ydata(), [0.55, 0.65, 0.75])
    np.testing.assert_allclose(mean.get_xdata(), [0, 6, 12])
    assert len(ax.get_lines()) == 3  # the mean and each run
    band = ax.collections[0].get_paths()[0].vertices[:, 1]
    # sd of (.5, .6) is .0707 with n - 1, over sqrt(2): .05
    np.testing.assert_allclose([band.min(), band.max()], [0.50, 0.80])


def test_reward_without_a_gold_judge(ax):
    frame = history().drop(columns=["val/gold_mean", "val/gold_stderr", "val/gold_n"])
    figures.plot_reward_against_seconds(ax, {"gumbel": frame})
    assert legend_texts(ax) == ["gumbel: held-out reward (n=64)"]


def test_reward_refuses_a_history_without_the_columns_or_without_evaluations(ax):
    with pytest.raises(InputError, match="val/reward_stderr"):
        figures.plot_reward_against_seconds(ax, {"ste": history().drop(columns="val/reward_stderr")})
    with pytest.raises(InputError, match="evaluation"):
        figures.plot_reward_against_seconds(ax, {"ste": history().assign(**{"val/reward_mean": np.nan})})


def test_training_curves_have_an_axes_each_with_units():
    axes = figures.plot_training_curves(plt.subplots(1, 3)[1], {"ste-0": history(), "ste-1": history(0.7)})
    assert [ax.get_ylabel() for ax in axes] == [
        "reward, P(positive)",
        "KL (nats a token)",
        "gradient norm, before clipping",
    ]
    np.testing.assert_allclose(lines(axes[0])["ste (2 runs)"].get_ydata(), [0.6] * 5)
    np.testing.assert_allclose(lines(axes[1])["ste (2 runs)"].get_ydata(), 0.1 * np.arange(5))
    assert axes[2].get_yscale() == "log"
    with pytest.raises(InputError, match="3 Axes"):
        figures.plot_training_curves(plt.subplots(1, 2)[1], {"ste": history()})
    with pytest.raises(InputError, match="train/kl"):
        figures.plot_training_curves(plt.subplots(1, 3)[1], {"ste": history().drop(columns="train/kl")})


def test_time_shows_the_fitted_exponent_and_n(ax):
    rows = [
        {"engine": engine, "T": t, "seconds": c * t**p * noise}
        for engine, c, p in (("unrolled", 0.01, 2.0), ("replay", 0.1, 1.0))
        for t in (16, 32, 64)
        for noise in (0.5, 1.5)
    ]
    figures.plot_time_against_tokens(ax, pd.DataFrame(rows))
    assert legend_texts(ax) == ["unrolled: $T^{2.00}$ (n=2 each)", "replay: $T^{1.00}$ (n=2 each)"]
    np.testing.assert_allclose(ax.get_lines()[1].get_ydata(), [1.6, 3.2, 6.4])
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    assert "tokens" in ax.get_xlabel() and "seconds" in ax.get_ylabel()
    with pytest.raises(InputError, match="greater than 0"):
        figures.plot_time_against_tokens(ax, pd.DataFrame([{"engine": "replay", "T": 16, "seconds": 0.0}]))


def test_one_length_has_no_exponent(ax):
    figures.plot_time_against_tokens(ax, pd.DataFrame([{"engine": "replay", "T": 16, "seconds": 1.0}]))
    assert legend_texts(ax) == ["replay (n=1 each)"]


def test_kept_bytes_are_labelled_in_mib_top_to_bottom(ax):
    frame = pd.DataFrame({"option": ["unrolled", "other"], "bytes": [3 * 2**30, 1.5 * 2**20]})
    figures.plot_kept_bytes(ax, frame)
    assert [bar.get_width() for bar in ax.patches] == [3072, 1.5]
    assert [text.get_text() for text in ax.texts] == ["3,072 MiB", "1.5 MiB"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["unrolled", "other"]
    assert ax.yaxis_inverted() and "MiB" in ax.get_xlabel()
    assert to_hex(ax.patches[0].get_facecolor()).upper() == plotting.METHOD_COLORS["unrolled"]
    assert to_hex(ax.patches[1].get_facecolor()).upper() not in plotting.METHOD_COLORS.values()
    with pytest.raises(InputError, match="bytes"):
        figures.plot_kept_bytes(ax, pd.DataFrame({"option": ["a"], "bytes": [0]}))


def test_support_mass_draws_what_is_missing(ax):
    frame = pd.DataFrame({"tau": [1, 1, 0.5, 0.5], "K": [256, 64, 64, 256], "mass": [0.99, 0.9, 0.999, 1.0], "n": 500})
    figures.plot_support_mass(ax, frame)
    np.testing.assert_allclose(lines(ax)["tau = 1"].get_xdata(), [64, 256])
    np.testing.assert_allclose(lines(ax)["tau = 1"].get_ydata(), [0.1, 0.01])
    np.testing.assert_allclose(lines(ax)["tau = 0.5"].get_ydata(), [0.001, np.nan])  # nothing missing: no point
    assert "n=500" in ax.get_legend().get_title().get_text()
    with pytest.raises(InputError, match="mass"):
        figures.plot_support_mass(ax, frame.assign(mass=1.5))


def test_residual_has_a_line_for_each_estimator(ax):
    frame = pd.DataFrame({"hops": [0, 0, 1, 1], "error": [0.2, 0.4, 0.02, 0.04], "estimator": "ste"})
    figures.plot_residual(ax, frame)
    (line,) = ax.get_lines()
    np.testing.assert_allclose(line.get_ydata(), [0.3, 0.03])
    assert (line.get_label(), ax.get_yscale()) == ("ste (n=2)", "log")
    with pytest.raises(InputError, match="estimator"):
        figures.plot_residual(ax, frame.drop(columns="estimator"))


def test_all_figures_can_be_drawn(tmp_path):
    figure, axes = plt.subplots(2, 2)
    figures.plot_reward_against_seconds(axes[0, 0], {"ste-0": history(), "unknown": history()})
    figures.plot_residual(axes[0, 1], pd.DataFrame({"hops": [0, 1], "error": [0.2, 0.1], "estimator": "gumbel"}))
    figures.plot_kept_bytes(axes[1, 0], pd.DataFrame({"option": ["a"], "bytes": [1000]}))
    figures.plot_support_mass(axes[1, 1], pd.DataFrame({"tau": [1.0], "K": [4], "mass": [0.5]}))
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
