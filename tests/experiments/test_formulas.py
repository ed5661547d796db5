"""Parameter counts against published ones and the real modules; formulas against hand arithmetic and real tensors."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from grade.experiments import formulas
from grade.experiments.formulas import parameter_count
from grade.memory.shapes import QWEN3_4B, QWEN25_1_5B, QWEN25_3B, QWEN25_7B, SMOLLM2_135M


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (SMOLLM2_135M, 134_515_008),
        (QWEN3_4B, 4_022_468_096),
        (QWEN25_1_5B, 1_543_714_304),
        (QWEN25_3B, 3_085_938_688),
        (QWEN25_7B, 7_615_616_512),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_parameter_count_is_exact(shape, expected):
    assert parameter_count(shape) == expected


def test_sizes_are_those_of_real_tensors():
    batch, tokens, vocab, k, hidden = 2, 3, 50, 4, 6
    logits = torch.zeros(batch, tokens, vocab)
    values, indices = logits.topk(k)
    assert formulas.rows_bytes(batch, tokens, vocab) == logits.nbytes
    assert formulas.rows_bytes(batch, tokens, vocab, 2) == logits.bfloat16().nbytes
    assert formulas.topk_bytes(batch, tokens, k) == values.nbytes + indices.nbytes
    assert formulas.topk_bytes(batch, tokens, k, 2, 4) == values.bfloat16().nbytes + indices.int().nbytes
    gathered = torch.zeros(vocab, hidden, dtype=torch.bfloat16)[indices]
    assert formulas.gathered_embedding_bytes(batch, tokens, k, hidden) == gathered.nbytes


def test_kv_cache_is_that_of_a_real_cache():
    shape = dataclasses.replace(SMOLLM2_135M, layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, vocab=64)
    config = LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
        vocab_size=64,
    )
    cache = AutoModelForCausalLM.from_config(config)(input_ids=torch.zeros(1, 5, dtype=torch.long)).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert formulas.kv_cache_bytes_per_token(shape, itemsize=4) * 5 == held


@pytest.mark.parametrize(("prompt", "new"), [(32, 64), (32, 128), (1, 1), (5, 3)])
def test_sums_are_those_of_the_loops(prompt, new):
    lengths = range(prompt, prompt + new)
    assert formulas.token_forwards_uncached(prompt, new) == sum(lengths)
    assert formulas.attention_scores_uncached(prompt, new) == sum(n * n for n in lengths)
    assert formulas.token_forwards_cached(prompt, new) == prompt + new


def test_mixing_flops_and_weights_by_hand():
    assert formulas.mixing_flops(1, 64, 32_000, 4096) == 2 * 64 * 32_000 * 4096  # 16.8 G
    assert formulas.weights_bytes(QWEN3_4B) == 8_044_936_192
    assert formulas.weights_bytes(QWEN3_4B, copies=3, itemsize=4) == 3 * 4 * 4_022_468_096
