"""Verdicts on document 002 ("Activation Caching Analysis"), claim by claim.

Figures are traced or derived on the real shape of the model that the document names, at its batch and length, in
decimal MB and GB as the document writes them; agreement is measured on a model that runs here. What the published code
does was read, not run; the notes say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from grade.experiments.claims import Claim, about, confirmed_if, size_verdict
from grade.experiments.formulas import rows_bytes, scores_bytes, weights_bytes
from grade.memory.shapes import ModelShape

MB, GB = 1e6, 1e9
AGREE = 1e-4  # nats: float32 log-probabilities of the same tokens, computed in another order

_claim = partial(Claim, seed="002")
_derived_mb = partial(Claim, seed="002", unit="MB", how="derived")
_traced_mb = partial(Claim, seed="002", unit="MB", how="traced")
_traced_gb = partial(Claim, seed="002", unit="GB", how="traced")


def caching_claims(shape: ModelShape, batch: int, length: int, m: Mapping[str, float]) -> list[Claim]:
    """A verdict on each claim of document 002.

    The claims, in the document's order.
    """
    return [
        *_layer_claims(shape, batch, length, m),
        *_pass_claims(shape, batch, length, m),
        *_option_claims(batch, m),
        *_reference_claims(shape, m),
    ]


def _layer_claims(shape: ModelShape, batch: int, length: int, m: Mapping[str, float]) -> list[Claim]:
    """The model, and what one layer keeps."""
    q, kv, mlp = (rows_bytes(batch, length, width, 2) / MB for width in
                  (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.intermediate))  # fmt: skip
    scores, layer = scores_bytes(shape, batch, length) / MB, _layer(m)
    attention, total, eager = layer["attention"] + layer["adapter_inputs"], layer["total"], layer["eager"]
    sizes = (shape.hidden, shape.layers, shape.vocab)
    return [
        _claim(
            claim="the model has hidden size 3,584, 28 layers, vocabulary 152,064", stated="3584, 28, 152064",
            found=", ".join(map(str, sizes)), unit="", how="derived",
            verdict=confirmed_if(sizes == (3584, 28, 152_064)),
            note="config.json of the model that it names; the stated sizes are the 7B's, as in a file of the "
            "repository",
        ),
        _claim(
            claim="Q, K and V are 3.67 MB each", stated="3.67 MB", found=q, unit="MB (Q)", how="derived",
            verdict=confirmed_if(about(q, 3.67) and about(kv, 3.67)),
            note=f"K and V {kv:.2f} MB each: grouped queries. Every size in the document is a number of elements: the "
            "two bytes of an element were left out",
        ),
        _derived_mb(
            claim="attention scores take 14.7 MB", stated="14.7 MB", found=scores, verdict=size_verdict(scores, 14.7),
            note=f"bfloat16; eager attention keeps a float32 softmax too, {eager - total:.1f} MB more per layer by "
            "trace; fused attention makes none",
        ),
        _traced_mb(
            claim="attention keeps about 30 MB a layer", stated="30 MB", found=attention,
            verdict=size_verdict(attention, 30),
            note=f"fused attention {layer['attention']:.1f} MB, and float32 copies of the inputs that the adapter's "
            f"products keep {layer['adapter_inputs']:.1f} MB",
        ),
        _derived_mb(
            claim="gate and up are 19.4 MB each", stated="19.4 MB", found=mlp, verdict=size_verdict(mlp, 19.4),
            note=f"[{batch}, {length}, {shape.intermediate}] in bfloat16",
        ),
        _traced_mb(
            claim="the MLP keeps about 42 MB a layer", stated="42 MB", found=layer["mlp"],
            verdict=size_verdict(layer["mlp"], 42),
            note="gate, its SiLU and up; the input of the frozen down projection is not kept",
        ),
        _traced_mb(
            claim="layer norms keep about 7 MB a layer", stated="7 MB", found=layer["norms"],
            verdict=size_verdict(layer["norms"], 7), note="each keeps a float32 copy of its input",
        ),
        _traced_mb(
            claim="a layer keeps about 79 MB", stated="79 MB", found=total, verdict=size_verdict(total, 79),
            note=f"forward pass with gradient, not checkpointed, LoRA on q, k, v and o; {eager:.1f} MB with eager "
            "attention; the closed form in grade.experiments.formulas gives the same bytes",
        ),
    ]  # fmt: skip


def _pass_claims(shape: ModelShape, batch: int, length: int, m: Mapping[str, float]) -> list[Claim]:
    """What a whole forward pass keeps."""
    hidden, logits = (rows_bytes(batch, length, width, 2) / MB for width in (shape.hidden, shape.vocab))
    layers, forward, step = _layer(m)["total"] * shape.layers / 1e3, m["caching/forward_kept_gb"], _steps(m)
    extra = step["activations"] - step["selected"]
    return [
        _traced_gb(
            claim="28 layers keep about 2.2 GB", stated="2.2 GB", found=layers, verdict=size_verdict(layers, 2.2),
            note=f"{shape.layers} layers",
        ),
        _derived_mb(
            claim="embeddings take 3.67 MB", stated="3.67 MB", found=hidden, verdict=size_verdict(hidden, 3.67),
            note=f"[{batch}, {length}, {shape.hidden}] in bfloat16",
        ),
        _derived_mb(
            claim="the final logits take 155.6 MB", stated="155.6 MB", found=logits,
            verdict=size_verdict(logits, 155.6),
            note=f"in bfloat16; {2 * logits:.1f} MB in float32, in which losses are computed",
        ),
        _traced_gb(
            claim="a forward pass keeps about 2.4 GB", stated="2.4 GB", found=forward,
            verdict=size_verdict(forward, 2.4),
            note="with gradient and without checkpointing; the reference pass has no gradient and keeps nothing; "
            f"checkpointed, the whole step takes {step['hybrid']:.2f} GB",
        ),
        _traced_gb(
            claim="caching the reference's activations costs 2.4 GB more", stated="+2.4 GB", found=extra,
            verdict=size_verdict(extra, 2.4),
            note=f"peak of the step {step['selected']:.2f} -> {step['activations']:.2f} GB",
        ),
    ]  # fmt: skip


def _option_claims(batch: int, m: Mapping[str, float]) -> list[Claim]:
    """The document's four options."""
    step, stored, differ = _steps(m), m["caching/stored_bytes_per_sample"], m["caching/train_eval_difference"]
    agree = max(m[f"caching/measured_{name}_ref_max_abs_diff"] for name in ("activations", "dual", "hybrid"))
    dual = m["caching/measured_dual_ref_max_abs_diff"]
    return [
        _claim(
            claim="option 1 costs 156 MB, is ref_selected_log_probs, and is already optimal", stated="156 MB",
            found=stored * batch, unit="bytes", how="derived", verdict="refuted",
            note="selected log-probabilities are [B, T - 1] in float32; read in the published code: a clone of the "
            f"logits is kept as well, by trace {step['clone'] - step['selected']:.2f} GB more at the peak",
        ),
        _claim(
            claim="option 2 is useless because eval and train mode differ (dropout, batch norm)", stated="they differ",
            found=differ, unit="relative", how="measured", verdict=confirmed_if(differ > 0),
            note="the model has no batch norm and no dropout of its own. It is useless because the adapter changes the "
            f"activations: by {m['caching/last_layer_difference']:.1%} in the last layer of the trained policy",
        ),
        _traced_gb(
            claim="option 3 (one pass, dual output) costs the same memory", stated="2.4 GB", found=step["dual"],
            verdict=size_verdict(step["dual"], step["selected"]),
            note=f"against {step['selected']:.2f} GB: both outputs need every sequence twice, the adapter on one half; "
            f"agrees to {dual:.1g} nats",
        ),
        _traced_gb(
            claim="option 4 (two passes, checkpointing) needs no additional memory", stated="none",
            found=step["hybrid"], verdict=confirmed_if(step["hybrid"] <= step["selected"]),
            note=f"against {step['selected']:.2f} GB without checkpointing; reference log-probabilities agree to "
            f"{agree:.1g} nats",
        ),
    ]  # fmt: skip


def _reference_claims(shape: ModelShape, m: Mapping[str, float]) -> list[Claim]:
    """The reference's pass, and a base of its own."""
    stored, copy, base = m["caching/stored_bytes_per_sample"], m["caching/second_base_gb"], weights_bytes(shape) / GB
    itself, to_base = m["caching/kl_to_itself"], m["caching/kl_to_base"]
    return [
        _claim(
            claim="two forward passes are necessary in each step", stated="2", found=1, unit="forward passes",
            how="measured",
            verdict="refuted" if m["caching/measured_stored_ref_max_abs_diff"] <= AGREE else "partly",
            note=f"the base does not change: its log-probabilities can be stored once, {stored:.0f} bytes per sample",
        ),
        _claim(
            claim="the reference pass computes reference log-probabilities for KL", stated="KL to the base",
            found=itself, unit="nats a token", how="measured",
            verdict="refuted" if itself <= AGREE < to_base else "partly",
            note="read in the published code: the fallback reference is the same model with the adapter on, so its KL "
            f"is that of dropout noise, 0 without; KL to the base is {to_base:.3g}",
        ),
        _claim(
            claim="a separate frozen base doubles the model's memory (3B to 6B)", stated="3B -> 6B", found=copy,
            unit="GB more", how="traced", verdict="partly" if about(copy, base) else "refuted",
            note="true of a copy, and needless: the base is the same weights with the adapter off",
        ),
    ]  # fmt: skip


def _layer(m: Mapping[str, float]) -> dict[str, float]:
    """MB that a layer keeps, by part and in all."""
    parts = {name: m[f"caching/layer_{name}_bytes"] / MB for name in ("norms", "attention", "adapter_inputs", "mlp")}
    return parts | {"total": m["caching/layer_bytes"] / MB, "eager": m["caching/layer_eager_bytes"] / MB}


def _steps(m: Mapping[str, float]) -> dict[str, float]:
    """GB that each option's step adds to what is always there."""
    options = ("clone", "selected", "activations", "dual", "hybrid")
    return {name: m[f"caching/traced_{name}_step_gb"] for name in options}
