"""Document 004: what Intuitor's reward costs beside PPO, and what the document's formula measures.

Memory is traced on the step that computes it (`grade.experiments.traced`); self-certainty is measured on real text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd
import torch
from torch import Tensor

from grade.experiments.formulas import adamw_bytes, checkpoint_bytes, parameter_count, rows_bytes, weights_bytes
from grade.experiments.traced import PolicyStepConfig, zero3_share
from grade.memory.plan import plan, remembering
from grade.memory.shapes import ModelShape
from grade.memory.trace import Trace, trace, trace_all
from grade.models.backbone import Backbone
from grade.models.head import certainty_of_logits, self_certainty
from grade.models.prompts import PromptBatch
from grade.models.sampling import generate
from grade.models.scoring import completion_certainty, predicting_hidden

STATED_GB = {2048: (8, 160), 4096: (13, 320), 6144: (18, 480), 8192: (23, 640)}
"""The document's scaling table: tokens to GB of PPO and of Intuitor."""

SETTINGS = {"conservative": (8, 0), "aggressive": (32, 1)}
"""The document's settings for eight GPUs: sequences per GPU, and which of two response lengths."""


def memory_table(shape: ModelShape, batch: int, length: int) -> pd.DataFrame:
    """The document's table, row by row: the stated size and what the same formula gives.

    Columns row, stated_gb, by_formula_gb, formula.
    """
    params = parameter_count(shape)
    every = rows_bytes(batch, length, shape.vocab)  # float32
    checkpoints = checkpoint_bytes(shape, batch, length)
    rows = [
        ("model parameters", 3, weights_bytes(shape), "bfloat16"),
        ("model activations", 1.2, checkpoints, f"inputs of all {shape.layers} layers, bfloat16"),
        ("log-probabilities", 0.0008, rows_bytes(batch, length, 1), "[B, T] float32"),
        ("gradients", 3, weights_bytes(shape), "bfloat16"),
        ("optimizer", 6, adamw_bytes(params), "two float32 moments"),
        ("full logits", 234, every, "[B, P + T, V] float32, all at once"),
        ("gradients of the logits", 234, 0, "none: self-certainty has no gradient"),
        ("self-certainty", 0.0046, rows_bytes(batch, length, 1), "[B, T] float32"),
    ]
    table = pd.DataFrame(rows, columns=["row", "stated_gb", "by_formula_gb", "formula"])
    return table.assign(by_formula_gb=table.by_formula_gb / 1e9)


def update_configs(model: str, length: int, dtype: str = "bfloat16") -> dict[str, PolicyStepConfig]:
    """PPO's and Intuitor's updates, with dense and with chunked logits, one sequence per microbatch.

    Configurations by the name of the step.
    """
    steps = {
        "PPO, dense logits": dict(logits="all"),
        "Intuitor, dense logits": dict(logits="all", self_certainty=True),
        "PPO, logits in chunks": dict(logits="chunked"),
        "Intuitor, logits in chunks": dict(logits="chunked", self_certainty=True),
    }
    prompt = length // 3
    return {step: full_update(model, prompt, length - prompt, dtype=dtype, **options)
            for step, options in steps.items()}  # fmt: skip


def length_traces(
    model: str, lengths: Sequence[int], gpus: int = 8, processes: int = 1
) -> dict[tuple[int, str], Trace]:  # fmt: skip
    """Traces of `update_configs` at several lengths, on one of the GPUs."""
    configs = {(n, step): config for n in lengths for step, config in update_configs(model, n).items()}
    return {key: zero3_share(whole, configs[key], gpus) for key, whole in trace_all(configs, processes).items()}


def length_table(traces: Mapping[tuple[int, str], Trace]) -> pd.DataFrame:
    """Peaks by length and step.

    Columns tokens, step, peak_gb (decimal GB), peak_phase.
    """
    rows = [dict(tokens=length, step=step, peak_gb=t.peak / 1e9, peak_phase=t.peak_phase)
            for (length, step), t in traces.items()]  # fmt: skip
    return pd.DataFrame(rows)


def full_update(model: str, prompt: int, new: int, batch_size: int = 1, **options) -> PolicyStepConfig:
    """The document's update: all weights trained, a reference copy, layers checkpointed."""
    fixed = dict(adapter="full", base_copies=2, gradient_checkpointing=True)
    values = dict(model=model, prompt_tokens=prompt, max_new_tokens=new, batch_size=batch_size)
    return PolicyStepConfig(**fixed | values | options)


@torch.no_grad()
def certainty_samples(
    backbone: Backbone, prompts: PromptBatch, new: int, group: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sample ``group`` completions of each prompt, and compute their logits.

    Hidden states [N, T, D], logits [N, T, V] in float32, mask [N, T] and each sample's prompt [N], N = B G.
    """
    index, many = torch.arange(len(prompts)).repeat_interleave(group), prompts.repeat(group)
    generator = torch.Generator(backbone.device).manual_seed(seed)
    ids, mask = generate(backbone, many, new, generator, min_new_tokens=min(4, new))
    hidden = predicting_hidden(backbone, many, ids)
    return hidden, backbone.head(hidden), mask, index


def certainty_figures(
    backbone: Backbone, hidden: Tensor, logits: Tensor, mask: Tensor, group_of: Tensor, chunk: int = 1024
) -> tuple[dict[str, float], pd.DataFrame]:
    """Self-certainty beside the document's formula, and its error in narrow types.

    Figures in nats, and a table with one row per completion: group (its prompt's number), self_certainty, document
    (the document's score). ``document_offset`` is the mean absolute difference per token between the document's
    formula and ``logsumexp - mean``, which it is meant to compute.
    """
    right = self_certainty(backbone.head, hidden.flatten(0, 1)).view(mask.shape)
    exact = certainty_of_logits(logits.double())
    wrong = chunked_over_vocabulary(logits, min(chunk, logits.shape[-1] // 2))
    low = certainty_of_logits(logits.bfloat16())
    scores = pd.DataFrame({
        "group": group_of.tolist(), "self_certainty": completion_certainty(right, mask).tolist(),
        "document": completion_certainty(wrong, mask).tolist(),
        "half": completion_certainty(right, mask).half().double().tolist(),
    })  # fmt: skip
    kept = mask.bool()
    tokens = torch.stack([right[kept].double(), wrong[kept].double()])
    centred = scores - scores.groupby("group").transform("mean").reindex(columns=scores.columns, fill_value=0)
    spread = scores.groupby("group").self_certainty.std().mean()
    figures = {
        "chunked_max_abs_error": float((right - exact)[kept].abs().max()),
        "bfloat16_max_abs_error": float((low.double() - exact)[kept].abs().max()),
        "half_max_abs_error": float((scores["half"] - scores.self_certainty).abs().max()),
        "mean": float(scores.self_certainty.mean()),
        "within_group_sd": float(spread),
        "document_mean": float(scores.document.mean()),
        "document_offset": float((wrong - right - math.log(logits.shape[-1]))[kept].abs().mean()),
        "document_correlation_tokens": float(torch.corrcoef(tokens)[0, 1]),
        "document_correlation_in_group": float(centred.self_certainty.corr(centred.document)),
        "completions": len(scores),
        "tokens": int(kept.sum()),
    }
    return figures, scores.drop(columns="half")


def peak_sweep(vocab: int, peaks: Sequence[float], chunk: int = 1024, seed: int = 0) -> pd.DataFrame:
    """Random logits N(0, 2^2), one of which is raised to each of ``peaks``, and how each formula scores them.

    Columns peak, published (``logsumexp - mean``: self-certainty plus log V), document (the mean of that over
    chunks).
    """
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(vocab, generator=generator, dtype=torch.float64) * 2
    rows = []
    for value in peaks:
        logits = base.clone()
        logits[vocab // 2] = value
        published, document = certainty_of_logits(logits) + math.log(vocab), chunked_over_vocabulary(logits, chunk)
        rows.append(dict(peak=value, published=float(published), document=float(document)))
    return pd.DataFrame(rows)


def settings_fit(model: str, prompt: int, responses: tuple[int, int], gpus: int, budget: int) -> pd.DataFrame:
    """How many sequences fit a GPU at once in each of the document's settings, with dense and with chunked logits.

    Columns setting, logits, needed (sequences of a GPU without microbatches), fits (at most ``needed``), peak_gb.
    """

    @remembering
    def share(config: PolicyStepConfig) -> Trace:
        return zero3_share(trace(config), config, gpus)

    rows = []
    for setting, (needed, which) in SETTINGS.items():
        for logits in ("dense", "chunked"):
            kind = "all" if logits == "dense" else logits
            config = full_update(model, prompt, responses[which], logits=kind, self_certainty=True)
            (fit,) = plan(config, budget, quantities=("batch_size",), tracer=share, most=needed)
            rows.append(
                dict(setting=setting, logits=logits, needed=needed, fits=fit.value or 0, peak_gb=fit.peak / 1e9)
            )
    return pd.DataFrame(rows)


def chunked_over_vocabulary(logits: Tensor, chunk_size: int = 1024) -> Tensor:
    """Document 004's proposal: the mean over vocabulary chunks of each chunk's ``logsumexp - mean``.

    This is not self-certainty: ``logsumexp`` of the whole is at least the mean of the chunks' plus the log of their
    number (Jensen), and a confident token moves only its own chunk. It is here to be compared with the right value.
    """
    return torch.stack([c.logsumexp(-1) - c.mean(-1) for c in logits.split(chunk_size, -1)], -1).mean(-1)
