"""What experiments on traced steps share: bytes kept, a GRPO update, a step whose gradient a notebook writes."""

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import pandas as pd
import torch
from peft.tuners.lora import LoraLayer
from pydantic import Field
from torch import Tensor, nn

from grade.gradients.losses import clipped_surrogate
from grade.memory.models import build_backbone, model_config, with_layers
from grade.memory.settings import Microbatch, TracedConfig, generator_on
from grade.memory.shapes import ModelShape
from grade.memory.trace import Trace, trace_layers
from grade.memory.tracker import MemoryTracker
from grade.models.backbone import Backbone
from grade.models.head import certainty_of_logits, self_certainty, token_logps
from grade.models.prompts import PromptBatch
from grade.models.scoring import predicting_hidden

_BETA = 0.005
"""Weight of KL in `PolicyStepConfig`."""

_GROUPS = {
    "norms": {"input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"},
    "adapter inputs": {"q_proj", "k_proj", "v_proj", "o_proj", "lora_A", "lora_B"},
    "MLP": {"mlp", "gate_proj", "up_proj", "down_proj", "act_fn"},
}


def shape_of(name: str) -> ModelShape:
    """The shape of a model of Llama's family, for `grade.experiments.formulas`; names as in `model_config`."""
    config = model_config(name)
    heads = config.num_attention_heads
    return ModelShape(
        name, config.num_hidden_layers, config.hidden_size, heads, config.num_key_value_heads,
        getattr(config, "head_dim", None) or config.hidden_size // heads, config.intermediate_size, config.vocab_size,
        tied=bool(config.tie_word_embeddings), context=getattr(config, "max_position_embeddings", 0),
        qkv_bias=config.model_type == "qwen2", qk_norm=config.model_type == "qwen3",
    )  # fmt: skip


def kept_bytes(fn: Callable[[], object]) -> int:
    """Bytes that ``fn`` creates and that are alive with its result: lists, caches and closures too.

    >>> w = torch.ones(16, 4, requires_grad=True)
    >>> kept_bytes(lambda: (torch.ones(8, 16) @ w).exp().sum())     # ones: 8*16*4 = 512, exp: 8*4*4 = 128, the sum: 4
    644
    """
    gc.freeze()  # older objects do not count, and searching all of torch's would take most of the time
    try:
        with MemoryTracker(round_to=1) as tracker:
            result = fn()  # noqa: F841 - alive until the bytes are counted
        gc.collect()
        return tracker.current
    finally:
        gc.unfreeze()


def layer_inventory(config: TracedConfig) -> pd.DataFrame:
    """Tensors of a middle layer alive at the end of the forward pass with gradient; bytes are of all ``count``."""
    tracker = trace_layers(config, with_layers(model_config(config.model), 3), "cuda")
    last = max(record.birth for record in tracker.records if record.phase == "forward")
    counts: Counter = Counter()
    for record in tracker.alive_at(last):
        _, inside, module = record.module.partition(".layers.1.")
        if inside:
            counts[module, record.op, record.shape, str(record.dtype).removeprefix("torch."), record.nbytes] += 1
    rows = []
    for (module, op, shape, dtype, nbytes), n in counts.items():
        parts = set(module.split("."))
        group = next((group for group, names in _GROUPS.items() if parts & names), "attention")
        rows.append((group, module, op, shape, dtype, n, n * nbytes))
    return pd.DataFrame(rows, columns=["group", "module", "op", "shape", "dtype", "count", "bytes"])


@contextlib.contextmanager
def adapter_on_rows(backbone: Backbone, rows: int) -> Iterator[None]:
    """Within this context the adapter acts on the first ``rows`` sequences of a batch only.

    PEFT's own ``adapter_names`` does the same with one product per group of rows, but only in inference.
    """

    def cut(module: nn.Module, args: tuple, out: Tensor) -> Tensor:
        return torch.cat([out[:rows], torch.zeros_like(out[rows:])])

    layers = [m for m in backbone.model.modules() if isinstance(m, LoraLayer)]
    hooks = [b.register_forward_hook(cut) for layer in layers for b in layer.lora_B.values()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class GivenStep(TracedConfig):
    """A step on completions that exist already, with the reference's log-probabilities of them stored.

    ``update(backbone, prompts, ids, stored)`` adds the gradient; ids and stored values are [B, T].
    """

    update: Callable[[Backbone, PromptBatch, Tensor, Tensor], object] = Field(description="adds the gradient")

    def microbatch(self, backbone: Backbone) -> Microbatch:  # noqa: D102
        prompts, ids = self.prompts(backbone), _completions(self, backbone)
        stored = torch.zeros(ids.shape, device=backbone.device)
        return lambda: self.update(backbone, prompts, ids, stored)


def _completions(config: TracedConfig, backbone: Backbone) -> Tensor:
    shape = (config.batch_size, config.max_new_tokens)
    return torch.randint(backbone.vocab_size, shape, generator=generator_on(backbone), device=backbone.device)


class PolicyStepConfig(TracedConfig):
    """The update of GRPO or Intuitor as documents describe it.

    Completions are given (a separate engine sampled them) and scored without gradient under policy and reference, then
    a clipped policy-gradient loss is backpropagated. Left out: the sampling engine's weights and caches, and a critic.
    """

    logits: Literal["chunked", "all"] = Field(
        "chunked", description="chunked: a few rows at a time; all: those of prompts and completions at once"
    )
    self_certainty: bool = Field(False, description="score self-certainty, Intuitor's reward")

    def microbatch(self, backbone: Backbone) -> Microbatch:  # noqa: D102
        prompts, ids = self.prompts(backbone), _completions(self, backbone)
        mask, advantages = torch.ones_like(ids), torch.ones(len(ids), 1, device=backbone.device)

        def logps(certain: bool = False) -> list[Tensor]:  # and self-certainty
            if self.logits == "all":
                return _dense(backbone, prompts, ids, certain)
            rows = predicting_hidden(backbone, prompts, ids).flatten(0, 1)
            values = [token_logps(backbone.head, rows, ids.flatten())]
            if certain:
                values.append(self_certainty(backbone.head, rows))
            return [value.view(mask.shape) * mask for value in values]

        def run() -> None:
            with self.casting(backbone):
                with backbone.phase("scoring"), torch.no_grad():
                    old = logps(self.self_certainty)[0]
                with backbone.phase("reference"), torch.no_grad(), backbone.reference():
                    [ref] = logps()
                with backbone.checkpointed_layers(self.gradient_checkpointing):
                    [new] = logps()
                surrogate = clipped_surrogate(new, old, advantages, 0.2)
                kl = (ref - new).expm1() - (ref - new)
                loss = ((_BETA * kl - surrogate) * mask).sum() / mask.sum()
            loss.backward()

        return run


def _dense(backbone: Backbone, prompts: PromptBatch, ids: Tensor, certain: bool) -> list[Tensor]:
    """The usual way: logits of all positions at once, in float32."""
    inputs = torch.cat([prompts.ids, ids], 1)
    every = torch.cat([prompts.mask, torch.ones_like(ids)], 1)
    logits = backbone.head(backbone.hidden(backbone.embed(inputs), every))  # [B, P + T, V]
    logits = logits[:, prompts.ids.shape[1] - 1 : -1]
    certainty = [certainty_of_logits(logits)] if certain else []
    return [logits.log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2), *certainty]


def zero3_share(whole: Trace, config: TracedConfig, gpus: int) -> Trace:
    """One of several GPUs that divide weights, gradients and optimizer state (ZeRO-3), by arithmetic.

    Gathered whole at any time: the tables, two layers (the one that runs and the next), and one layer's gradients.
    Left out: buffers of the communication library.
    """
    model = model_config(config.model)
    bases = (build_backbone(with_layers(model, n), config.dtype, "full") for n in (1, 2))
    one, two = (sum(p.numel() * p.element_size() for p in base.parameters()) for base in bases)
    layer, table = two - one, 2 * one - two
    divided = ("weights", "adapter", "gradients", "optimizer")
    phases = {}
    for name, parts in whole.phases.items():
        phases[name] = {c: -(-n // gpus) if c in divided else n for c, n in parts.items()}
        phases[name]["weights"] += table + 2 * layer
        phases[name]["gradients"] += layer if config.adapter == "full" and name == "backward" else 0
    return replace(whole, phases=phases)
