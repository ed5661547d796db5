"""Figures behind the verdicts on document 002, whose claims are in ``claims.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grade.experiments.claims import Claim, about, in_units, judge
from grade.experiments.formulas import rows_bytes, scores_bytes, weights_bytes
from grade.memory.shapes import ModelShape

AGREE = 1e-4  # nats: float32 log-probabilities of the same tokens, computed in another order


def caching_claims(shape: ModelShape, batch: int, length: int, m: Mapping[str, float]) -> list[Claim]:
    """A verdict on each claim of document 002, from the model's shape, B, n and the figures of ``metrics``."""
    logits, stored = rows_bytes(batch, length, shape.vocab, 2), m["caching/stored_bytes_per_sample"]
    q, kv = (rows_bytes(batch, length, heads * shape.head_dim, 2) for heads in (shape.heads, shape.kv_heads))
    step = {name.split("_")[1]: value for name, value in m.items() if name.endswith("_step_gb")}
    agrees = m["caching/measured_stored_ref_max_abs_diff"] <= AGREE
    copy, base = m["caching/second_base_gb"], weights_bytes(shape) / 1e9
    differences = [m[f"caching/measured_{x}_ref_max_abs_diff"] for x in ("activations", "dual", "hybrid")]
    sizes = shape.hidden, shape.layers, shape.vocab
    figures: dict[str, Any] = {
        **m, "B": batch, "n": length, "I": shape.intermediate, "L": shape.layers, "D": shape.hidden,
        "sizes": ", ".join(map(str, sizes)), "sizes as stated": sizes == (3584, 28, 152_064),
        "q": q, "kv": kv, "q and kv as stated": about(q / 1e6, 3.67) and about(kv / 1e6, 3.67),
        "scores": scores_bytes(shape, batch, length),
        "gate": rows_bytes(batch, length, shape.intermediate, 2),
        "embeddings": rows_bytes(batch, length, shape.hidden, 2), "logits": logits, "float32 logits": 2 * logits,
        "layer attention, adapter inputs": m["caching/layer_attention_bytes"]
        + m["caching/layer_adapter_inputs_bytes"],
        "eager more": m["caching/layer_eager_bytes"] - m["caching/layer_bytes"],
        "layers": m["caching/layer_bytes"] * shape.layers,
        "stored bytes": stored * batch, "activations more GB": step["activations"] - step["selected"],
        "clone more GB": step["clone"] - step["selected"],
        "dual as selected": about(step["dual"], step["selected"]),
        "hybrid at most selected": step["hybrid"] <= step["selected"],
        "largest difference": max(differences),
        "stored/verdict": "refuted" if agrees else "partly",
        "fallback/verdict": "refuted" if m["caching/kl_to_itself"] <= AGREE < m["caching/kl_to_base"] else "partly",
        "copy/verdict": "partly" if about(copy, base) else "refuted",
    }  # fmt: skip
    return judge(Path(__file__).with_name("claims.yaml"), in_units(figures))
