"""Figures behind the verdicts on document 000, whose claims are in ``claims.yaml``.

Sizes are decimal (1 GB = 10^9 bytes), as in the document (Experiment 6, "Memory-Efficient GRADE Implementation"). What
is not arithmetic is measured, so a verdict can change with the machine and the model.
"""

from collections.abc import Mapping
from typing import Any

from grade.experiments.claims import Claim, about, judge
from grade.experiments.formulas import parameter_count, rows_bytes, token_forwards_uncached
from grade.memory.shapes import QWEN3_4B

# The document's setting ("batch=1, seq=64, vocab=32k, hidden=4096"), its prompt length and its support.
B, P, T, V, H, K = 1, 32, 64, 32_000, 4096, 256
# Its own table, in GB: before and after.
TABLE_BEFORE = (4.0, 4.0, 8.0, 4.0, 20.0)
TABLE_AFTER = (0.032, 0.0, 2.0, 0.032, 5.0)
# Estimated, not derived: elements that autograd keeps for one token in one layer of Qwen3-4B without checkpointing.
ACTIVATION_ELEMENTS = 69_632
EQUAL = 1e-3  # reward and KL of two engines on the same noise, float32, a few steps: equal to three decimals
ACCUMULATION_EQUAL = 1e-5  # relative; float32 sums taken in another order


def exp6_claims(m: Mapping[str, float]) -> list[Claim]:
    """A verdict on each claim of document 000, from the figures of ``metrics`` and ``timed_metrics``."""
    figures = {**m, **_counts(), **_memory(m), **_parity(m)}
    return judge("exp6", figures)


def _counts() -> dict[str, float]:
    """What is arithmetic: bytes unless the name says otherwise.

    ``real`` marks the model that was run (Qwen3-4B), the rest is the document's setting.
    """
    real_v, real_h, n = QWEN3_4B.vocab, QWEN3_4B.hidden, token_forwards_uncached(P, T)
    soft, real_soft, weights = (rows_bytes(B, T, width) for width in (V, real_v, K))
    int64, int32 = 3 * weights, 2 * weights  # a weight is a float32, with an index of 8 or 4 bytes
    gathered = 2 * B * T * K * H
    cache_per_token = 2 * QWEN3_4B.layers * QWEN3_4B.kv_heads * QWEN3_4B.head_dim * 2  # keys and values
    scores, more_scores = (sum(length**2 for length in range(P, P + new)) for new in (T, 2 * T))  # of a head and layer
    kept_per_token = ACTIVATION_ELEMENTS * QWEN3_4B.layers * 2
    checkpointed = n * real_h * 2 + (P + T) * kept_per_token
    return {
        "soft_tokens": soft,
        "soft_tokens_real": real_soft,
        "batch_for_4_gb": 4e9 / soft,
        "topk_weights": weights,
        "topk_int64": int64,
        "topk_int64_ratio": soft / int64,
        "topk_int32_ratio": soft / int32,
        "topk_int64_ratio_real": real_soft / int64,
        "topk_int32_ratio_real": real_soft / int32,
        "reward_dense": soft + rows_bytes(B, T, H, 2),
        "reward_gathered": gathered,
        "reward_gathered_and_product": 2 * gathered,
        "reward_dense_flops": 2 * B * T * V * H,
        "reward_sparse_flops": 2 * B * T * K * H,
        "kv_cache_per_token": cache_per_token,
        "kv_cache": cache_per_token * (P + T),
        "token_forwards_uncached": n,
        "token_forwards_cached": P + T,
        "token_forwards_ratio": n / (P + T),
        "reference_no_grad": rows_bytes(B, P + T, real_v) + (P + T) * ACTIVATION_ELEMENTS * 2,
        "policy_activations": n * kept_per_token,
        "policy_checkpointed": checkpointed,
        "policy_checkpointed_ratio": n * kept_per_token / checkpointed,
        "attention_scores_t128": more_scores,
        "attention_scores_t64": scores,
        "attention_growth_one_pass": ((P + 2 * T) / (P + T)) ** 2,
        "attention_growth_loop": more_scores / scores,
        "linear_growth_loop": token_forwards_uncached(P, 2 * T) / n,
        "own_rows_before_gb": sum(TABLE_BEFORE),
        "own_rows_after_gb": sum(TABLE_AFTER),
        "own_rows_ratio": sum(TABLE_BEFORE) / sum(TABLE_AFTER),
        "weights_three_copies": 3 * 2 * parameter_count(QWEN3_4B),
        "real V": real_v, "real H": real_h,
    }  # fmt: skip


def _memory(m: Mapping[str, float]) -> dict[str, Any]:
    relaxed, scattered = m["memory/relax_dense_bytes_per_token"], m["memory/relax_topk_scattered_bytes_per_token"]
    row = 4 * m["memory/relax_vocab_size"]
    dense, gathered = m["memory/reward_dense_bytes"], m["memory/reward_gather_bytes"]
    kept = {engine: m[f"memory/policy_{engine}_bytes"] for engine in ("unrolled", "checkpointed", "replay")}
    uncached, cached = (m[f"memory/reference_{form}_peak_bytes"] for form in ("uncached", "cached"))
    as_stated = about(dense, 4e9) and about(gathered, 32e6)
    return {
        "share": relaxed * m["memory/policy_completion_tokens"] / kept["unrolled"], "rows kept": relaxed / row,
        "scattered over compact": scattered / m["memory/relax_topk_compact_bytes_per_token"],
        "less than a row": scattered < row, "gathered over dense": gathered / dense,
        "bag over gathered": m["memory/reward_bag_bytes"] / gathered,
        "reward matmul/verdict": "confirmed" if as_stated else "partly" if gathered < dense else "refuted",
        "reference cached over uncached": cached / uncached,
        "reference/peaks": f"no-grad peak {uncached / 1e6:.1f} MB without, {cached / 1e6:.1f} MB with a cache",
        # The net effect may be right; the reason is not, since no_grad stores no activations in either case.
        "offset/verdict": "partly" if cached <= uncached else "refuted",
        "reference speedup": m["speed/reference_uncached_seconds"] / m["speed/reference_cached_seconds"],
        "unrolled over checkpointed": kept["unrolled"] / kept["checkpointed"],
        "unrolled over replay": kept["unrolled"] / kept["replay"],
        "policy/kept": ", ".join(f"{engine} {size / 1e6:.1f} MB" for engine, size in kept.items()),
        # The bytes decide. The time is a single one of each engine, and differs too much from run to run.
        "fewer bytes": kept["checkpointed"] < kept["unrolled"],
        "checkpointed over unrolled seconds": m["speed/checkpointed_over_replay"] / m["speed/unrolled_over_replay"],
        "without over with freeing": m["memory/peak_without_freeing_bytes"] / m["memory/peak_with_freeing_bytes"],
    }  # fmt: skip


def _parity(m: Mapping[str, float]) -> dict[str, Any]:
    reward, kl = m["parity/reward_max_abs_diff"], m["parity/kl_max_abs_diff"]
    # Online KL is equal where it is aligned; as coded, it must also be 0 at the start, where both models are one.
    aligned = max(kl, m["parity/kl_at_init_max"]) <= EQUAL
    kl_verdict = "refuted" if not aligned else "confirmed" if m["parity/kl_at_init_misaligned"] <= EQUAL else "partly"
    # Equal here; not the published trainer's, whose loss has no KL term and so leads elsewhere after a step.
    reward_verdict = "partly" if reward <= EQUAL else "refuted"
    return {
        "kl/verdict": kl_verdict,
        "reward/verdict": reward_verdict,
        "largest difference": max(reward, kl),
        "success/verdict": "refuted" if "refuted" in (kl_verdict, reward_verdict) else "partly",
        # Legacy is too slow to train to the end: what can be shown is that its steps are the same.
        "test/verdict": "partly" if max(reward, kl) <= EQUAL else "not testable",
        "accumulation/verdict": "partly" if m["parity/accumulation_rel_error"] <= ACCUMULATION_EQUAL else "refuted",
    }
