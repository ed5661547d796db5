"""A tiny language model with random weights, and its training on text: for the toy task, tests and experiments.

A byte-level BPE and a Llama of about a million parameters. Trained on reviews it writes review-like text, locally
grammatical and with words of sentiment: enough for a policy, a reward and a reference, but not good text. It is trained
for a fixed number of steps, so the result does not depend on the machine's speed. The layers' matrices are trained by
Muon, embedding and norms by AdamW: after 300 steps of the default settings the training loss is 5.2 nats per token,
with AdamW alone 5.6.

Left out: training for more than a few minutes on a CPU; contexts longer than a prompt with its completion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from grade.config import SEEDS, Config

HEADS, MAX_POSITIONS = 4, 256
BATCH_SIZE = 16
"""Windows per step."""
MUON_LR, ADAMW_LR = 0.01, 5e-3
"""Peak learning rates: of the layers' matrices, of embedding and norms."""


class PretrainConfig(Config):
    """The tiny language model: shape, text, optimisation."""

    vocab_size: int = Field(2048, ge=260, le=2**20, description="vocabulary size V of the BPE, eos and pad included")
    hidden_size: int = Field(128, ge=8, multiple_of=8, description="width D")
    intermediate_size: int = Field(352, ge=8, description="width of the feed-forward layers")
    layers: int = Field(4, ge=1, le=1024, description="number of layers")
    context: int = Field(64, ge=4, description="tokens of a training window")
    steps: int = Field(1000, ge=2, le=10**8, description="optimizer steps")
    warmup_steps: int = Field(50, ge=0, description="linear warm-up; then linear decay to 0 over the second half")
    eval_windows: int = Field(512, ge=2, description="windows of the test split that are scored")
    seed: int = Field(0, ge=0, lt=SEEDS, description="seed of weights and order of the windows")


class _Muon(torch.optim.Optimizer):
    """Momentum, then the nearest matrix with orthonormal rows or columns (Jordan et al. 2024), in float32.

    torch's own works in bfloat16, which is ten times slower than the rest of a step on CPUs without such instructions.
    Matrices of one shape are orthogonalised together. Left out: weight decay.

    An update has root mean square ``0.2 lr`` for every shape (Liu et al. 2025); the momentum is Nesterov's.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Take a step."""
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[Tensor]] = {}
            for p in group["params"]:
                shapes.setdefault(tuple(p.shape), []).append(p)
            for shape, same in shapes.items():
                updates = []
                for p in same:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    average.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(average, group["momentum"]))
                scale = 0.2 * group["lr"] * max(shape) ** 0.5
                for p, update in zip(same, _orthogonalised(torch.stack(updates)), strict=True):
                    p.sub_(update, alpha=scale)


def _orthogonalised(matrices: Tensor, iterations: int = 5) -> Tensor:
    """``U V'`` of each matrix ``U S V'``, roughly: singular values end between 0.7 and 1.2.

    Newton-Schulz iteration with a quintic polynomial whose slope at 0 is large (Jordan et al. 2024).

    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(iterations):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.mT if tall else x


def new_model(config: PretrainConfig, vocab_size: int) -> LlamaForCausalLM:
    """The model with random weights, float32."""
    torch.manual_seed(config.seed)
    return _small_llama(
        vocab_size=vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        max_position_embeddings=MAX_POSITIONS,
    )  # fmt: skip


def text_windows(tokenizer: Any, texts: Sequence[str], context: int) -> Tensor:
    """The texts as one stream, an eos after each, in windows of token ids [N, L + 1] that overlap by one token.

    Inputs are the first L columns, targets the last L. A remainder at the end is dropped.
    """
    ids = tokenizer(list(texts))["input_ids"]
    stream = torch.tensor([token for row in ids for token in [*row, tokenizer.eos_token_id]])
    n = (len(stream) - 1) // context
    return stream[: n * context + 1].unfold(0, context + 1, context)


def fit(model: PreTrainedModel, config: PretrainConfig, windows: Tensor, log: Callable[[str], None]) -> float:
    """Train in place over shuffled passes through windows [N, L + 1].

    Returns the mean training loss of the last tenth of the steps, in nats per token.
    """
    generator = torch.Generator().manual_seed(config.seed)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        _Muon(matrices, lr=MUON_LR),
        torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: _schedule(s, config)) for o in optimizers]
    order = torch.zeros(0, dtype=torch.long)
    losses = []
    model.train()
    for step in range(config.steps):
        while len(order) < BATCH_SIZE:
            order = torch.cat([order, torch.randperm(len(windows), generator=generator)])
        batch, order = windows[order[:BATCH_SIZE]], order[BATCH_SIZE:]
        loss = window_nats(model, batch).mean()
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for part in (*optimizers, *schedules):
            part.step()
        losses.append(float(loss.detach()))
        if (step + 1) % max(1, config.steps // 10) == 0:
            log(f"step {step + 1:>5}/{config.steps}  {np.mean(losses[-config.steps // 10 :]):.3f} nats per token")
    model.eval()
    return float(np.mean(losses[-max(1, config.steps // 10) :]))


def _schedule(step: int, config: PretrainConfig) -> float:
    """Factor of the learning rate at a step, from 0: up over `warmup_steps`, 1, down to 0 over the second half.

    >>> config = PretrainConfig(steps=100, warmup_steps=10)
    >>> [_schedule(s, config) for s in (0, 9, 50, 75, 99)]
    [0.1, 1.0, 1.0, 0.5, 0.02]
    """
    return min(1.0, (step + 1) / max(1, config.warmup_steps), (config.steps - step) / (config.steps / 2))


def window_nats(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """Negative log-likelihood in nats [B, L] of each target of windows [B, L + 1]."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none").view(len(windows), -1)


def tiny_model(
    texts: Iterable[str], vocab_size: int, hidden_size: int, layers: int, seed: int = 0
) -> tuple[PreTrainedModel, Any]:
    """A random Llama and a byte-level BPE trained on the texts."""
    tokenizer = train_tokenizer(texts, vocab_size)
    torch.manual_seed(seed)
    model = _small_llama(
        vocab_size=len(tokenizer), hidden_size=hidden_size, intermediate_size=2 * hidden_size,
        num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.1,
    )  # fmt: skip
    return model, tokenizer


def _small_llama(**sizes: Any) -> LlamaForCausalLM:
    """A Llama with random weights and tied embeddings for `train_tokenizer`'s ids: 0 is eos, 1 is pad."""
    config = LlamaConfig(tie_word_embeddings=True, bos_token_id=None, eos_token_id=0, pad_token_id=1, **sizes)
    return LlamaForCausalLM(config)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE, which encodes any text and decodes it back unchanged.

    At most ``vocab_size`` tokens, including the 256 bytes, eos (id 0) and pad (id 1).
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<eos>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet,
                                  show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[1])
