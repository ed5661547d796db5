"""Tiny policies, prompts and directions on which every completion can be enumerated."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.models.parameters import trained_parameters
from grade.models.prompts import PromptBatch


def tiny_policy(vocab: int = 5, width: int = 16, layers: int = 2, seed: int = 0) -> Backbone:
    """A random GPT-2 in float64 with an adapter whose B is not zero.

    Args:
        vocab: V; token 2 ends a completion.
        width: D.
        layers: L.
        seed: Seed of all weights.

    Returns:
        The policy, without a tokenizer.
    """
    config = GPT2Config(vocab_size=vocab, n_embd=width, n_layer=layers, n_head=4, n_positions=64, bos_token_id=1,
                        eos_token_id=[2], initializer_range=0.3, resid_pdrop=0.0, embd_pdrop=0.0,
                        attn_pdrop=0.0)  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        policy = Backbone(model, None, LoraSettings(r=2, alpha=4, target_modules=["c_attn"]))
        with torch.no_grad():
            for p in trained_parameters(policy):
                p.add_(0.3 * torch.randn(p.shape, dtype=p.dtype))
    return policy


def random_prompts(policy: Backbone, batch: int, length: int = 4, seed: int = 0) -> PromptBatch:
    """Prompts of random tokens, without padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, policy.vocab_size, (batch, length), generator=generator)
    return PromptBatch(ids, torch.ones_like(ids))


def random_direction(policy: Backbone, seed: int = 0) -> Tensor:
    """A random update vector of norm 1."""
    size = sum(p.numel() for p in trained_parameters(policy))
    v = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return v / v.norm()
