"""Verdicts on document 004 ("Intuitor vs PPO Memory Analysis"), claim by claim.

Sizes are decimal GB, as in the document. Memory is traced on the update of the document's own model, or derived by its
own formula; self-certainty is measured on text that a model wrote here. The published scripts were read, not run; the
notes say where.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TypeVar

from grade.experiments.claims import Claim, about, confirmed_if, size_verdict
from grade.experiments.formulas import rows_bytes
from grade.experiments.intuitor.measure.stated import SETTINGS, STATED_GB
from grade.memory.shapes import ModelShape

GB = 1e9
EQUAL = 1e-3  # nats: float32 sums in another order
LENGTH = 6144  # tokens at which the document states its sizes

T = TypeVar("T")
_claim = partial(Claim, seed="004")


def intuitor_claims(
    shape: ModelShape, rows_gb: Mapping[str, float], peaks: Mapping[int, Mapping[str, float]], m: Mapping[str, float]
) -> list[Claim]:
    """A verdict on each claim of document 004.

    The claims, in the document's order.
    """
    return [
        *_table_claims(shape, rows_gb, peaks),
        *_length_claims(shape, peaks),
        *_certainty_claims(shape, m),
        *_settings_claims(shape, m),
        _claim(
            claim="the model is Qwen2.5-1.5B", stated="Qwen2.5-1.5B", found="DeepSeek-R1-Distill-Qwen-1.5B", unit="",
            how="derived", verdict="refuted", note="read in the published scripts",
        ),
    ]  # fmt: skip


def _table_claims(
    shape: ModelShape, rows_gb: Mapping[str, float], peaks: Mapping[int, Mapping[str, float]]
) -> list[Claim]:  # fmt: skip
    """The document's table of sizes at 6K tokens."""
    at = _nearest(peaks)
    more = {n: p["Intuitor, dense logits"] - p["PPO, dense logits"] for n, p in peaks.items()}
    full, intuitor = rows_gb["full logits"], at["Intuitor, dense logits"]
    return [
        _claim(
            claim="storing full logits takes 234 GB", stated="234 GB", found=full, unit="GB", how="derived",
            verdict=size_verdict(full, 234),
            note="by its own formula, 64 sequences at once; the scripts never hold them all at once",
        ),
        _claim(
            claim="gradients of the logits take another 234 GB", stated="234 GB", found=0, unit="GB", how="derived",
            verdict="refuted",
            note="read in the published code: self-certainty is computed without gradient and detached",
        ),
        _claim(
            claim="Intuitor needs 468 GB more than PPO", stated="468 GB", found=_nearest(more), unit="GB", how="traced",
            verdict=confirmed_if(about(max(more.values()), 468)),
            note="PPO's update makes the same logits for its log-probabilities; scoring without gradient peaks lower. "
            f"Intuitor stores one number per token besides, {rows_bytes(64, 4096, 1) / 1e6:.2f} MB for 64 x 4096",
        ),
        _claim(
            claim="Intuitor in all needs 481 GB", stated="481 GB", found=intuitor, unit="GB", how="traced",
            verdict=size_verdict(intuitor, 481),
            note="a GPU's peak with dense logits, one sequence per microbatch and weights divided among 8, as the "
            f"scripts run it (read); {at['Intuitor, logits in chunks']:.2f} GB with logits in chunks",
        ),
        _claim(
            claim="the batch is 64 sequences", stated="64", found=64 * 16, unit="sequences", how="derived",
            verdict="refuted",
            note="read in the published scripts: 64 prompts of 16 samples; all at once would be, by its formula, "
            f"{16 * 2 * full / 1e3:.1f} TB",
        ),
        _claim(
            claim="activations take 1.2 GB", stated="1.2 GB", found=rows_gb["model activations"], unit="GB",
            how="derived", verdict=size_verdict(rows_gb["model activations"], 1.2),
            note=f"one hidden tensor of one layer; checkpointing keeps one for each of {shape.layers} layers",
        ),
        _claim(
            claim="optimizer states take 6 GB, 2 x parameters", stated="6 GB", found=rows_gb["optimizer"], unit="GB",
            how="derived", verdict=size_verdict(rows_gb["optimizer"], 6),
            note="two moments in float32; 6 GB is bfloat16, without master weights",
        ),
    ]  # fmt: skip


def _length_claims(shape: ModelShape, peaks: Mapping[int, Mapping[str, float]]) -> list[Claim]:
    """PPO's size, and how both grow with the length."""
    ppo = _nearest(peaks)["PPO, dense logits"]
    factors = {n: p["Intuitor, dense logits"] / p["PPO, dense logits"] for n, p in peaks.items()}
    by_tokens = ", ".join(f"{n}: {factors[n]:.2f}" for n in sorted(set(STATED_GB) & set(peaks)))
    four, eighteen = (64 * n * shape.vocab * 8 / GB for n in (4096, 18_432))
    own_sum = 3 + 1.2 + 0.0008 + 3 + 6
    return [
        _claim(
            claim="regular PPO needs 13.2 GB at 6K tokens", stated="13.2 GB", found=ppo, unit="GB", how="traced",
            verdict=size_verdict(ppo, 13.2),
            note=f"a GPU's peak, dense logits, one sequence, reference included; its rows sum to {own_sum:.1f} GB, and "
            "its own scaling table says 18 GB. Left out there: reference model, the sampling engine's weights and "
            "cache, critic",
        ),
        _claim(
            claim="Intuitor to PPO grows from 20x to 28x with length", stated="20x-28x", found=max(factors.values()),
            unit="x", how="traced", verdict=confirmed_if(max(factors.values()) > 15), note=f"by tokens {by_tokens}",
        ),
        _claim(
            claim="18K to 4K tokens: 1.4 TB to 160 GB, 90% less", stated="90%", found=100 * (1 - four / eighteen),
            unit="%", how="derived", verdict="partly",
            note=f"by its own formula {eighteen / 1e3:.3f} TB -> {four:.0f} GB; its table says 320 GB at 4K, and 160 "
            "is the half without the gradient that does not exist",
        ),
    ]  # fmt: skip


def _certainty_claims(shape: ModelShape, m: Mapping[str, float]) -> list[Claim]:
    """The document's ways to save memory on self-certainty."""
    offset = m["intuitor/document_offset"]
    return [
        _claim(
            claim="self-certainty can be computed in chunks of the vocabulary", stated="equal", found=offset,
            unit="nats a token, mean difference", how="measured", verdict=confirmed_if(offset <= EQUAL),
            note=f"n = {m['intuitor/tokens']:.0f} tokens; correlation {m['intuitor/document_correlation_tokens']:.2f} "
            f"over tokens, {m['intuitor/document_correlation_in_group']:.2f} over {m['intuitor/completions']:.0f} "
            "completions within their prompts. Raising one logit from 5 to 35 moves the right value by "
            f"{m['intuitor/sweep_published']:.1f} and the formula by {m['intuitor/sweep_document']:.2f}. It takes all "
            "logits as its input, so it saves nothing; chunks of rows are exact (largest error "
            f"{m['intuitor/chunked_max_abs_error']:.1g})",
        ),
        _claim(
            claim="…and it is gradient checkpointing for logits", stated="checkpointing", found=0, unit="bytes saved",
            how="derived", verdict="refuted", note="it recomputes nothing",
        ),
        _claim(
            claim=".float() then .half() saves memory", stated="less", found=rows_bytes(1, LENGTH, shape.vocab) / GB,
            unit="GB more a sequence", how="derived", verdict="refuted",
            note="float() makes the float32 copy; half() rounds the scores: largest error "
            f"{m['intuitor/half_max_abs_error']:.2g}, beside a spread of {m['intuitor/within_group_sd']:.2g} among "
            f"samples of a prompt; bfloat16 throughout errs by {m['intuitor/bfloat16_max_abs_error']:.2g}",
        ),
    ]  # fmt: skip


def _settings_claims(shape: ModelShape, m: Mapping[str, float]) -> list[Claim]:
    """The document's recommended settings on eight GPUs."""
    fits = {(name, logits): m[f"intuitor/{name}_fits_{logits}"] for name in SETTINGS for logits in ("dense", "chunked")}
    small, large = fits["conservative", "dense"], fits["aggressive", "dense"]
    by_formula = 16 * 4 * 3072 * shape.vocab * 8 / GB, 32 * 8 * 4096 * shape.vocab * 8 / GB
    return [
        _claim(
            claim="the conservative settings fit 8 x 80 GB", stated="fits", found=small, unit="sequences a GPU at once",
            how="traced", verdict=confirmed_if(small >= 8),
            note=f"needs 8; dense logits, P = 2K, T = 1K; {_most(fits['conservative', 'chunked'])} with logits in "
            f"chunks. By its own formula {by_formula[0]:.0f} GB",
        ),
        _claim(
            claim="the aggressive settings fit 8 x 80 GB", stated="fits", found=large, unit="sequences a GPU at once",
            how="traced", verdict=confirmed_if(large >= 32, "partly" if large >= 1 else "refuted"),
            note=f"needs 32 at once, or microbatches; {_most(fits['aggressive', 'chunked'])} with logits in chunks. By "
            f"its own formula {by_formula[1] / 1e3:.2f} TB",
        ),
    ]  # fmt: skip


def _nearest(by_length: Mapping[int, T]) -> T:
    """The value at the length that is nearest to the document's."""
    return by_length[min(by_length, key=lambda n: abs(n - LENGTH))]


def _most(n: float) -> str:
    return f"{n:.0f} (all that are asked for)" if n >= 32 else f"{n:.0f}"
