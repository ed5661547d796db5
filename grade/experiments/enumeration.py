"""Tiny policies of which every completion can be enumerated: the exact values that estimators are compared with."""

import itertools

import torch
from peft import LoraConfig
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config

from grade.entropy.samples import Samples
from grade.entropy.vector import moved
from grade.models.backbone import Backbone
from grade.models.parameters import flatten, trained_parameters
from grade.models.prompts import PromptBatch, padded
from grade.models.scoring import predicting_hidden


def tiny_policy() -> Backbone:
    """A random GPT-2 of five tokens in float64; its adapter's B is not zero, and token 2 ends a completion."""
    config = GPT2Config(vocab_size=5, n_embd=16, n_layer=2, n_head=4, n_positions=64, bos_token_id=1,
                        eos_token_id=[2], initializer_range=0.3, resid_pdrop=0.0, embd_pdrop=0.0,
                        attn_pdrop=0.0)  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        # GPT-2's weights are [in, out]: PEFT would find that out, and warn.
        lora = LoraConfig(r=2, lora_alpha=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        policy = Backbone(model, None, lora)
        with torch.no_grad():
            for p in trained_parameters(policy):
                p.add_(0.3 * torch.randn(p.shape, dtype=p.dtype))
    return policy


def random_prompts(policy: Backbone, batch: int, seed: int = 0) -> PromptBatch:
    """Prompts of four random tokens, without padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, policy.vocab_size, (batch, 4), generator=generator)
    return PromptBatch(ids, torch.ones_like(ids))


def random_direction(policy: Backbone) -> Tensor:
    """A random update vector of norm 1."""
    size = sum(p.numel() for p in trained_parameters(policy))
    v = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return v / v.norm()


def every_completion(vocab: int, length: int, eos: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """All completions of at most ``length`` tokens, ended or cut off: ids (0 after the end) and mask, both [N, T].

    N grows as ``vocab**length``.

    >>> ids, mask = every_completion(3, 2, (0,))
    >>> [row[: int(n)].tolist() for row, n in zip(ids, mask.sum(1))]
    [[0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]]
    """
    every = itertools.product(range(vocab), repeat=length)
    rows = sorted({row[: next((t + 1 for t, token in enumerate(row) if token in eos), length)] for row in every})
    return padded(rows)


def completion_logps(backbone: Backbone, prompts: PromptBatch, length: int) -> Tensor:
    """Log-probabilities [B, N] in nats of every completion of every prompt, with gradient, from dense logits."""
    ids, mask = every_completion(backbone.vocab_size, length, backbone.eos_token_ids)
    rows = []
    for n in range(len(prompts)):
        many = prompts[n : n + 1].repeat(len(ids))
        logp = backbone.head(predicting_hidden(backbone, many, ids)).log_softmax(-1)  # [N, T, V]
        rows.append((logp.gather(2, ids.unsqueeze(2)).squeeze(2) * mask).sum(1))
    return torch.stack(rows)


def exact_entropy(backbone: Backbone, prompts: PromptBatch, length: int) -> Tensor:
    """H in nats per completion, a scalar, mean over prompts; differentiable in the adapter."""
    logps = completion_logps(backbone, prompts, length)
    return -(logps.exp() * logps).sum(1).mean()


def exact_gradient(backbone: Backbone, prompts: PromptBatch, length: int) -> Tensor:
    """``grad H`` [P]."""
    parameters = trained_parameters(backbone)
    grads = torch.autograd.grad(exact_entropy(backbone, prompts, length), parameters)
    return flatten(grads)


@torch.no_grad()
def exact_change(backbone: Backbone, prompts: PromptBatch, length: int, vector: Tensor, eta: float) -> float:
    """``H(theta + eta v) - H(theta)`` in nats; the parameters are restored."""
    before = exact_entropy(backbone, prompts, length)
    with moved(backbone, vector, eta):
        after = exact_entropy(backbone, prompts, length)
    return float(after - before)


@torch.no_grad()
def all_as_samples(backbone: Backbone, prompts: PromptBatch, length: int) -> tuple[Samples, Tensor]:
    """Every completion as a sample, with its probability [B, N]: for expectations instead of sample means."""
    ids, mask = every_completion(backbone.vocab_size, length, backbone.eos_token_ids)
    batch = len(prompts)
    samples = Samples(prompts, ids.expand(batch, -1, -1), mask.expand(batch, -1, -1))
    return samples, completion_logps(backbone, prompts, length).exp()
