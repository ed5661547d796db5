"""A profile's results on one page: ``README.md`` in its folder of results, generated from the metrics.

Every figure is read from a ``metrics.json``; a table whose file is missing is left out. Figures of seconds stand below
``timings``, and not here, so that the page stays the same when results are made again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from grade.experiments.claims import Claim, read_claims, verdict_counts
from grade.results import read_metrics

Metrics = Mapping[str, float]


@dataclass(frozen=True)
class Row:
    """One figure of a table.

    Attributes:
        label: What it is, with its unit.
        key: Its name in the metrics.
        stderr: Name of its standard error; default: the key with ``_stderr``, where the metrics have that.
    """

    label: str
    key: str
    stderr: str = ""


@dataclass(frozen=True)
class Section:
    """A table.

    Attributes:
        title: Its heading.
        folder: Folder of its ``metrics.json``, and of the executed notebook if there is one.
        text: What a reader needs to know first.
        rows: Its figures.
    """

    title: str
    folder: str
    text: str
    rows: tuple[Row, ...]


def _training(run: str, reward: str) -> tuple[Row, ...]:
    key = f"train/{run}"
    return (
        Row(f"{run}, reward `{reward}`: held-out reward before", f"{key}/val_reward_before"),
        Row("… after, ± of the paired difference", f"{key}/val_reward_after", f"{key}/val_reward_stderr"),
        Row("… gold judge before", f"{key}/gold_before"),
        Row("… gold judge after, ± of the paired difference", f"{key}/gold_after", f"{key}/gold_stderr"),
        Row("… KL to the reference, nats a token", f"{key}/kl"),
        Row("… training samples", f"{key}/samples"),
    )


def _probe(step: int) -> tuple[Row, ...]:
    first, key = f"study/step{step}/x0.1", f"study/step{step}"
    return (
        Row(
            f"training step {step}, learning rate 2e-4: predicted change, nats a completion",
            f"{first}/delta_h1_forward",
        ),
        Row("… true change, weights of prefixes", f"{first}/delta_h_prefix"),
        Row("… true change, self-normalised weights of completions", f"{first}/delta_h"),
        *(
            Row(
                f"… predicted over true change (prefixes), minus 1, at learning rate {rate}",
                f"{key}/x{x}/linearity_error",
            )
            for x, rate in (("0.01", "2e-5"), ("0.1", "2e-4"), ("0.3", "6e-4"), ("1", "2e-3"))
        ),
        Row("… effective share of the samples at learning rate 2e-3", f"{key}/x1/ess_share"),
    )


_PEERS = (
    Row("end reward, TRL's GRPO", "peer/end_reward/trl_grpo"),
    Row("… at a KL, nats a completion, of", "peer/end_kl/trl_grpo"),
    Row("end reward, our `grpo`", "peer/end_reward/grpo"),
    Row("… at a KL of", "peer/end_kl/grpo"),
    Row("end reward, `ste`", "peer/end_reward/ste"),
    Row("… at a KL of", "peer/end_kl/ste"),
)


def _any_reward(subject: str, label: str) -> tuple[Row, ...]:
    return (
        Row(f"{label}: `auto` minus `rloo`, reward at equal KL", f"paired/{subject}/auto_minus_rloo"),
        Row("… samples to `rloo`'s final reward over those to its first crossing", f"samples_over_rloo/{subject}"),
        Row("… over those of its whole run", f"samples_over_rloo/{subject}_of_run"),
    )


SECTIONS = (
    Section("Experiment 6: one gradient, three engines", "exp6",
            "The engines on SmolLM2-135M in float32. Times are in `exp6/timings`.", (
        *_training("ste", "bag"), *_training("gumbel", "bag"), *_training("ste_trunk", "trunk"),
        Row("replay with 2 hops against the unrolled graph, relative gradient error", "parity/replay_rel_error_ste"),
        Row("optimised against legacy, same noise: reward, largest difference of a step", "parity/reward_max_abs_diff"),
        Row("… KL", "parity/kl_max_abs_diff"),
        Row("KL of the untrained policy, largest at any position, any method", "parity/kl_at_init_max"),
        Row("… as the original measured it, one position late", "parity/kl_at_init_misaligned"),
        Row("reward embedding, bytes kept: bagged / gathered", "memory/reward_bag_over_gather"),
        Row("probability of the top 256 tokens at tau 1, real text", "support/top256_mass_tau1"),
        Row("… at tau 2", "support/top256_mass_tau2"),
    )),
    Section("Experiment 4: a step of Qwen3-4B", "exp4", "Traced, without a GPU.", (
        Row("the document's start (three float32 copies, B=4, P=32, T=48): peak, GiB", "exp4/legacy_fp32_peak_gib"),
        Row("… bfloat16, B=2, T=32", "exp4/bf16_peak_gib"),
        Row("… and layers checkpointed", "exp4/bf16_checkpointed_peak_gib"),
        Row("… autocast on the float32 start", "exp4/autocast_peak_gib"),
        Row("this project's step, B=2, P=32, T=32: peak, GiB", "exp4/replay_peak_gib"),
        Row("… of which the step itself", "exp4/replay_step_gib"),
        Row("operations, TFLOP: the document's step, checkpointed", "exp4/bf16_checkpointed_tflop"),
        Row("… this project's", "exp4/replay_tflop"),
    )),
    Section("The tracer against real steps", "memory", "Tracked on a CPU; no GPU has been used.", (
        Row("traced against tracked peak, largest relative error", "cpu/max_rel_error"),
        Row("… steps compared", "cpu/steps"),
    )),
    Section("Activation caching", "caching", "Qwen2.5-Coder-3B, B=2, 512 tokens, traced.", (
        Row("kept by a pass with gradient, GB", "caching/forward_kept_gb"),
        Row("… the whole step with layers checkpointed, GB", "caching/traced_hybrid_step_gb"),
        Row("… a stored reference log-probability, bytes a sample", "caching/stored_bytes_per_sample"),
    )),
    Section("Intuitor", "intuitor", "Qwen2.5-1.5B, 6K tokens, one of 8 GPUs, traced.", (
        Row("Intuitor's update, dense logits, GB", "intuitor/peak_gb_6144_intuitor_dense_logits"),
        Row("… PPO's", "intuitor/peak_gb_6144_ppo_dense_logits"),
        Row("… Intuitor's with logits in chunks", "intuitor/peak_gb_6144_intuitor_logits_in_chunks"),
    )),
    Section("The entropy probe", "probe",
            "One AdamW step from Experiment 6's `ste` run. Prediction and truth by prefixes share their noise, so "
            "their ratio is known well where neither is.", (
        Row("gradient, Qwen2.5-1.5B, B=8, G=8: memory of the step, one graph / streamed", "probe/whole_over_streamed"),
        Row("… streamed, B=8, G=8 / B=2, G=2", "probe/large_over_small"),
        *_probe(0), *_probe(8),
        Row("share of comparisons in which predicted and true change have the same sign", "study/sign_agrees_all"),
    )),
    Section("The entropy probe against enumeration", "validation", "A tiny policy, every completion.", (
        Row("slope of the prediction against the true change", "validation/slope_forward"),
        Row("coverage of 95 % jackknife intervals, B = 8", "validation/coverage_jackknife_b8"),
        Row("… plug-in intervals, B = 8", "validation/coverage_plug_in_b8"),
        Row("largest bias of importance sampling, standard errors", "validation/importance_bias_over_stderr_max"),
    )),
    Section("Gradient estimators", "estimators", "Enumerated, and on SmolLM2.", (
        Row("worst bias of reinforce, rloo, remax and grpo, in standard errors", "bias/unbiased_worst_in_stderr"),
        Row("squared error of gumbel_rao (8 draws) over ste's, `bag`", "mse/gumbel_rao_over_ste"),
    )),
    Section("Any reward, distilled", "any_reward", "All intervals: its notebook.", (
        Row("bias of the corrected form, enumerated, worst in standard errors", "bias/corrected_worst_in_stderr"),
        Row("`rloo` samples that one plug-in sample replaces, `trunk`, fitted on 256", "worth/tiny_trunk/plugin_256"),
        Row("… in a batch of 64", "worth_at_64/tiny_trunk/plugin_256"),
        *_any_reward("tiny_gold", "tiny model, gold judge"), *_any_reward("tiny_trunk", "tiny model, `trunk`"),
    )),
    Section("Beyond one GPU and one engine", "scale", "Two processes on a CPU, and traces of Qwen3-4B.", (
        Row("FSDP2, two processes against one: largest relative difference of an adapter", "fsdp2/max_rel_diff"),
        Row("… methods", "fsdp2/methods"), Row("… share of the base that each holds", "fsdp2/held_share"),
        Row("… traced against tracked peak, largest relative error", "fsdp2/trace_rel_error"),
        Row("peak of one GPU, B=8, P=32, T=64, GiB", "gpus/fsdp2_1/peak_gib"),
        Row("… of each of eight that divide the base", "gpus/fsdp2_8/peak_gib"),
        Row("the lean step over its weights, B=2, P=T=32, GiB", "lean/step_gib"),
        Row("other samplers, chi-square of one position: smallest p", "sampler/chi2_p"),
    )),
    Section("TRL's GRPO beside ours, tiny model", "peers", "One run each.", _PEERS),
    Section("TRL's GRPO beside ours, SmolLM2", "peers_larger", "One run each.", _PEERS),
)  # fmt: skip


def report(outputs: str | Path, profile: str, notebooks: Mapping[str, str]) -> str:
    """The page.

    Args:
        outputs: The profile's folder of results.
        profile: Its name.
        notebooks: Keys of the experiments (folders) and the names of their notebooks.

    Returns:
        Markdown.
    """
    outputs = Path(outputs)
    links = [*_notebook_links(outputs, notebooks)]
    parts = [
        f"# Results of profile `{profile}`",
        "Generated from the metrics by the pipeline's last stage. ± is a standard error; *of the "
        "paired difference*: over prompts, before against after. Folders called `timings` hold "
        "seconds, memory of the process, versions and commits.",
        "\n".join(["Executed notebooks:", "", *links]) if links else "",
        _claims(outputs, notebooks),
    ]
    parts += [_table(outputs, section) for section in SECTIONS]
    parts += [_methods(outputs, key) for key, notebook in notebooks.items() if notebook == "compare"]
    parts += [_worth(outputs, key) for key, notebook in notebooks.items() if notebook == "estimators"]
    return "\n\n".join(part for part in parts if part) + "\n"


def join_claims(outputs: str | Path, notebooks: Mapping[str, str]) -> list[Claim]:
    """The verdicts of a profile's experiments, by document.

    Args:
        outputs: The profile's folder of results.
        notebooks: Keys of the experiments (folders) and the names of their notebooks. Of a notebook that runs in
            several settings the one with its own name counts: one verdict for each claim.

    Returns:
        The claims.
    """
    files = [Path(outputs) / key / "claims.csv" for key, notebook in notebooks.items() if key == notebook]
    return sorted((c for file in files if file.is_file() for c in read_claims(file)), key=lambda claim: claim.seed)


def _notebook_links(outputs: Path, notebooks: Mapping[str, str]) -> Iterable[str]:
    for key, notebook in {"tutorial": "tutorial", "your_own_task": "your_own_task", **notebooks}.items():
        if (outputs / key / f"{notebook}.ipynb").is_file():
            yield f"- [{key}]({key}/{notebook}.ipynb)"


def _claims(outputs: Path, notebooks: Mapping[str, str]) -> str:
    claims = join_claims(outputs, notebooks)
    if not claims:
        return ""
    return "## The documents' claims\n\nEvery claim with its figure: [claims.md](claims.md).\n\n" + verdict_counts(
        claims
    )


def _table(outputs: Path, section: Section) -> str:
    path = outputs / section.folder / "metrics.json"
    metrics = read_metrics(path) if path.is_file() else {}
    rows = [
        f"| {row.label} | {_value(metrics, row.key, row.stderr)} | `{row.key}` |"
        for row in section.rows
        if metrics.get(row.key) is not None
    ]
    head = f"## {section.title}\n\n{section.text}\n\n| figure | value | key in `{section.folder}/metrics.json` |"
    return "\n".join([head, "|---|---|---|", *rows]) if rows else ""


def _methods(outputs: Path, key: str) -> str:
    """Gain and reward at equal KL of every method of a comparison."""
    path = outputs / key / "metrics.json"
    metrics = read_metrics(path) if path.is_file() else {}
    methods = [
        name.split("/")[1] for name in metrics if re.fullmatch(r"gain/\w+", name) and f"{name}_stderr" in metrics
    ]
    levels = sorted({int(found[1]) for name in metrics if (found := re.fullmatch(r"frontier/\w+/kl(\d+)", name))})
    if not methods:
        return ""
    names = ["gain/{}", "gold_gain/{}", *(f"frontier/{{}}/kl{level}" for level in levels)]
    columns = ["method", "gain", "gold gain", *(f"reward at KL {level}" for level in levels)]
    rows = [
        "| " + " | ".join([f"`{method}`", *(_value(metrics, name.format(method)) for name in names)]) + " |"
        for method in methods
    ]
    text = (
        "Gains over the untrained policy; rewards at a KL, nats a completion, are of the best mixture of two policies."
    )
    return "\n".join(
        [f"## Methods side by side: {key}", "", text, "", _line(columns), _line(["---"] * len(columns)), *rows]
    )


def _worth(outputs: Path, key: str) -> str:
    """How many rloo samples one ste sample is worth, by reward."""
    path = outputs / key / "metrics.json"
    metrics = read_metrics(path) if path.is_file() else {}
    names = [name for name in metrics if re.fullmatch(r"(after/)?worth/\w+", name) and f"{name}_low" in metrics]
    if not names:
        return ""
    rows = [
        f"| {name} | {metrics[name]:.3g} | {metrics[f'{name}_low']:.3g} to {metrics[f'{name}_high']:.3g} |"
        for name in names
    ]
    text = "The `rloo` samples that one `ste` sample replaces, with a 95 % interval; `after`: of the trained policy."
    return "\n".join([f"## Worth of a sample: {key}", "", text, "", _line(["reward", "worth", "interval"]),
                      _line(["---"] * 3), *rows])  # fmt: skip


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _value(metrics: Metrics, key: str, stderr: str = "") -> str:
    value, error = metrics.get(key), metrics.get(stderr or f"{key}_stderr")
    if value is None:
        return "not reached"
    text = str(value) if isinstance(value, int) else f"{value:.3g}"
    return text if error is None else f"{text} ± {error:.2g}"
