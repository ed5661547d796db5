"""Figures of Experiment 6."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from grade.errors import InputError
from grade.plotting import METHOD_COLORS, METHOD_MARKERS, NEUTRAL, OTHER, plain_log_ticks, require_columns

_SMALLEST_MASS = 1e-6
_MIB = 2**20


def method_of(run: str) -> str:
    """The method in a run's name, which may end in a seed.

    >>> method_of("ste_trunk-0"), method_of("gumbel")
    ('ste_trunk', 'gumbel')
    """
    head, dash, tail = run.rpartition("-")
    return head if dash and tail.isdigit() else run


def plot_reward_against_seconds(ax: Axes, runs: Mapping[str, pd.DataFrame], gold: bool = True) -> Axes:
    """Held-out reward, and the gold judge's, against seconds of training.

    One run of a method: its mean with the standard error over prompts. Several (``ste-0``, ``ste-1``, ...): thin lines,
    and their mean with the standard error over runs, seconds averaged at equal steps.

    Args:
        ax: Where to draw.
        runs: Run name to history, with ``step``, ``seconds``, ``val/reward_mean``, ``val/reward_stderr``,
            ``val/reward_n`` and, for the judge, ``val/gold_mean``. Rows without an evaluation are skipped.
        gold: Whether to draw the gold judge (dashed).

    Returns:
        ``ax``.

    Raises:
        InputError: For a missing column or no evaluation at all.
    """
    kinds = [("reward", "-", "held-out reward")] + [("gold", "--", "gold judge")] * gold
    lowest = 1.0
    for kind, line, label in kinds:  # the outer loop, so that the legend has a column for each
        for method, frames in _by_method(runs).items():
            if kind == "gold" and not all("val/gold_mean" in frame for frame in frames):
                continue
            curve, n = _curve(frames, kind)
            color = METHOD_COLORS.get(method, OTHER)
            face = color if kind == "reward" else "white"
            many = f", {len(frames)} runs" if len(frames) > 1 else ""
            ax.plot(curve["seconds"], curve["mean"], line, color=color, marker=METHOD_MARKERS.get(method, "o"),
                    markerfacecolor=face, label=f"{method}: {label} (n={n}{many})")  # fmt: skip
            low, high = curve["mean"] - curve["stderr"], curve["mean"] + curve["stderr"]
            ax.fill_between(curve["seconds"], low, high, color=color, alpha=0.18, linewidth=0)
            for frame in frames if len(frames) > 1 else ():
                rows = frame.dropna(subset=[f"val/{kind}_mean"])
                ax.plot(rows["seconds"], rows[f"val/{kind}_mean"], line, color=color, linewidth=0.7, alpha=0.6)
            lowest = min(lowest, float(low.fillna(curve["mean"]).min()), *(f[f"val/{kind}_mean"].min() for f in frames))
    ax.set(xlabel="training time (seconds)", ylabel="mean P(positive), band: ±1 standard error")
    ax.set_ylim(max(0.0, math.floor(10 * lowest) / 10), 1)
    ax.set_xlim(left=0)
    # Under the axes, where it cannot hide a curve.
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(kinds))
    return ax


def plot_training_curves(axes: Sequence[Axes], runs: Mapping[str, pd.DataFrame]) -> Sequence[Axes]:
    """Reward, KL and gradient norm of the training batches, step by step.

    Args:
        axes: Three Axes.
        runs: Run name to history, with ``step``, ``train/reward``, ``train/kl`` and ``train/grad_norm``.

    Returns:
        ``axes``.

    Raises:
        InputError: For a missing column.
    """
    axes = np.asarray(axes, dtype=object).ravel()
    names = {"train/reward": "reward, P(positive)", "train/kl": "KL (nats a token)",
             "train/grad_norm": "gradient norm, before clipping"}  # fmt: skip
    if len(axes) != len(names):
        raise InputError("axes", len(axes), f"{len(names)} Axes: {', '.join(names)}")
    for ax, (column, label) in zip(axes, names.items(), strict=True):
        for method, frames in _by_method(runs).items():
            color = METHOD_COLORS.get(method, OTHER)
            require_columns(frames, ["step", column])
            series = [frame.dropna(subset=[column]).set_index("step")[column] for frame in frames]
            mean = pd.concat(series, axis=1).mean(axis=1)
            name = f"{method} ({len(frames)} runs)" if len(frames) > 1 else method
            ax.plot(mean.index, mean, color=color, label=name, linewidth=1.6)
            for one in series if len(series) > 1 else ():
                ax.plot(one.index, one, color=color, linewidth=0.6, alpha=0.5)
        ax.set(xlabel="optimizer step", ylabel=label)
    axes[2].set_yscale("log")
    plain_log_ticks(axes[2])
    axes[0].legend(loc="best")
    return axes


def plot_time_against_tokens(ax: Axes, frame: pd.DataFrame) -> Axes:
    """Seconds of one gradient against completion length, log-log, with the fitted exponent in the legend.

    The exponent is the least-squares slope of ``log seconds`` on ``log T``. Repeated rows are averaged in the line, and
    their number is in the legend.

    Args:
        ax: Where to draw.
        frame: Columns ``engine``, ``T`` (tokens), ``seconds``.

    Returns:
        ``ax``.

    Raises:
        InputError: For a missing column or a value that has no logarithm.
    """
    require_columns([frame], ["engine", "T", "seconds"])
    if not (frame[["T", "seconds"]] > 0).all(axis=None):
        raise InputError("T and seconds", frame[["T", "seconds"]].min().to_dict(), "numbers greater than 0")
    for engine, rows in frame.groupby("engine", sort=False):
        mean, repeats = rows.groupby("T")["seconds"].mean(), int(rows.groupby("T").size().min())
        name = f"{engine} (n={repeats} each)"
        if len(mean) > 1:
            name = f"{engine}: $T^{{{fitted_exponent(rows['T'], rows['seconds']):.2f}}}$ (n={repeats} each)"
        color = METHOD_COLORS.get(str(engine), OTHER)
        ax.loglog(mean.index, mean, color=color, marker=METHOD_MARKERS.get(str(engine), "o"), label=name)
    lengths = sorted(frame["T"].unique())
    ax.set_xticks(lengths, [f"{length:g}" for length in lengths])
    ax.xaxis.set_minor_formatter(NullFormatter())
    plain_log_ticks(ax)
    ax.set(xlabel="completion length T (tokens)", ylabel="one gradient, rollout included (seconds)")
    ax.legend(loc="upper left")
    return ax


def fitted_exponent(tokens: Iterable[float], seconds: Iterable[float]) -> float:
    """Exponent p of ``seconds ~ tokens^p`` by least squares on logarithms.

    >>> round(fitted_exponent([16, 32, 64], [1.0, 4.0, 16.0]), 6)
    2.0
    """
    slope, _ = np.polyfit(np.log(np.asarray(list(tokens), float)), np.log(np.asarray(list(seconds), float)), 1)
    return float(slope)


def plot_kept_bytes(ax: Axes, frame: pd.DataFrame) -> Axes:
    """Bytes kept for backward, one horizontal bar for each option, in MiB (2^20 bytes), log scale.

    Args:
        ax: Where to draw.
        frame: Columns ``option`` and ``bytes``, top to bottom.

    Returns:
        ``ax``.

    Raises:
        InputError: For a missing column, or bytes that are not greater than 0.
    """
    require_columns([frame], ["option", "bytes"])
    if not (frame["bytes"] > 0).all():
        raise InputError("bytes", frame["bytes"].min(), "numbers greater than 0: the scale is logarithmic")
    options, mib = [str(option) for option in frame["option"]], frame["bytes"].to_numpy(float) / _MIB
    places = np.arange(len(options))
    colors = [METHOD_COLORS.get(option, NEUTRAL) for option in options]
    bars = ax.barh(places, mib, color=colors, height=0.68)
    ax.bar_label(bars, labels=[f"{value:,.3g} MiB" if value < 1000 else f"{value:,.0f} MiB" for value in mib],
                 padding=4, fontsize=9.5)  # fmt: skip
    ax.set_yticks(places, options)
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.set_xlim(mib.min() / 3, mib.max() * 12)  # room for the label of the longest bar
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    ax.grid(axis="y", visible=False)
    ax.set(xlabel="kept for backward (MiB, log scale)")
    return ax


def plot_support_mass(ax: Axes, frame: pd.DataFrame) -> Axes:
    """Probability outside the K likeliest tokens against K, a line for each tau, log-log.

    What is missing is drawn rather than what is held: 0.999 and 0.96 look alike, 0.001 and 0.04 do not. Less than one
    part in a million, which is rounding in float32, is not drawn.

    Args:
        ax: Where to draw.
        frame: Columns ``tau``, ``K``, ``mass`` (fraction held by the top K), and optionally ``n`` (positions).

    Returns:
        ``ax``.

    Raises:
        InputError: For a missing column or a mass outside 0..1.
    """
    require_columns([frame], ["tau", "K", "mass"])
    if not frame["mass"].between(0, 1).all():
        raise InputError("mass", frame["mass"].tolist(), "fractions from 0 to 1")
    taus = sorted(frame["tau"].unique())
    colors = mpl.colormaps["viridis"](np.linspace(0.0, 0.8, len(taus)))
    for tau, color, marker in zip(taus, colors, "osv^DP" * len(taus), strict=False):
        rows = frame[frame["tau"] == tau].sort_values("K")
        outside = 1 - rows["mass"]
        ax.plot(rows["K"], outside.where(outside > _SMALLEST_MASS), color=color, marker=marker, label=f"tau = {tau:g}")
    ax.axhline(1e-3, color="#555555", linewidth=1.0, linestyle=":")
    ax.annotate("claimed: less than 0.1% missing", (0.01, 1e-3), xycoords=("axes fraction", "data"),
                textcoords="offset points", xytext=(0, -5), va="top", fontsize=9, color="#555555",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1})  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    sizes = sorted(frame["K"].unique())
    ax.set_xticks(sizes, [f"{size:g}" for size in sizes])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g}%"))
    ax.set(xlabel="support size K (tokens)", ylabel="probability outside the top K")
    title = f"mean of n={int(frame['n'].min())} positions" if "n" in frame else None
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(taus), title=title)
    return ax


def plot_residual(ax: Axes, frame: pd.DataFrame) -> Axes:
    """Relative error of the replayed gradient against the number of feedback hops, log scale.

    Args:
        ax: Where to draw.
        frame: Columns ``hops``, ``error`` (relative to the unrolled gradient), ``estimator``. Repeated rows are
            averaged.

    Returns:
        ``ax``.

    Raises:
        InputError: For a missing column.
    """
    require_columns([frame], ["hops", "error", "estimator"])
    for estimator, rows in frame.groupby("estimator", sort=False):
        grouped = rows.groupby("hops")["error"]
        name, repeats = str(estimator), int(grouped.size().min())
        ax.plot(grouped.mean().index, grouped.mean(), color=METHOD_COLORS.get(name, OTHER),
                marker=METHOD_MARKERS.get(name, "o"), label=f"{name} (n={repeats})")  # fmt: skip
    ax.set_yscale("log")
    ax.set_xticks(sorted(frame["hops"].unique()))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g}%"))
    ax.set(xlabel="feedback hops", ylabel="relative error of the gradient")
    ax.legend(loc="best")
    return ax


def _by_method(runs: Mapping[str, pd.DataFrame]) -> dict[str, list[pd.DataFrame]]:
    grouped: dict[str, list[pd.DataFrame]] = {}
    for run, frame in runs.items():
        grouped.setdefault(method_of(run), []).append(frame)
    return grouped


def _curve(frames: list[pd.DataFrame], kind: str) -> tuple[pd.DataFrame, int]:
    """Mean and standard error at each evaluated step, and the smallest number of prompts behind them."""
    mean, stderr, n = f"val/{kind}_mean", f"val/{kind}_stderr", f"val/{kind}_n"
    require_columns(frames, ["step", "seconds", mean, stderr, n])
    frames = [frame.dropna(subset=[mean]).set_index("step") for frame in frames]
    if any(frame.empty for frame in frames):
        raise InputError(mean, "no value", "a history with at least one evaluation")
    count = int(min(frame[n].min() for frame in frames))
    if len(frames) == 1:
        (one,) = frames
        return pd.DataFrame({"seconds": one["seconds"], "mean": one[mean], "stderr": one[stderr]}), count
    values = pd.concat([frame[mean] for frame in frames], axis=1, join="inner")
    seconds = pd.concat([frame["seconds"] for frame in frames], axis=1, join="inner").mean(axis=1)
    return pd.DataFrame({"seconds": seconds, "mean": values.mean(axis=1), "stderr": values.sem(axis=1)}), count
