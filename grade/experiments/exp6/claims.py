"""Figures behind the verdicts on document 000, whose claims are in ``claims.yaml``.

Its arithmetic is in `grade.experiments.exp6.document`, the rest is measured, so a verdict can change with the machine
and the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grade.errors import InputError
from grade.experiments.claims import Claim, about, in_units, judge
from grade.experiments.exp6.document import MEASURED_KEYS, seed_000_counts
from grade.memory.shapes import QWEN3_4B

EQUAL = 1e-3  # reward and KL of two engines on the same noise, float32, a few steps: equal to three decimals
ACCUMULATION_EQUAL = 1e-5  # relative; float32 sums taken in another order


def exp6_claims(m: Mapping[str, float]) -> list[Claim]:
    """A verdict on each claim of document 000, from a finite number for each of `MEASURED_KEYS`."""
    for key in MEASURED_KEYS:
        positive = key.startswith(("memory/", "speed/"))  # bytes, seconds and ratios
        if not math.isfinite(m.get(key, math.nan)) or (positive and m[key] <= 0):
            raise InputError(f"measured[{key!r}]", m.get(key), "a finite number" + " above 0" * positive)
    figures = {**m, **seed_000_counts(), "real V": QWEN3_4B.vocab, "real H": QWEN3_4B.hidden}
    return judge(Path(__file__).with_name("claims.yaml"), in_units(figures | _memory(figures) | _parity(m)))


def _memory(m: Mapping[str, float]) -> dict[str, Any]:
    relaxed, scattered = m["memory/relax_dense_bytes_per_token"], m["memory/relax_topk_scattered_bytes_per_token"]
    row = 4 * m["memory/relax_vocab_size"]
    dense, gathered = m["memory/reward_dense_bytes"], m["memory/reward_gather_bytes"]
    kept = {engine: m[f"memory/policy_{engine}_bytes"] for engine in ("unrolled", "checkpointed", "replay")}
    uncached, cached = (m[f"memory/reference_{form}_peak_bytes"] for form in ("uncached", "cached"))
    peaks = f"no-grad peak {uncached / 1e6:.1f} MB without, {cached / 1e6:.1f} MB with a cache"
    as_stated = about(dense, 4e9) and about(gathered, 32e6)
    return {
        "share": relaxed * m["memory/policy_completion_tokens"] / kept["unrolled"], "rows kept": relaxed / row,
        "scattered over compact": scattered / m["memory/relax_topk_compact_bytes_per_token"],
        "less than a row": scattered < row, "gathered over dense": gathered / dense,
        "bag over gathered": m["memory/reward_bag_bytes"] / gathered,
        "reward matmul/verdict": "confirmed" if as_stated else "partly" if gathered < dense else "refuted",
        "reference cached over uncached": cached / uncached, "reference/peaks": peaks,
        "reference/note": f"{peaks}; the cache itself is {m['kv_cache_per_token']:.0f} bytes a token on Qwen3-4B, "
        f"{m['kv_cache'] / 1e6:.1f} MB",
        # The net effect may be right; the reason is not, since no_grad stores no activations in either case.
        "offset/verdict": "partly" if cached <= uncached else "refuted",
        "reference speedup": m["speed/reference_uncached_seconds"] / m["speed/reference_cached_seconds"],
        "unrolled over checkpointed": kept["unrolled"] / kept["checkpointed"],
        "unrolled over replay": kept["unrolled"] / kept["replay"],
        "policy/kept": ", ".join(f"{engine} {size / 1e6:.1f} MB" for engine, size in kept.items()),
        # The bytes decide. The time is a single one of each engine, and differs too much from run to run.
        "fewer bytes": kept["checkpointed"] < kept["unrolled"],
        "checkpointed over unrolled seconds": m["speed/checkpointed_over_replay"] / m["speed/unrolled_over_replay"],
        "weights/note": f"three copies of the weights, {m['weights_three_copies'] / 1e9:.1f} GB in bfloat16, are "
        "not in the table",
        "without over with freeing": m["memory/peak_without_freeing_bytes"] / m["memory/peak_with_freeing_bytes"],
    }  # fmt: skip


def _parity(m: Mapping[str, float]) -> dict[str, Any]:
    reward, kl = m["parity/reward_max_abs_diff"], m["parity/kl_max_abs_diff"]
    late = m["parity/kl_at_init_misaligned"]
    # Online KL is equal where it is aligned; as coded, it must also be 0 at the start, where both models are one.
    aligned = max(kl, m["parity/kl_at_init_max"]) <= EQUAL
    kl_verdict = "refuted" if not aligned else "confirmed" if late <= EQUAL else "partly"
    # Equal here; not the published trainer's, whose loss has no KL term and so leads elsewhere after a step.
    reward_verdict = "partly" if reward <= EQUAL else "refuted"
    return {
        "kl/verdict": kl_verdict, "reward/verdict": reward_verdict, "largest difference": max(reward, kl),
        "success/verdict": "refuted" if "refuted" in (kl_verdict, reward_verdict) else "partly",
        # Legacy is too slow to train to the end: what can be shown is that its steps are the same.
        "test/verdict": "partly" if max(reward, kl) <= EQUAL else "not testable",
        "accumulation/verdict": "partly" if m["parity/accumulation_rel_error"] <= ACCUMULATION_EQUAL else "refuted",
        "kl at start": f"KL at the start: {m['parity/kl_at_init_max']:.2g} aligned, {late:.3g} nats per token with the "
        "reference one position late, as published",
    }  # fmt: skip
