"""Verdicts on document 002 ("Activation Caching Analysis"), claim by claim.

Figures are traced or derived on the real shape of the model that the document names, at its batch and length, in
decimal MB and GB as it writes them; times and agreement are measured on a model that runs here. What the published code
does was read, not run; the notes say so.
"""

from __future__ import annotations

from collections.abc import Mapping

from grade.experiments.claims import Claim, about, size_verdict
from grade.memory.formulas import rows_bytes, scores_bytes, weights_bytes
from grade.memory.shapes import ModelShape

MB, GB = 1e6, 1e9
AGREE = 1e-4  # nats: float32 log-probabilities of the same tokens, computed in another order


def caching_claims(shape: ModelShape, batch: int, length: int, m: Mapping[str, float]) -> list[Claim]:
    """A verdict on each claim of document 002.

    Args:
        shape: The model that it names.
        batch: B, 2 in the document.
        length: Tokens of a sequence, 512 in the document.
        m: Figures of ``outputs/caching/metrics.json``.

    Returns:
        The claims, in the document's order.
    """
    q, kv = (n * shape.head_dim for n in (shape.heads, shape.kv_heads))
    widths = {"q": q, "kv": kv, "mlp": shape.intermediate, "hidden": shape.hidden, "logits": shape.vocab}
    wide = {name: rows_bytes(batch, length, width, 2) / MB for name, width in widths.items()}
    layer = {name: m[f"caching/layer_{name}_bytes"] / MB for name in ("norms", "attention", "adapter_inputs", "mlp")}
    total, eager = m["caching/layer_bytes"] / MB, m["caching/layer_eager_bytes"] / MB
    options = ("clone", "selected", "activations", "dual", "hybrid")
    step = {name: m[f"caching/traced_{name}_step_gb"] for name in options}
    forward, extra = m["caching/forward_kept_gb"], step["activations"] - step["selected"]
    stored = m["caching/stored_bytes_per_sample"]
    agree = max(m[f"caching/measured_{name}_ref_max_abs_diff"] for name in ("activations", "dual", "hybrid"))
    copy, base = m["caching/second_base_gb"], weights_bytes(shape) / GB
    rows = [
        ("the model has hidden size 3,584, 28 layers, vocabulary 152,064", "3584, 28, 152064",
         f"{shape.hidden}, {shape.layers}, {shape.vocab}", "", "derived",
         "confirmed" if (shape.hidden, shape.layers, shape.vocab) == (3584, 28, 152_064) else "refuted",
         "config.json of the model that it names; the stated sizes are the 7B's, as in a file of the repository"),
        ("Q, K and V are 3.67 MB each", "3.67 MB", wide["q"], "MB (Q)", "derived",
         "confirmed" if about(wide["q"], 3.67) and about(wide["kv"], 3.67) else "refuted",
         f"K and V {wide['kv']:.2f} MB each: grouped queries. Every size in the document is a number of elements: the "
         "two bytes of an element were left out"),
        ("attention scores take 14.7 MB", "14.7 MB", scores_bytes(shape, batch, length) / MB, "MB", "derived",
         size_verdict(scores_bytes(shape, batch, length) / MB, 14.7),
         f"bfloat16; eager attention keeps a float32 softmax too, {eager - total:.1f} MB more a layer by trace; fused "
         "attention makes none"),
        ("attention keeps about 30 MB a layer", "30 MB", layer["attention"] + layer["adapter_inputs"], "MB", "traced",
         size_verdict(layer["attention"] + layer["adapter_inputs"], 30),
         f"fused attention {layer['attention']:.1f} MB, and float32 copies of the inputs that the adapter's products "
         "keep "
         f"{layer['adapter_inputs']:.1f} MB"),
        ("gate and up are 19.4 MB each", "19.4 MB", wide["mlp"], "MB", "derived", size_verdict(wide["mlp"], 19.4),
         f"[{batch}, {length}, {shape.intermediate}] in bfloat16"),
        ("the MLP keeps about 42 MB a layer", "42 MB", layer["mlp"], "MB", "traced", size_verdict(layer["mlp"], 42),
         "gate, its SiLU and up; the input of the frozen down projection is not kept"),
        ("layer norms keep about 7 MB a layer", "7 MB", layer["norms"], "MB", "traced", size_verdict(layer["norms"], 7),
         "each keeps a float32 copy of its input"),
        ("a layer keeps about 79 MB", "79 MB", total, "MB", "traced", size_verdict(total, 79),
         f"forward pass with gradient, not checkpointed, LoRA on q, k, v and o; {eager:.1f} MB with eager attention; "
         "the "
         "closed form in grade.memory.formulas gives the same bytes"),
        ("28 layers keep about 2.2 GB", "2.2 GB", total * shape.layers / 1e3, "GB", "traced",
         size_verdict(total * shape.layers / 1e3, 2.2), f"{shape.layers} layers"),
        ("embeddings take 3.67 MB", "3.67 MB", wide["hidden"], "MB", "derived", size_verdict(wide["hidden"], 3.67),
         f"[{batch}, {length}, {shape.hidden}] in bfloat16"),
        ("the final logits take 155.6 MB", "155.6 MB", wide["logits"], "MB", "derived",
         size_verdict(wide["logits"], 155.6),
         f"in bfloat16; {2 * wide['logits']:.1f} MB in float32, in which losses are"),
        ("a forward pass keeps about 2.4 GB", "2.4 GB", forward, "GB", "traced", size_verdict(forward, 2.4),
         "with gradient and without checkpointing; the reference pass has no gradient and keeps nothing; "
         f"checkpointed, the whole step takes {step['hybrid']:.2f} GB"),
        ("caching the reference's activations costs 2.4 GB more", "+2.4 GB", extra, "GB", "traced",
         size_verdict(extra, 2.4), f"peak of the step {step['selected']:.2f} -> {step['activations']:.2f} GB"),
        ("option 1 costs 156 MB, is ref_selected_log_probs, and is already optimal", "156 MB", stored * batch, "bytes",
         "derived", "refuted",
         f"selected log-probabilities are [B, T - 1] in float32; read in the published code: a clone of the logits is "
         f"kept as well, by trace {step['clone'] - step['selected']:.2f} GB more at the peak"),
        ("option 2 is useless because eval and train mode differ (dropout, batch norm)", "they differ",
         m["caching/train_eval_difference"], "relative", "measured",
         "confirmed" if m["caching/train_eval_difference"] > 0 else "refuted",
         "the model has no batch norm and no dropout of its own. It is useless because the adapter changes the "
         f"activations: by {m['caching/last_layer_difference']:.1%} in the last layer of the trained policy"),
        ("option 3 (one pass, dual output) costs the same memory", "2.4 GB", step["dual"], "GB", "traced",
         size_verdict(step["dual"], step["selected"]),
         f"against {step['selected']:.2f} GB: both outputs need every sequence twice, the adapter on one half; "
         "agrees to "
         f"{m['caching/measured_dual_ref_max_abs_diff']:.1g} nats, "
         f"{m['caching/measured_dual_over_selected_seconds']:.2f}"
         " times the time"),
        ("option 4 (two passes, checkpointing) needs no additional memory", "none", step["hybrid"], "GB", "traced",
         "confirmed" if step["hybrid"] <= step["selected"] else "refuted",
         f"against {step['selected']:.2f} GB without checkpointing; reference log-probabilities agree to {agree:.1g} "
         "nats"),
        ("two forward passes are necessary in each step", "2", 1, "forward passes", "measured",
         "refuted" if m["caching/measured_stored_ref_max_abs_diff"] <= AGREE else "partly",
         f"the base does not change: its log-probabilities can be stored once, {stored:.0f} bytes a sample"),
        ("the reference pass computes reference log-probabilities for KL", "KL to the base",
         m["caching/kl_to_itself"], "nats a token", "measured",
         "refuted" if m["caching/kl_to_itself"] <= AGREE < m["caching/kl_to_base"] else "partly",
         "read in the published code: the fallback reference is the same model with the adapter on, so its KL is "
         "that of "
         f"dropout noise, 0 without; KL to the base is {m['caching/kl_to_base']:.3g}"),
        ("a separate frozen base doubles the model's memory (3B to 6B)", "3B -> 6B", copy, "GB more", "traced",
         "partly" if about(copy, base) else "refuted",
         "true of a copy, and needless: the base is the same weights with the adapter off"),
    ]  # fmt: skip
    return [Claim("002", *row) for row in rows]
