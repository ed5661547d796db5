"""Verdicts on document 004 ("Intuitor vs PPO Memory Analysis"), claim by claim.

Sizes are decimal GB, as in the document. Memory is traced on the update of its own model, or derived by its own
formula; self-certainty is measured on text that a model wrote here. What the published scripts do was read, not run;
the notes say so.
"""

from __future__ import annotations

from collections.abc import Mapping

from grade.experiments.claims import Claim, about, size_verdict
from grade.experiments.intuitor.stated import SETTINGS, STATED_GB
from grade.memory.formulas import rows_bytes
from grade.memory.shapes import ModelShape

GB = 1e9
EQUAL = 1e-3  # nats: float32 sums in another order


def intuitor_claims(
    shape: ModelShape, rows_gb: Mapping[str, float], peaks: Mapping[int, Mapping[str, float]], m: Mapping[str, float]
) -> list[Claim]:
    """A verdict on each claim of document 004.

    Args:
        shape: The model that it names.
        rows_gb: From `grade.experiments.intuitor.study.memory_table`: GB by formula, by row.
        peaks: From `grade.experiments.intuitor.study.peaks_by_length`: traced GB by length and step.
        m: Figures of ``outputs/intuitor/metrics.json``.

    Returns:
        The claims, in the document's order.
    """
    at = peaks[min(peaks, key=lambda n: abs(n - 6144))]
    ppo, intuitor = at["PPO, dense logits"], at["Intuitor, dense logits"]
    chunked = at["Intuitor, logits in chunks"]
    more = {n: p["Intuitor, dense logits"] - p["PPO, dense logits"] for n, p in peaks.items()}
    known = sorted(set(STATED_GB) & set(peaks))
    factors = ", ".join(f"{n}: {peaks[n]['Intuitor, dense logits'] / peaks[n]['PPO, dense logits']:.2f}" for n in known)
    four, eighteen = (64 * n * shape.vocab * 8 / GB for n in (4096, 18_432))
    settings = 16 * 4 * 3072 * shape.vocab * 8 / GB, 32 * 8 * 4096 * shape.vocab * 8 / GB
    small, small_chunked, large, large_chunked = (
        m[f"intuitor/{setting}_fits_{logits}"] for setting in SETTINGS for logits in ("dense", "chunked")
    )
    own_sum = 3 + 1.2 + 0.0008 + 3 + 6
    rows = [
        ("storing full logits takes 234 GB", "234 GB", rows_gb["full logits"], "GB", "derived",
         size_verdict(rows_gb["full logits"], 234),
         "by its own formula, 64 sequences at once; never at once in the scripts"),
        ("gradients of the logits take another 234 GB", "234 GB", 0, "GB", "derived", "refuted",
         "read in the published code: self-certainty is computed without gradient and detached"),
        ("Intuitor needs 468 GB more than PPO", "468 GB", more[min(more, key=lambda n: abs(n - 6144))], "GB", "traced",
         "confirmed" if about(max(more.values()), 468) else "refuted",
         "PPO's update makes the same logits for its log-probabilities; scoring without gradient peaks lower. What "
         f"Intuitor stores beside is one number a token, {rows_bytes(64, 4096, 1) / 1e6:.2f} MB for 64 x 4096"),
        ("Intuitor in all needs 481 GB", "481 GB", intuitor, "GB", "traced", size_verdict(intuitor, 481),
         "a GPU's peak with dense logits, one sequence a microbatch and weights divided among 8, as the scripts run it "
         f"(read); {chunked:.2f} GB with logits in chunks"),
        ("the batch is 64 sequences", "64", 64 * 16, "sequences", "derived", "refuted",
         f"read in the published scripts: 64 prompts of 16 samples; all at once would be, by its formula, "
         f"{16 * 2 * rows_gb['full logits'] / 1e3:.1f} TB"),
        ("activations take 1.2 GB", "1.2 GB", rows_gb["model activations"], "GB", "derived",
         size_verdict(rows_gb["model activations"], 1.2),
         f"one hidden tensor of one layer; checkpointing keeps one for each of {shape.layers} layers"),
        ("optimizer states take 6 GB, 2 x parameters", "6 GB", rows_gb["optimizer"], "GB", "derived",
         size_verdict(rows_gb["optimizer"], 6), "two moments in float32; 6 GB is bfloat16, without master weights"),
        ("regular PPO needs 13.2 GB at 6K tokens", "13.2 GB", ppo, "GB", "traced", size_verdict(ppo, 13.2),
         f"a GPU's peak, dense logits, one sequence, reference included; its rows sum to {own_sum:.1f} GB, and its own "
         "scaling table says 18 GB. Left out there: reference model, the sampling engine's weights and cache, critic"),
        ("Intuitor to PPO grows from 20x to 28x with length", "20x-28x", max(
            p["Intuitor, dense logits"] / p["PPO, dense logits"] for p in peaks.values()), "x", "traced",
         "confirmed" if any(p["Intuitor, dense logits"] > 15 * p["PPO, dense logits"] for p in peaks.values())
         else "refuted", f"by tokens {factors}"),
        ("18K to 4K tokens: 1.4 TB to 160 GB, 90% less", "90%", 100 * (1 - four / eighteen), "%", "derived",
         "partly", f"by its own formula {eighteen / 1e3:.3f} TB -> {four:.0f} GB; its table says 320 GB at 4K, and 160 "
         "is the half without the gradient that does not exist"),
        ("self-certainty can be computed in chunks of the vocabulary", "equal", m["intuitor/document_offset"],
         "nats a token, mean difference", "measured",
         "confirmed" if m["intuitor/document_offset"] <= EQUAL else "refuted",
         f"n = {m['intuitor/tokens']:.0f} tokens; correlation {m['intuitor/document_correlation_tokens']:.2f} over "
         "tokens, "
         f"{m['intuitor/document_correlation_in_group']:.2f} over {m['intuitor/completions']:.0f} completions within "
         "their "
         f"prompts. Raising one logit from 5 to 35 moves the right value by {m['intuitor/sweep_published']:.1f} and "
         "the "
         f"formula by {m['intuitor/sweep_document']:.2f}. It takes all logits as its input, so it saves nothing; "
         "chunks "
         f"of rows are exact (largest error {m['intuitor/chunked_max_abs_error']:.1g})"),
        ("…and it is gradient checkpointing for logits", "checkpointing", 0, "bytes saved", "derived", "refuted",
         "it recomputes nothing"),
        (".float() then .half() saves memory", "less", rows_bytes(1, 6144, shape.vocab) / GB,
         "GB more a sequence", "derived", "refuted",
         "float() makes the float32 copy; half() rounds the scores: largest error "
         f"{m['intuitor/half_max_abs_error']:.2g}, beside a spread of {m['intuitor/within_group_sd']:.2g} among "
         "samples "
         f"of a prompt; bfloat16 throughout errs by {m['intuitor/bfloat16_max_abs_error']:.2g}"),
        ("the conservative settings fit 8 x 80 GB", "fits", small, "sequences a GPU at once", "traced",
         "confirmed" if small >= 8 else "refuted",
         f"needs 8; dense logits, P = 2K, T = 1K; {_most(small_chunked)} with logits in chunks. By its own formula "
         f"{settings[0]:.0f} GB"),
        ("the aggressive settings fit 8 x 80 GB", "fits", large, "sequences a GPU at once", "traced",
         "confirmed" if large >= 32 else "partly" if large >= 1 else "refuted",
         f"needs 32 at once, or microbatches; {_most(large_chunked)} with logits in chunks. By its own formula "
         f"{settings[1] / 1e3:.2f} TB"),
        ("the model is Qwen2.5-1.5B", "Qwen2.5-1.5B", "DeepSeek-R1-Distill-Qwen-1.5B", "", "derived", "refuted",
         "read in the published scripts"),
    ]  # fmt: skip
    return [Claim("004", *row) for row in rows]


def _most(n: float) -> str:
    return f"{n:.0f} (all that are asked for)" if n >= 32 else f"{n:.0f}"
