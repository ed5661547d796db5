"""Verdicts on document 003 ("Offline Entropy Probe OOM Patch Proposals"), claim by claim.

Peaks are traced on the model that the probe was run on, in decimal GB; what proposals do to numbers is measured, on a
small model or on one random parameter. What the published code does was read, not run, where the note says so.
"""

from __future__ import annotations

from collections.abc import Mapping

from grade.experiments.claims import Claim, about
from grade.memory.formulas import lora_parameters, rows_bytes
from grade.memory.shapes import ModelShape

MB, GB = 1e6, 1e9
SAME = 0.02  # peaks within 2 % of each other are the same
EQUAL = 1e-6


def probe_claims(shape: ModelShape, m: Mapping[str, float]) -> list[Claim]:
    """A verdict on each claim of document 003.

    Args:
        shape: The model that the probe was run on.
        m: Figures of ``outputs/probe/metrics.json``.

    Returns:
        The claims, in the document's order.
    """
    whole, chunked, streamed = (m[f"probe/traced_{way}_peak_gb"] for way in ("whole", "chunked", "streamed"))
    small, large = 2 * 4 * lora_parameters(shape, 16, every=True), 2 * 4 * lora_parameters(shape, 64, every=True)
    held = rows_bytes(32 * 8, 200, shape.vocab) / GB
    log_softmax, cross = m["probe/saved_log_softmax"], m["probe/saved_cross_entropy"]
    stored = 2 * 8 * 4 * 264 * 8
    rows = [
        ("1: scoring G completions in chunks lowers the peak", "lower", chunked, "GB", "traced",
         "refuted" if chunked > whole * (1 - SAME) else "confirmed",
         f"all at once {whole:.1f} GB: leave-one-out couples a prompt's completions, so every chunk's graph waits for "
         f"one backward pass. In two passes, coefficients first, {streamed:.1f} GB, and the same gradient to "
         f"{m['probe/streamed_grad_rel_diff']:.1g}"),
        ("1: cross_entropy avoids the log-softmax", "avoids it", cross, "x the logits kept for backward", "counted",
         "refuted" if cross > log_softmax * (1 - SAME) else "confirmed",
         f"log_softmax and gather keep {log_softmax:.3f}"),
        ("1: accuracy is preserved", "preserved", m["probe/narrow_token_max"], "nats, largest error of a token",
         "measured", "refuted" if m["probe/narrow_token_max"] > 1e-3 else "confirmed",
         "of log-probabilities from bfloat16 logits, in the old and the proposed form alike; "
         f"{m['probe/narrow_sequence_max']:.2g} of a sequence; float32 logits are needed"),
        ("1: the attention mask is passed", "passed", m["probe/missing_mask_error"],
         "nats, largest error of a sequence", "measured", "refuted",
         "read in the proposed code: a comment says so and the call does not; the error is what left padding does "
         "where it is not masked"),
        ("2: the proposed CPU buffers work", "work", m["probe/buffer_error"] or "no error", "", "measured",
         "refuted" if m["probe/buffer_error"] else "confirmed", "view_as takes no memory_format"),
        ("2: two parameter-sized buffers double memory", "double", small / MB, "MB", "derived",
         "refuted" if small / GB < 0.5 * whole else "confirmed",
         f"two float32 buffers of an adapter of rank 16 on all linear layers; {large / MB:.0f} MB of rank 64; true of "
         "training all weights only"),
        ("3: more than 50 M trained parameters means that the base is trained", "50 M",
         lora_parameters(shape, 64, every=True) / 1e6, "M", "derived", "refuted",
         "an adapter of rank 64 on all linear layers; the rule here is that only an adapter's parameters may be "
         "trained"),
        ("4: the present restore uses gradient times learning rate", "wrong update", m["probe/restore_as_coded"],
         "largest difference after the restore", "measured", "refuted" if m["probe/restore_as_coded"] > 0 else "partly",
         "it never runs: gradients are dropped before the test for them, so the step stays"),
        ("4: restoring parameters makes the step correct", "correct", m["probe/restore_parameters_only"],
         "difference of two identical steps", "measured",
         "partly" if m["probe/restore_parameters_only"] > EQUAL >= m["probe/restore_everything"] else "confirmed",
         f"AdamW's moments stay: the next step is another one; with its state restored too "
         f"{m['probe/restore_everything']:.1g}"),
        ("5: keeping sequences on the CPU shaves memory", "shaves", stored / 1e3, "KB", "derived",
         "refuted" if stored / GB < 0.01 * whole else "confirmed", "ids and masks of 8 x 4 completions of 264 tokens"),
        ("the main cause is the gradient path of one prompt", "6 proposals", held, "GB", "derived",
         "refuted" if held > whole else "partly",
         "left out: the training loss summed the graphs of all B G completions before one backward pass; log-softmax "
         "alone at B = 32, G = 8, 200 tokens. Streaming backward mends it"),
        ("logits take 1.2 GB (its diagnosis)", "1.2 GB", rows_bytes(8, 512, shape.vocab, 2) / GB, "GB", "derived",
         "confirmed" if about(rows_bytes(8, 512, shape.vocab, 2) / GB, 1.2) else "refuted",
         "G = 8, 512 tokens, bfloat16; twice that in float32"),
        ("validation at B = 8, G = 4, 64 tokens shows that it works", "no failure",
         rows_bytes(4, 264, shape.vocab, 2) / GB, "GB of logits a prompt", "derived", "refuted",
         "a size at which the original would not have failed either"),
    ]  # fmt: skip
    return [Claim("003", *row) for row in rows]
