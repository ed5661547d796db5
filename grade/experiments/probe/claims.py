"""Verdicts on document 003 ("Offline Entropy Probe OOM Patch Proposals"), claim by claim.

Peaks are traced on the model that the document's probe ran on, in decimal GB; the proposals' effect on numbers is
measured, on a small model or on one random parameter. The published code was read, not run, where the note says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from grade.experiments.claims import Claim, about, confirmed_if
from grade.experiments.formulas import lora_parameters, rows_bytes
from grade.memory.shapes import ModelShape

MB, GB = 1e6, 1e9
SAME = 0.02  # peaks within 2 % of each other are the same
EQUAL = 1e-6

_claim = partial(Claim, seed="003")


def probe_claims(shape: ModelShape, m: Mapping[str, float]) -> list[Claim]:
    """A verdict on each claim of document 003.

    The claims, in the document's order.
    """
    return [*_scoring_claims(m), *_buffer_claims(shape, m), *_restore_claims(m), *_diagnosis_claims(shape, m)]


def _scoring_claims(m: Mapping[str, float]) -> list[Claim]:
    """Proposal 1: completions in chunks, by another function."""
    whole, chunked, streamed = (m[f"probe/traced_{way}_peak_gb"] for way in ("whole", "chunked", "streamed"))
    log_softmax, cross = m["probe/saved_log_softmax"], m["probe/saved_cross_entropy"]
    token = m["probe/narrow_token_max"]
    return [
        _claim(
            claim="1: scoring G completions in chunks lowers the peak", stated="lower", found=chunked, unit="GB",
            how="traced", verdict=confirmed_if(chunked <= whole * (1 - SAME)),
            note=f"all at once {whole:.1f} GB: leave-one-out couples a prompt's completions, so every chunk's graph "
            f"waits for one backward pass. In two passes, coefficients first, {streamed:.1f} GB, and the same gradient "
            f"to {m['probe/streamed_grad_rel_diff']:.1g}",
        ),
        _claim(
            claim="1: cross_entropy avoids the log-softmax", stated="avoids it", found=cross,
            unit="x the logits kept for backward", how="counted",
            verdict=confirmed_if(cross <= log_softmax * (1 - SAME)),
            note=f"log_softmax and gather keep {log_softmax:.3f}",
        ),
        _claim(
            claim="1: accuracy is preserved", stated="preserved", found=token, unit="nats, largest error of a token",
            how="measured", verdict=confirmed_if(token <= 1e-3),
            note="of log-probabilities from bfloat16 logits, in the old and the proposed form alike; "
            f"{m['probe/narrow_sequence_max']:.2g} of a sequence; float32 logits are needed",
        ),
        _claim(
            claim="1: the attention mask is passed", stated="passed", found=m["probe/missing_mask_error"],
            unit="nats, largest error of a sequence", how="measured", verdict="refuted",
            note="read in the proposed code: a comment says so and the call does not; the error is that of left "
            "padding which is not masked",
        ),
    ]  # fmt: skip


def _buffer_claims(shape: ModelShape, m: Mapping[str, float]) -> list[Claim]:
    """Proposals 2 and 3: buffers on the CPU, a test for what is trained."""
    error, whole = m["probe/buffer_error"], m["probe/traced_whole_peak_gb"]
    small, large = (2 * 4 * lora_parameters(shape, rank, every=True) for rank in (16, 64))
    return [
        _claim(
            claim="2: the proposed CPU buffers work", stated="work", found=error or "no error", unit="", how="measured",
            verdict=confirmed_if(not error), note="view_as takes no memory_format",
        ),
        _claim(
            claim="2: two parameter-sized buffers double memory", stated="double", found=small / MB, unit="MB",
            how="derived", verdict=confirmed_if(small / GB >= 0.5 * whole),
            note=f"two float32 buffers of an adapter of rank 16 on all linear layers; {large / MB:.0f} MB of rank 64; "
            "true of training all weights only",
        ),
        _claim(
            claim="3: more than 50 M trained parameters means that the base is trained", stated="50 M",
            found=lora_parameters(shape, 64, every=True) / 1e6, unit="M", how="derived", verdict="refuted",
            note="an adapter of rank 64 on all linear layers; the rule here is that only an adapter's parameters may "
            "be trained",
        ),
    ]  # fmt: skip


def _restore_claims(m: Mapping[str, float]) -> list[Claim]:
    """Proposals 4 and 5: undoing the step, sequences on the CPU."""
    coded, parameters, everything = (
        m[f"probe/restore_{way}"] for way in ("as_coded", "parameters_only", "everything")
    )  # fmt: skip
    stored = 2 * 8 * 4 * 264 * 8
    return [
        _claim(
            claim="4: the present restore uses gradient times learning rate", stated="wrong update", found=coded,
            unit="largest difference after the restore", how="measured",
            verdict="refuted" if coded > 0 else "partly",
            note="it never runs: gradients are dropped before the test for them, so the step stays",
        ),
        _claim(
            claim="4: restoring parameters makes the step correct", stated="correct", found=parameters,
            unit="difference of two identical steps", how="measured",
            verdict="partly" if parameters > EQUAL >= everything else "confirmed",
            note=f"AdamW's moments stay, so the next step is another one; with its state restored too {everything:.1g}",
        ),
        _claim(
            claim="5: keeping sequences on the CPU shaves memory", stated="shaves", found=stored / 1e3, unit="KB",
            how="derived", verdict=confirmed_if(stored / GB >= 0.01 * m["probe/traced_whole_peak_gb"]),
            note="ids and masks of 8 x 4 completions of 264 tokens",
        ),
    ]  # fmt: skip


def _diagnosis_claims(shape: ModelShape, m: Mapping[str, float]) -> list[Claim]:
    """The document's diagnosis, and its way to validate."""
    held = rows_bytes(32 * 8, 200, shape.vocab) / GB
    logits = rows_bytes(8, 512, shape.vocab, 2) / GB
    return [
        _claim(
            claim="the main cause is the gradient path of one prompt", stated="6 proposals", found=held, unit="GB",
            how="derived", verdict="refuted" if held > m["probe/traced_whole_peak_gb"] else "partly",
            note="left out: the training loss summed the graphs of all B G completions before one backward pass; "
            "log-softmax alone at B = 32, G = 8, 200 tokens. Streaming backward mends it",
        ),
        _claim(
            claim="logits take 1.2 GB (its diagnosis)", stated="1.2 GB", found=logits, unit="GB", how="derived",
            verdict=confirmed_if(about(logits, 1.2)), note="G = 8, 512 tokens, bfloat16; twice that in float32",
        ),
        _claim(
            claim="validation at B = 8, G = 4, 64 tokens shows that it works", stated="no failure",
            found=rows_bytes(4, 264, shape.vocab, 2) / GB, unit="GB of logits a prompt", how="derived",
            verdict="refuted", note="a size at which the original would not have failed either",
        ),
    ]  # fmt: skip
