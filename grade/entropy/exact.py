"""Exact entropy, its gradient and its true change, by enumerating every completion of a tiny vocabulary.

The reference for the estimators. The number of completions grows as V^T, so tens of thousands at most.
"""

from __future__ import annotations

import torch
from torch import Tensor

from grade.entropy.samples import Samples
from grade.errors import InputError
from grade.models.backbone import Backbone
from grade.models.parameters import flatten, moved, trained_parameters
from grade.models.prompts import PromptBatch
from grade.models.scoring import predicting_hidden

LARGEST = 100_000
"""Largest number of completions that is enumerated."""


def every_completion(vocab: int, length: int, eos: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """All completions of at most ``length`` tokens: those that end in an end-of-sequence token, and those cut off.

    Args:
        vocab: V.
        length: T.
        eos: Ids that end a completion.

    Returns:
        Ids [N, T] (0 after the end) and mask [N, T]. Probabilities over them sum to one.

    Raises:
        InputError: If there are too many.

    >>> ids, mask = every_completion(3, 2, (0,))
    >>> [row[: int(n)].tolist() for row, n in zip(ids, mask.sum(1))]
    [[0], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1], [2, 2]]
    """
    if vocab**length > LARGEST:
        raise InputError("completions to enumerate", vocab**length, f"at most {LARGEST}")
    rows: list[list[int]] = [[]]
    for _ in range(length):
        rows = [[*r, v] for r in rows for v in range(vocab) if not (r and r[-1] in eos)] + [
            r for r in rows if r and r[-1] in eos
        ]
    rows.sort()
    ids = torch.tensor([r + [0] * (length - len(r)) for r in rows])
    mask = torch.tensor([[1] * len(r) + [0] * (length - len(r)) for r in rows])
    return ids, mask


def completion_logps(backbone: Backbone, prompts: PromptBatch, length: int, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of every completion of every prompt, with gradient, from dense logits.

    Args:
        backbone: A tiny policy.
        prompts: B prompts.
        length: T.
        temperature: Sampling temperature.

    Returns:
        S [B, N] in nats.
    """
    ids, mask = every_completion(backbone.vocab_size, length, backbone.eos_token_ids)
    rows = []
    for n in range(len(prompts)):
        many = prompts[n : n + 1].repeat(len(ids))
        logp = (backbone.head(predicting_hidden(backbone, many, ids)) / temperature).log_softmax(-1)  # [N, T, V]
        rows.append((logp.gather(2, ids.unsqueeze(2)).squeeze(2) * mask).sum(1))
    return torch.stack(rows)


def exact_entropy(backbone: Backbone, prompts: PromptBatch, length: int, temperature: float = 1.0) -> Tensor:
    """H in nats per completion, mean over prompts; differentiable in the adapter.

    Args:
        backbone: A tiny policy.
        prompts: B prompts.
        length: T.
        temperature: Sampling temperature.

    Returns:
        A scalar.
    """
    logps = completion_logps(backbone, prompts, length, temperature)
    return -(logps.exp() * logps).sum(1).mean()


def exact_gradient(backbone: Backbone, prompts: PromptBatch, length: int, temperature: float = 1.0) -> Tensor:
    """``grad H`` [P] by enumeration."""
    parameters = trained_parameters(backbone)
    grads = torch.autograd.grad(exact_entropy(backbone, prompts, length, temperature), parameters)
    return flatten(grads)


def exact_change(
    backbone: Backbone, prompts: PromptBatch, length: int, vector: Tensor, eta: float, temperature: float = 1.0
) -> float:
    """``H(theta + eta v) - H(theta)`` by enumeration; the parameters are restored.

    Args:
        backbone: A tiny policy.
        prompts: B prompts.
        length: T.
        vector: v [P].
        eta: Step size.
        temperature: Sampling temperature.

    Returns:
        The true change in nats.
    """
    with torch.no_grad():
        before = exact_entropy(backbone, prompts, length, temperature)
        with moved(backbone, vector, eta):
            after = exact_entropy(backbone, prompts, length, temperature)
    return float(after - before)


def all_as_samples(
    backbone: Backbone, prompts: PromptBatch, length: int, temperature: float = 1.0
) -> tuple[Samples, Tensor]:
    """Every completion as a sample, with its probability [B, N]: for expectations instead of sample means."""
    ids, mask = every_completion(backbone.vocab_size, length, backbone.eos_token_ids)
    batch = len(prompts)
    samples = Samples(prompts, ids.expand(batch, -1, -1), mask.expand(batch, -1, -1), temperature)
    with torch.no_grad():
        return samples, completion_logps(backbone, prompts, length, temperature).exp()
