"""The tables of the experiment on Intuitor: what its reward costs beside PPO, and what document 004's formula measures.

Memory is traced on the step that computes it (`grade.experiments.traced`); self-certainty is measured on real text.
"""

import math
from functools import cached_property

import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from grade.config import Config
from grade.experiments.formulas import parameter_count, rows_bytes
from grade.experiments.measured import Several, Size
from grade.experiments.setting import load_policy, text_sequences
from grade.experiments.traced import PolicyStepConfig, shape_of, zero3_share
from grade.memory.plan import largest_batch
from grade.memory.tables import categories_table, timelines_table
from grade.memory.trace import Trace, trace
from grade.models.backbone import Backbone
from grade.models.head import certainty_of_logits, self_certainty
from grade.models.prompts import PromptBatch
from grade.models.sampling import generate
from grade.models.scoring import completion_certainty, predicting_hidden

STATED_GB = {2048: (8, 160), 4096: (13, 320), 6144: (18, 480), 8192: (23, 640)}
"""The document's scaling table: tokens to GB of PPO and of Intuitor."""

SETTINGS = {"conservative": (8, 0), "aggressive": (32, 1)}
"""The document's settings for eight GPUs: sequences per GPU, and which of two response lengths."""
_STEPS = {
    "PPO, dense logits": dict(logits="all"),
    "Intuitor, dense logits": dict(logits="all", self_certainty=True),
    "PPO, logits in chunks": dict(logits="chunked"),
    "Intuitor, logits in chunks": dict(logits="chunked", self_certainty=True),
}
"""The updates that are traced: PPO's and Intuitor's, one sequence per microbatch."""
_PEAKS = (5, 10, 15, 20, 25, 30, 35)
"""Heights of the one logit that is raised."""
GPUS = 8
"""GPUs that divide weights, gradients and optimizer in the document."""
BUDGET = 80_000_000_000
"""Bytes of memory of each."""


class Settings(Config):
    """Sizes of the experiment on Intuitor."""

    model: str = "tiny"  # shape of the traced model; the document's is qwen2.5-1.5b
    table_batch: Size = 4  # sequences of the document's table, 64
    table_tokens: Size = 192  # tokens of each, 6K
    lengths: list[Several] = Field([96], min_length=1)  # tokens of a sequence in the traced updates, 2K to 8K
    settings_prompt_tokens: Size = 8  # P of the recommended settings, 2K
    # T of the conservative and of the aggressive one, 1K and 2K
    settings_new_tokens: list[Size] = Field([1, 2], min_length=2, max_length=2)
    backbone_dir: str = ""  # folder of the model that writes; empty: a tiny random one
    reviews_dir: str = ""  # folder of the review splits
    measured_prompts: Size = 4  # B of the prompts that are continued
    measured_prompt_tokens: Size = 4  # P
    measured_new_tokens: Size = 6  # T
    group: Several = 4  # completions of each prompt, G
    chunk: Size = 16  # vocabulary chunk of the document's formula, 1024
    sweep_vocab: Several = 512  # V of the sweep

    def update(self, prompt: int, new: int, **options) -> PolicyStepConfig:
        """The document's update: all weights trained, a reference copy, layers checkpointed."""
        return PolicyStepConfig(
            model=self.model, prompt_tokens=prompt, max_new_tokens=new, batch_size=1, adapter="full", base_copies=2,
            gradient_checkpointing=True, **options,
        )  # fmt: skip

    @cached_property
    def configs(self) -> dict[tuple[int, str], PolicyStepConfig]:
        """Updates by length and step."""
        return {(n, step): self.update(n // 3, n - n // 3, **options) for n in self.lengths
                for step, options in _STEPS.items()}  # fmt: skip

    @cached_property
    def traces(self) -> dict[tuple[int, str], Trace]:
        """One GPU's share of each update."""
        return {key: zero3_share(trace(config), config, GPUS) for key, config in self.configs.items()}

    @cached_property
    def certainties(self) -> tuple[dict[str, float], pd.DataFrame]:
        """Figures of the scores, and the scores."""
        backbone, texts = load_policy(self.backbone_dir, "", self.reviews_dir)
        prompts, _ = text_sequences(backbone, texts, self.measured_prompts, self.measured_prompt_tokens, 1)
        return _certainties(self, backbone, prompts)


def _formulas(s: Settings) -> pd.DataFrame:
    """The document's table, row by row: the stated size and what the same formula gives."""
    shape, batch, length = shape_of(s.model), s.table_batch, s.table_tokens
    weights = 2 * parameter_count(shape)  # bfloat16
    rows = [
        ("model parameters", 3, weights, "bfloat16"),
        ("model activations", 1.2, shape.layers * rows_bytes(batch, length, shape.hidden, 2),
         f"inputs of all {shape.layers} layers, bfloat16"),
        ("log-probabilities", 0.0008, rows_bytes(batch, length, 1), "[B, T] float32"),
        ("gradients", 3, weights, "bfloat16"),
        ("optimizer", 6, 4 * weights, "two float32 moments"),
        ("full logits", 234, rows_bytes(batch, length, shape.vocab), "[B, P + T, V] float32, all at once"),
        ("gradients of the logits", 234, 0, "none: self-certainty has no gradient"),
        ("self-certainty", 0.0046, rows_bytes(batch, length, 1), "[B, T] float32"),
    ]  # fmt: skip
    table = pd.DataFrame(rows, columns=["row", "stated_gb", "by_formula_gb", "formula"])
    return table.assign(by_formula_gb=table.by_formula_gb / 1e9)


@torch.no_grad()
def _certainties(s: Settings, backbone: Backbone, prompts: PromptBatch) -> tuple[dict[str, float], pd.DataFrame]:
    """Figures in nats of sampled completions' self-certainty beside the document's formula, and both by completion.

    ``document_offset`` is the mean absolute difference per token between the document's formula and ``logsumexp -
    mean``, which it is meant to compute.
    """
    index, many = torch.arange(len(prompts)).repeat_interleave(s.group), prompts.repeat(s.group)
    generator, new = torch.Generator(backbone.device).manual_seed(0), s.measured_new_tokens
    ids, mask = generate(backbone, many, new, generator, min_new_tokens=min(4, new))
    hidden = predicting_hidden(backbone, many, ids)
    logits = backbone.head(hidden)  # [N, T, V], float32
    right = self_certainty(backbone.head, hidden.flatten(0, 1)).view(mask.shape)
    exact = certainty_of_logits(logits.double())
    wrong = chunked_over_vocabulary(logits, min(s.chunk, logits.shape[-1] // 2))
    low = certainty_of_logits(logits.bfloat16())
    scores = pd.DataFrame({
        "group": index.tolist(), "self_certainty": completion_certainty(right, mask).tolist(),
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


def _sweep(s: Settings) -> pd.DataFrame:
    """How ``logsumexp - mean`` and the document's mean of it over chunks score logits of which one is raised."""
    vocab, rows = s.sweep_vocab, []
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(vocab, generator=generator, dtype=torch.float64) * 2
    for value in _PEAKS:
        logits = base.clone()
        logits[vocab // 2] = value
        published, document = certainty_of_logits(logits) + math.log(vocab), chunked_over_vocabulary(logits, s.chunk)
        rows.append(dict(peak=value, published=float(published), document=float(document)))
    return pd.DataFrame(rows)


def _fits(s: Settings) -> pd.DataFrame:
    """How many of the needed sequences fit a GPU in each of the document's settings, logits dense or in chunks."""

    def share(config: PolicyStepConfig) -> Trace:
        return zero3_share(trace(config), config, GPUS)

    rows = []
    for setting, (needed, which) in SETTINGS.items():
        for logits, kind in (("dense", "all"), ("chunked", "chunked")):
            new = s.settings_new_tokens[which]
            config = s.update(s.settings_prompt_tokens, new, logits=kind, self_certainty=True)
            fit = largest_batch(config, BUDGET, tracer=share, most=needed)
            rows.append((setting, logits, needed, fit.batch_size or 0, fit.peak / 1e9))
    return pd.DataFrame(rows, columns=["setting", "logits", "needed", "fits", "peak_gb"])


def chunked_over_vocabulary(logits: Tensor, chunk_size: int) -> Tensor:
    """Document 004's proposal: the mean over vocabulary chunks of each chunk's ``logsumexp - mean``.

    This is not self-certainty: ``logsumexp`` of the whole is at least the mean of the chunks' plus the log of their
    number (Jensen), and a confident token moves only its own chunk. It is here to be compared with the right value.
    """
    return torch.stack([c.logsumexp(-1) - c.mean(-1) for c in logits.split(chunk_size, -1)], -1).mean(-1)


TABLES = {
    "formulas": _formulas,
    "lengths": lambda s: pd.DataFrame(
        dict(tokens=length, step=step, peak_gb=t.peak / 1e9) for (length, step), t in s.traces.items()
    ),
    "categories": lambda s: categories_table(
        {step: t for (tokens, step), t in s.traces.items() if tokens == max(s.lengths)}
    ),
    # Intuitor's update at the greatest length, on a GPU that divides nothing with others.
    "timelines": lambda s: timelines_table(
        {
            step: trace(config, all_layers=True)
            for (tokens, step), config in s.configs.items()
            if tokens == max(s.lengths) and config.self_certainty
        }
    ),
    "fits": _fits,
    "certainty": lambda s: s.certainties[0],
    "scores": lambda s: s.certainties[1],
    "sweep": _sweep,
}
TIMED = {}
