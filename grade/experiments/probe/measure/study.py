"""The entropy probe on a real policy: predicted against true change over step sizes and over training steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pandas as pd
import torch

from grade.entropy.change import prefix_change
from grade.entropy.probe import EntropyProbe, ProbeReport
from grade.entropy.run import ProbeRunConfig, make_optimizer
from grade.entropy.samples import Samples, directional, scores_at
from grade.errors import InputError
from grade.gradients.objective import Objective
from grade.models.backbone import Backbone
from grade.models.prompts import decode, encode_prompts
from grade.stats import Estimate
from grade.training.folder import OPTIMIZER_FILE
from grade.training.toy import toy_task


def checkpoints(run_dir: str | Path) -> dict[int, Path | None]:
    """The adapters of a run by training step: none (a new one) at step 0, its checkpoints, the trained one."""
    run = Path(run_dir)
    if not (run / "adapter" / OPTIMIZER_FILE).is_file():
        raise InputError("run_dir", str(run_dir), f"a run with adapter/{OPTIMIZER_FILE}, as written by training")
    adapters: dict[int, Path | None] = {0: None}
    adapters |= {int(folder.name.removeprefix("step-")): folder for folder in (run / "checkpoints").glob("step-*")}
    state = torch.load(run / "adapter" / OPTIMIZER_FILE, weights_only=True)["state"]
    adapters[int(state[0]["step"])] = run / "adapter"
    return dict(sorted(adapters.items()))


def toy_report(config: ProbeRunConfig, dtype: str = "float32") -> tuple[ProbeReport, Backbone]:
    """A probe of the toy task, when there is no trained run."""
    task = toy_task(dtype=dtype)
    optimizer = make_optimizer(config, task.backbone, None)
    prompts = encode_prompts(task.backbone.tokenizer, task.validation_prompts[: 2 * config.batch_config.B], 8)
    probe = EntropyProbe(task.backbone, optimizer, config, allow_fresh=True)
    report = probe.run(prompts, partial(Objective(task.reward_model).score, task.backbone))
    return report, task.backbone


def sweep_table(reports: dict[int, ProbeReport], learning_rate: float) -> pd.DataFrame:
    """Every step size of every report.

    Columns ``step``, ``learning_rate`` and those of `ProbeReport.sweep`.
    """
    rows = [{"step": step, "learning_rate": learning_rate * row["multiple"], **row}
            for step, report in reports.items() for row in report.sweep]  # fmt: skip
    return pd.DataFrame(rows)


def parts_tables(reports: dict[int, ProbeReport]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Every report's predicted change by layer and by completion.

    Two frames. Columns step, layer (-1: modules outside the layers), part in nats, which sum to the prediction of
    each step; and step, prompt, completion (their numbers), part in nats, whose mean is the prediction.
    """
    layers = [{"step": step, "layer": layer, "part": part}
              for step, report in reports.items() for layer, part in report.layers().items()]  # fmt: skip
    sequences = [{"step": step, "prompt": n, "completion": g, "part": part}
                 for step, report in reports.items()
                 for n, row in enumerate(report.sequences.tolist()) for g, part in enumerate(row)]  # fmt: skip
    return pd.DataFrame(layers), pd.DataFrame(sequences)


def extremes_table(report: ProbeReport, policy: Backbone) -> pd.DataFrame:
    """The text of the two completions with the lowest parts and of the two with the highest.

    Columns part (nats), prompt, completion, in the order of the parts.
    """
    parts, samples = report.sequences.flatten(), report.samples
    rows = []
    for i in parts.argsort()[[0, 1, -2, -1]].tolist():
        n, g = divmod(i, samples.ids.shape[1])
        rows.append({
            "part": float(parts[i]),
            "prompt": decode(policy.tokenizer, samples.prompts.ids[n], samples.prompts.mask[n]),
            "completion": decode(policy.tokenizer, samples.ids[n, g], samples.mask[n, g]),
        })  # fmt: skip
    return pd.DataFrame(rows)


def precision_table(
    policies: dict[str, Backbone], samples: Samples, step: torch.Tensor, multiples: Sequence[float]
) -> pd.DataFrame:
    """True and predicted change of entropy by the same step on the same samples, with the base in several types.

    Columns dtype, multiple, predicted, delta_h, delta_h_stderr.
    """
    predicted = float(directional(next(iter(policies.values())), samples, step).per_sequence().mean())
    rows = []
    for name, policy in policies.items():
        old = scores_at(policy, samples)
        for multiple in multiples:
            new = scores_at(policy, samples, step, multiple)
            change = Estimate.of(prefix_change(old.logps, new.logps, old.entropies, new.entropies).mean(1))
            rows.append({"dtype": name, "multiple": multiple, "predicted": multiple * predicted,
                         "delta_h": change.mean, "delta_h_stderr": change.stderr})  # fmt: skip
    return pd.DataFrame(rows)
