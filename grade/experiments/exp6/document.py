"""Document 000 (Experiment 6, "Memory-Efficient GRADE Implementation"): its sizes and what they imply.

What is arithmetic is computed here; what has to be measured is named in `MEASURED_KEYS`.

Sizes are decimal (1 GB = 10^9 bytes), as in the document.
"""

from __future__ import annotations

from grade.experiments import formulas as f
from grade.memory.shapes import QWEN3_4B

# The document's setting ("batch=1, seq=64, vocab=32k, hidden=4096"), its prompt length and its support.
B, P, T, V, H, K = 1, 32, 64, 32_000, 4096, 256
# Its own table, in GB: before and after.
TABLE_BEFORE = (4.0, 4.0, 8.0, 4.0, 20.0)
TABLE_AFTER = (0.032, 0.0, 2.0, 0.032, 5.0)
# Estimated, not derived: elements that autograd keeps for one token in one layer of Qwen3-4B without checkpointing.
ACTIVATION_ELEMENTS = 69_632

MEASURED_KEYS = (
    # Bytes kept for backward by the relaxation, for one token of one sequence, on a vocabulary of relax_vocab_size.
    "memory/relax_vocab_size",
    "memory/relax_dense_bytes_per_token",
    "memory/relax_topk_scattered_bytes_per_token",  # as the document's code: gather after scatter to [V]
    "memory/relax_topk_compact_bytes_per_token",
    # Bytes kept by the reward's soft embeddings at T=64, K=256, D=2560: y @ E, gathered [T, K, D], embedding_bag.
    "memory/reward_dense_bytes",
    "memory/reward_gather_bytes",
    "memory/reward_bag_bytes",
    # Bytes kept by the policy over one rollout of policy_completion_tokens (B*T) tokens, in the three engines.
    "memory/policy_completion_tokens",
    "memory/policy_unrolled_bytes",
    "memory/policy_checkpointed_bytes",
    "memory/policy_replay_bytes",
    # The no-grad reference pass: highest live bytes beyond the weights, and seconds, without and with a KV cache.
    "memory/reference_uncached_peak_bytes",
    "memory/reference_cached_peak_bytes",
    "speed/reference_uncached_seconds",
    "speed/reference_cached_seconds",
    # Optimised against legacy on the same noise, over parity/steps optimizer steps; KL in nats per token.
    "parity/steps",
    "parity/reward_max_abs_diff",
    "parity/kl_max_abs_diff",
    "parity/kl_at_init_max",  # policy and reference for the same position: 0 while LoRA's B is 0
    "parity/kl_at_init_misaligned",  # mean, reference one position late, as the document's code
    # Mean probability in the top 256 tokens of softmax(logits / tau), on real text, as a fraction.
    "support/top256_mass_tau0.5",
    "support/top256_mass_tau1",
    "support/top256_mass_tau2",
    # Highest live bytes of a step with and without deleting intermediates as soon as they are used.
    "memory/peak_with_freeing_bytes",
    "memory/peak_without_freeing_bytes",
    # Seconds of one gradient, as ratios.
    "speed/unrolled_over_replay",
    "speed/checkpointed_over_replay",
    # Relative difference between N accumulated micro-steps and one big batch.
    "parity/accumulation_rel_error",
)


def seed_000_counts() -> dict[str, float]:
    """Every figure on document 000 that is arithmetic. Bytes unless the name says otherwise.

    >>> counts = seed_000_counts()
    >>> counts["soft_tokens"], counts["topk_int64"], round(counts["topk_int64_ratio"], 1)
    (8192000, 196608, 41.7)

    Names to exact numbers. ``real`` marks the model that was run (Qwen3-4B), the rest is the document's setting.
    """
    real_v, real_h, n = QWEN3_4B.vocab, QWEN3_4B.hidden, f.token_forwards_uncached(P, T)
    soft, real_soft = f.rows_bytes(B, T, V), f.rows_bytes(B, T, real_v)
    int64, int32 = f.topk_bytes(B, T, K), f.topk_bytes(B, T, K, index_itemsize=4)
    gathered = f.gathered_embedding_bytes(B, T, K, H)
    kept_per_token = ACTIVATION_ELEMENTS * QWEN3_4B.layers * 2
    checkpointed = n * real_h * 2 + (P + T) * kept_per_token
    return {
        "soft_tokens": soft,
        "soft_tokens_bf16": f.rows_bytes(B, T, V, itemsize=2),
        "soft_tokens_real": real_soft,
        "batch_for_4_gb": 4e9 / soft,
        "topk_weights": f.rows_bytes(B, T, K),
        "topk_int64": int64,
        "topk_int32": int32,
        "topk_weights_ratio": soft / f.rows_bytes(B, T, K),
        "topk_int64_ratio": soft / int64,
        "topk_int32_ratio": soft / int32,
        "topk_int64_ratio_real": real_soft / int64,
        "topk_int32_ratio_real": real_soft / int32,
        "reward_dense": soft + f.rows_bytes(B, T, H, itemsize=2),
        "reward_gathered": gathered,
        "reward_gathered_and_product": 2 * gathered,
        "reward_gathered_real": f.gathered_embedding_bytes(B, T, K, real_h),
        "reward_gathered_over_soft_tokens": gathered / soft,
        "reward_dense_flops": f.mixing_flops(B, T, V, H),
        "reward_sparse_flops": f.mixing_flops(B, T, K, H),
        "kv_cache_per_token": f.kv_cache_bytes_per_token(QWEN3_4B),
        "kv_cache": f.kv_cache_bytes_per_token(QWEN3_4B) * (P + T),
        "token_forwards_uncached": n,
        "token_forwards_cached": f.token_forwards_cached(P, T),
        "token_forwards_ratio": n / f.token_forwards_cached(P, T),
        "reference_no_grad": f.rows_bytes(B, P + T, real_v) + (P + T) * ACTIVATION_ELEMENTS * 2,
        "policy_activations": n * kept_per_token,
        "policy_checkpointed": checkpointed,
        "policy_checkpointed_ratio": n * kept_per_token / checkpointed,
        "attention_scores_t128": f.attention_scores_uncached(P, 2 * T),
        "attention_scores_t64": f.attention_scores_uncached(P, T),
        "attention_growth_one_pass": ((P + 2 * T) / (P + T)) ** 2,
        "attention_growth_loop": f.attention_scores_uncached(P, 2 * T) / f.attention_scores_uncached(P, T),
        "linear_growth_loop": f.token_forwards_uncached(P, 2 * T) / n,
        "own_rows_before_gb": sum(TABLE_BEFORE),
        "own_rows_after_gb": sum(TABLE_AFTER),
        "own_rows_ratio": sum(TABLE_BEFORE) / sum(TABLE_AFTER),
        "weights_three_copies": f.weights_bytes(QWEN3_4B, copies=3),
    }
