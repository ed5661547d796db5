"""Figures of Experiment 6, from its tables."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from grade.errors import InputError
from grade.plotting import SERIES, color, marker, plain_log_ticks, require_columns
from grade.stats import fitted_exponent

_SMALLEST_MASS = 1e-6
_MB = 1e6
_AXES = {"samples": "training samples (completions)", "seconds": "training time (seconds, evaluations not counted)"}


def method_of(run: str) -> str:
    """The method in a run's name, which may end in a seed.

    >>> method_of("ste_trunk-0"), method_of("gumbel")
    ('ste_trunk', 'gumbel')
    """
    head, dash, tail = run.rpartition("-")
    return head if dash and tail.isdigit() else run


def plot_reward(ax: Axes, curves: pd.DataFrame, against: str = "samples", gold: bool = True) -> Axes:
    """Held-out reward, and the gold judge's, against training samples or seconds.

    One run of a method: its mean with the standard error over prompts. Several (``ste-0``, ``ste-1``, ...): thin lines,
    and their mean with the standard error over runs, samples or seconds averaged at equal steps.
    """
    require_columns([curves], ["run", "step", against])
    gold = gold and "val/gold_mean" in curves
    kinds = [("reward", "-", "held-out reward")] + [("gold", "--", "gold judge")] * gold
    lowest = 1.0
    for kind, line, label in kinds:  # the outer loop, so that the legend has a column for each
        for method, frames in _by_method(curves).items():
            if all(frame[f"val/{kind}_mean"].isna().all() for frame in frames) and kind == "gold":
                continue
            curve, n = _curve(frames, kind, against)
            ink, mark = _look(method)
            face = ink if kind == "reward" else "white"
            many = f", {len(frames)} runs" if len(frames) > 1 else ""
            ax.plot(curve["x"], curve["mean"], line, color=ink, marker=mark,
                    markerfacecolor=face, label=f"{method}: {label} (n={n}{many})")  # fmt: skip
            low, high = curve["mean"] - curve["stderr"], curve["mean"] + curve["stderr"]
            ax.fill_between(curve["x"], low, high, color=ink, alpha=0.15, linewidth=0)
            for frame in frames if len(frames) > 1 else ():
                rows = frame.dropna(subset=[f"val/{kind}_mean"])
                ax.plot(rows[against], rows[f"val/{kind}_mean"], line, color=ink, linewidth=0.7, alpha=0.6)
            lowest = min(lowest, float(low.fillna(curve["mean"]).min()), *(f[f"val/{kind}_mean"].min() for f in frames))
    ax.set(xlabel=_AXES[against], ylabel="mean P(positive), band: ±1 standard error")
    ax.set_ylim(max(0.0, math.floor(10 * lowest) / 10), 1)
    ax.set_xlim(left=0)
    # Under the axes, where it cannot hide a curve.
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(kinds))
    return ax


def plot_training_curves(axes: Sequence[Axes], curves: pd.DataFrame) -> Sequence[Axes]:
    """Reward, KL and gradient norm of the training batches, step by step."""
    axes = np.asarray(axes, dtype=object).ravel()
    names = {"train/reward": "reward, P(positive)", "train/kl": "KL, nats per token",
             "train/grad_norm": "gradient norm before clipping"}  # fmt: skip
    if len(axes) != len(names):
        raise InputError("axes", len(axes), f"{len(names)} Axes: {', '.join(names)}")
    require_columns([curves], ["run", "step", *names])
    for ax, (column, label) in zip(axes, names.items(), strict=True):
        for method, frames in _by_method(curves).items():
            series = [frame.dropna(subset=[column]).set_index("step")[column] for frame in frames]
            mean = pd.concat(series, axis=1).mean(axis=1)
            name = f"{method} ({len(frames)} runs)" if len(frames) > 1 else method
            ink, _ = _look(method)
            ax.plot(mean.index, mean, color=ink, label=name, linewidth=1.6)
            for one in series if len(series) > 1 else ():
                ax.plot(one.index, one, color=ink, linewidth=0.6, alpha=0.5)
        ax.set(xlabel="optimizer step", ylabel=label)
    axes[2].set_yscale("log")
    plain_log_ticks(axes[2])
    axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return axes


def plot_time_against_tokens(ax: Axes, frame: pd.DataFrame) -> Axes:
    """Seconds of one gradient against completion length, log-log, with the fitted exponent in the legend.

    The exponent is the least-squares slope of ``log seconds`` on ``log T``. Repeated rows are averaged in the line.
    """
    require_columns([frame], ["engine", "T", "seconds"])
    if not (frame[["T", "seconds"]] > 0).all(axis=None):
        raise InputError("T and seconds", frame[["T", "seconds"]].min().to_dict(), "numbers greater than 0")
    for engine, rows in frame.groupby("engine", sort=False):
        mean, name = rows.groupby("T")["seconds"].mean(), str(engine)
        base = name.partition(",")[0]  # a variant of an engine has its colour, and hollow marks
        label = f"{name}: $T^{{{fitted_exponent(rows['T'], rows['seconds']):.2f}}}$" if len(mean) > 1 else name
        ax.loglog(mean.index, mean, color=color(base), marker=marker(base), label=label,
                  markerfacecolor=color(base) if base == name else "white", markersize=7)  # fmt: skip
    lengths = sorted(frame["T"].unique())
    ax.set_xticks(lengths, [f"{length:g}" for length in lengths])
    ax.xaxis.set_minor_formatter(NullFormatter())
    plain_log_ticks(ax)
    ax.set(title="At equal length, replay is the fastest engine",
           xlabel="completion length T (tokens)", ylabel="one gradient with its rollout (seconds)")  # fmt: skip
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    return ax


def plot_kept_bytes(ax: Axes, frame: pd.DataFrame) -> Axes:
    """Bytes kept for backward, one horizontal bar for each option in its engine's colour, in MB (10^6 bytes)."""
    require_columns([frame], ["option", "engine", "bytes"])
    if (frame["bytes"] < 0).any():
        raise InputError("bytes", frame["bytes"].min(), "numbers that are not negative")
    megabytes = frame["bytes"].to_numpy(float) / _MB
    places = np.arange(len(frame))
    for engine in frame["engine"].unique():
        of_engine = (frame["engine"] == engine).to_numpy()
        bars = ax.barh(places[of_engine], megabytes[of_engine], color=color(engine), height=0.68, label=engine)
        ax.bar_label(bars, labels=[_three_digits(value) for value in megabytes[of_engine]], padding=4, fontsize=9.5)
    ax.set_yticks(places, [str(option) for option in frame["option"]])
    ax.invert_yaxis()
    ax.set_xlim(0, 1.12 * megabytes.max())  # room for the label of the longest bar
    ax.grid(axis="y", visible=False)
    ax.set(title="Only checkpointing and replay keep much less", xlabel="kept for backward (MB)")
    ax.legend(loc="upper center", bbox_to_anchor=(0.4, -0.13), ncols=3, title="engine")
    return ax


def plot_support_mass(ax: Axes, frame: pd.DataFrame) -> Axes:
    """Probability outside the K likeliest tokens against K, a line for each tau, log-log.

    What is missing is drawn rather than what is held: 0.999 and 0.96 look alike, 0.001 and 0.04 do not. Less than one
    part in a million, which is rounding in float32, is not drawn.
    """
    require_columns([frame], ["tau", "K", "mass"])
    if not frame["mass"].between(0, 1).all():
        raise InputError("mass", frame["mass"].tolist(), "fractions from 0 to 1")
    taus = sorted(frame["tau"].unique())
    for i, tau in enumerate(taus):
        rows = frame[frame["tau"] == tau].sort_values("K")
        outside = 1 - rows["mass"]
        ax.plot(rows["K"], outside.where(outside > _SMALLEST_MASS), color=SERIES[i % len(SERIES)],
                marker="osv^DP"[i % 6], label=f"tau = {tau:g}")  # fmt: skip
    ax.axhline(1e-3, color=color("text"), linewidth=1.0, linestyle=":")
    ax.annotate("claimed: less than 0.1 % outside", (0.01, 1e-3), xycoords=("axes fraction", "data"),
                textcoords="offset points", xytext=(0, -5), va="top", fontsize=9, color=color("text"),
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1})  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    sizes = sorted(frame["K"].unique())
    ax.set_xticks(sizes, [f"{size:g}" for size in sizes])
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g} %"))
    ax.set(title="At tau 1 the top 256 tokens leave out far over 0.1 %",
           xlabel="support size K (tokens)", ylabel="probability outside the top K")  # fmt: skip
    title = f"mean of n={int(frame['n'].min())} positions" if "n" in frame else None
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=len(taus), title=title)
    return ax


def plot_hops(axes: Sequence[Axes], frame: pd.DataFrame) -> Sequence[Axes]:
    """Relative error of the replayed gradient against the number of feedback hops, log scale, a panel per policy."""
    require_columns([frame], ["policy", "estimator", "hops", "error"])
    axes = np.asarray(axes, dtype=object).ravel()
    for ax, (policy, of_policy) in zip(axes, frame.groupby("policy", sort=False), strict=True):
        for estimator, rows in of_policy.groupby("estimator", sort=False):
            name = str(estimator)
            ax.plot(rows["hops"], rows["error"], color=color(name), marker=marker(name), label=name)
        ax.set_yscale("log")
        ax.set_xticks(sorted(of_policy["hops"].unique()))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g} %"))
        ax.set(title=f"{policy} policy", xlabel="feedback hops")
    axes[0].set_ylabel("relative error of the gradient")
    axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6)
    return axes


def _look(method: str) -> tuple[str, str]:
    """Colour and mark of a method; a run may also have a name of the user's own."""
    try:
        return color(method), marker(method)
    except InputError:
        return color("neutral"), "o"


def _three_digits(value: float) -> str:
    return f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _by_method(curves: pd.DataFrame) -> dict[str, list[pd.DataFrame]]:
    grouped: dict[str, list[pd.DataFrame]] = {}
    for run, frame in curves.groupby("run", sort=False):
        grouped.setdefault(method_of(str(run)), []).append(frame)
    return grouped


def _curve(frames: list[pd.DataFrame], kind: str, against: str) -> tuple[pd.DataFrame, int]:
    """Columns x, mean and stderr at each evaluated step, and the smallest number of prompts behind them."""
    mean, stderr, n = f"val/{kind}_mean", f"val/{kind}_stderr", f"val/{kind}_n"
    require_columns(frames, ["step", against, mean, stderr, n])
    frames = [frame.dropna(subset=[mean]).set_index("step") for frame in frames]
    if any(frame.empty for frame in frames):
        raise InputError(mean, "no value", "a history with at least one evaluation")
    count = int(min(frame[n].min() for frame in frames))
    if len(frames) == 1:
        (one,) = frames
        return pd.DataFrame({"x": one[against], "mean": one[mean], "stderr": one[stderr]}), count
    values = pd.concat([frame[mean] for frame in frames], axis=1, join="inner")
    x = pd.concat([frame[against] for frame in frames], axis=1, join="inner").mean(axis=1)
    return pd.DataFrame({"x": x, "mean": values.mean(axis=1), "stderr": values.sem(axis=1)}), count
