"""Figures of the experiment on activation caching, and verdicts on document 002 (``claims.yaml``)."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from grade.experiments.caching.measure.tables import COPY, Settings
from grade.experiments.claims import Claim, about, judge
from grade.experiments.formulas import parameter_count, rows_bytes
from grade.experiments.measured import Tables, figures_of
from grade.experiments.traced import shape_of
from grade.memory.shapes import ModelShape

GB = 1e9
AGREE = 1e-4  # nats: float32 log-probabilities of the same tokens, computed in another order


def metrics(tables: Tables, settings: Settings) -> dict[str, float]:
    """Bytes of one layer, what steps add in decimal GB, log-probabilities and KL in nats, others relative."""
    shape, length = shape_of(settings.model), settings.prompt_tokens + settings.new_tokens
    parts, eager = layer_parts(tables["layer"], "sdpa"), layer_parts(tables["layer"], "eager")
    peaks, policy, agreement = tables["peaks"], tables["policy"], tables["agreement"]
    peak = peaks.set_index("option").peak_bytes
    options = peaks[peaks.option != COPY].assign(step_gb=peaks.step_bytes / GB)
    kept = shape.layers * parts.sum() + rows_bytes(settings.batch, length, shape.vocab, 2)
    return {
        **{f"caching/layer_{name.replace(' ', '_').lower()}_bytes": int(n) for name, n in parts.items()},
        "caching/layer_bytes": int(parts.sum()), "caching/layer_eager_bytes": int(eager.sum()),
        **figures_of(options, "caching/traced_{option}_step_gb", {"": "step_gb"}),
        **figures_of(agreement, "caching/measured_{option}_ref_max_abs_diff", {"": "ref_max_abs_diff"}),
        "caching/forward_kept_gb": kept / GB,
        "caching/second_base_gb": (peak[COPY] - peak["selected"]) / GB,
        "caching/stored_bytes_per_sample": rows_bytes(1, length - 1, 1),
        "caching/last_layer_difference": tables["layer_differences"].relative_difference.iloc[-1],
        "caching/train_eval_difference": policy["dropout"],
        "caching/kl_to_base": policy["kl_to_base"], "caching/kl_to_itself": policy["kl_to_itself"],
    }  # fmt: skip


def layer_parts(layer: pd.DataFrame, attention: str) -> pd.Series:
    """Bytes that one layer keeps with ``sdpa`` or ``eager`` attention, by group."""
    return layer[layer.attention == attention].groupby("group")["bytes"].sum()


def caching_claims(shape: ModelShape, batch: int, length: int, m: Mapping[str, float]) -> list[Claim]:
    """A verdict on each claim of document 002, from the model's shape, B, n and the figures of ``metrics``."""
    logits, stored = rows_bytes(batch, length, shape.vocab, 2), m["caching/stored_bytes_per_sample"]
    q, kv = (rows_bytes(batch, length, heads * shape.head_dim, 2) for heads in (shape.heads, shape.kv_heads))
    step = {name.split("_")[1]: value for name, value in m.items() if name.endswith("_step_gb")}
    agrees = m["caching/measured_stored_ref_max_abs_diff"] <= AGREE
    copy, base = m["caching/second_base_gb"], 2 * parameter_count(shape) / GB
    differences = [m[f"caching/measured_{x}_ref_max_abs_diff"] for x in ("activations", "dual", "hybrid")]
    sizes = shape.hidden, shape.layers, shape.vocab
    figures: dict[str, Any] = {
        **m, "B": batch, "n": length, "I": shape.intermediate, "L": shape.layers, "D": shape.hidden,
        "sizes": ", ".join(map(str, sizes)), "sizes as stated": sizes == (3584, 28, 152_064),
        "q": q, "kv": kv, "q and kv as stated": about(q / 1e6, 3.67) and about(kv / 1e6, 3.67),
        "scores": rows_bytes(batch * shape.heads, length, length, 2),
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
    return judge("caching", figures)
