"""The tables of the experiment on activation caching, and the settings that they depend on.

Document 002's options are what a training step keeps of the reference pass. The step is a policy gradient with KL to
the base (k3 estimator), on completions that exist already. The options differ in how the reference's log-probabilities
are obtained; all must give the same numbers and the same gradient.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Literal

import pandas as pd
import torch
from peft.tuners.lora import LoraLayer
from pydantic import Field
from torch import Tensor, nn

from grade.config import Config
from grade.experiments.measured import Size
from grade.experiments.setting import TRAINED_RUN, load_policy, text_sequences
from grade.experiments.traced import PolicyStepConfig
from grade.memory.models import model_config, with_layers
from grade.memory.settings import Microbatch, TracedConfig, generator_on
from grade.memory.tables import categories_table, timelines_table
from grade.memory.trace import Trace, trace, trace_layers
from grade.memory.tracker import MemoryTracker
from grade.models.backbone import Backbone
from grade.models.head import token_logps
from grade.models.parameters import flatten
from grade.models.prompts import PromptBatch
from grade.models.scoring import completion_logps, predicting_hidden
from grade.results import progress

OPTIONS = {
    "clone": "1 as coded: also a clone of the logits",
    "selected": "1 as described: selected log-probs",
    "activations": "2 the reference's activations",
    "dual": "3 one pass, dual output",
    "hybrid": "4 selected, layers checkpointed",
    "stored": "stored once, layers checkpointed",
}
"""The document's four options, its first one twice, and the one that it leaves out."""
Option = Literal[tuple(OPTIONS)]
_GROUPS = {
    "norms": {"input_layernorm", "post_attention_layernorm", "q_norm", "k_norm"},
    "adapter inputs": {"q_proj", "k_proj", "v_proj", "o_proj", "lora_A", "lora_B"},
    "MLP": {"mlp", "gate_proj", "up_proj", "down_proj", "act_fn"},
}
_TIMELINES = ("selected", "hybrid")
"""Options whose live bytes are shown over a step: without and with checkpointed layers."""
_BETA = 0.1
"""Weight of KL."""
COPY = "copy"
"""Not an option: ``selected`` with a second base."""


class Settings(Config):
    """Sizes of the experiment on activation caching."""

    model: str = "tiny"  # shape of the traced model; the document's is qwen2.5-coder-3b
    batch: Size = 2  # B
    prompt_tokens: Size = 8  # P; in the document prompt and completion have 512 tokens together
    new_tokens: Size = 8  # T
    backbone_dir: str = ""  # folder of the model that runs; empty: a tiny random one
    runs_dir: str = ""  # folder of training runs, where its adapter is
    reviews_dir: str = ""  # folder of the review splits
    measured_prompt_tokens: Size = 4  # P of the steps that run, of two sequences
    measured_new_tokens: Size = 8  # T
    repeats: Size = 1  # how often each option is timed; the median counts

    def config(self, **options: Any) -> CachingConfig:
        """A step of the document's model, batch and length."""
        return CachingConfig(**self.sizes, **options)

    @property
    def sizes(self) -> dict[str, Any]:
        """Model, B, P and T of what is traced."""
        return dict(model=self.model, batch_size=self.batch, prompt_tokens=self.prompt_tokens,
                    max_new_tokens=self.new_tokens)  # fmt: skip

    @cached_property
    def traces(self) -> dict[str, Trace]:
        """Traces of all options, and of `COPY`."""
        configs = {option: self.config(option=option) for option in OPTIONS}
        configs[COPY] = self.config(option="selected", base_copies=2)
        return {name: trace(config) for name, config in configs.items()}

    @cached_property
    def policy(self) -> tuple[Backbone, PromptBatch, Tensor]:
        """The trained policy, and text as prompts and completions."""
        adapter = f"{self.runs_dir}/{TRAINED_RUN}/adapter" if self.runs_dir else ""
        backbone, texts = load_policy(self.backbone_dir, adapter, self.reviews_dir)
        return backbone, *text_sequences(backbone, texts, 2, self.measured_prompt_tokens, self.measured_new_tokens)

    @cached_property
    def compared(self) -> pd.DataFrame:
        """The options, run."""
        return _compared(self)

    @cached_property
    def differences(self) -> tuple[pd.DataFrame, float]:
        """The policy's activations against the base's."""
        return _layer_differences(*self.policy)


class CachingConfig(TracedConfig):
    """A policy-gradient step with one of document 002's options."""

    option: Option = Field("selected", description=", ".join(OPTIONS))

    def microbatch(self, backbone: Backbone) -> Microbatch:  # noqa: D102
        prompts, generator = self.prompts(backbone), generator_on(backbone)
        shape = (self.batch_size, self.max_new_tokens)
        ids = torch.randint(backbone.vocab_size, shape, generator=generator, device=backbone.device)
        stored = torch.zeros(shape, device=backbone.device)

        def run() -> None:
            _update(backbone, prompts, ids, self.option, stored)

        return run


def _update(
    backbone: Backbone, prompts: PromptBatch, ids: Tensor, option: Option, stored: Tensor,
) -> Tensor:  # fmt: skip
    """Add one gradient of ``-mean(logp) + beta * mean(k3)``, every completion with advantage 1.

    The reference's log-probabilities [B, T], which with option ``stored`` are those given.
    """
    mask, held = torch.ones_like(ids), None
    if option == "dual":
        hidden = _both(backbone, prompts, ids)
        logps = token_logps(backbone.head, hidden.flatten(0, 1), ids.repeat(2, 1).flatten()).view(2, *ids.shape)
        new, ref = logps[0], logps[1].detach()
    else:
        with backbone.phase("reference"):
            ref, held = _reference(backbone, prompts, ids, option, stored)
        with backbone.checkpointed_layers(option in ("hybrid", "stored")):
            new = completion_logps(backbone, prompts, ids, mask)
    k3 = (ref - new).exp() - (ref - new) - 1
    (_BETA * k3 - new).mean().backward()
    del held  # what the option keeps, it keeps until here
    return ref


def _reference(backbone: Backbone, prompts: PromptBatch, ids: Tensor, option: Option, stored: Tensor):
    """Log-probabilities, and what an option keeps besides them."""
    if option == "stored":
        return stored, None
    if option == "clone":
        with torch.no_grad(), backbone.reference():
            logits = backbone.head(predicting_hidden(backbone, prompts, ids))  # [B, T, V]
            selected = logits.log_softmax(-1).gather(2, ids.unsqueeze(2)).squeeze(2)
            return selected, logits.to(backbone.dtype).clone()
    if option == "activations":
        # A graph from the embeddings on keeps what a backward pass would need: that is what "activations" are.
        with backbone.reference():
            embeds = backbone.embed(torch.cat([prompts.ids, ids[:, :-1]], 1)).detach().requires_grad_()
            every = torch.cat([prompts.mask, torch.ones_like(ids[:, 1:])], 1)
            hidden = backbone.hidden(embeds, every)[:, prompts.ids.shape[1] - 1 :]
        with torch.no_grad():
            selected = token_logps(backbone.head, hidden.flatten(0, 1), ids.flatten()).view(ids.shape)
        return selected, hidden
    with torch.no_grad(), backbone.reference():
        return completion_logps(backbone, prompts, ids, torch.ones_like(ids)), None


def _both(backbone: Backbone, prompts: PromptBatch, ids: Tensor) -> Tensor:
    """Hidden states [2B, T, D] of one pass over [x; x]: policy first, then base."""
    twice = PromptBatch(prompts.ids.repeat(2, 1), prompts.mask.repeat(2, 1))
    with adapter_on_rows(backbone, len(ids)):
        return predicting_hidden(backbone, twice, ids.repeat(2, 1))


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


def _compared(s: Settings) -> pd.DataFrame:
    """Run every option: seconds, bytes beyond what was there before, differences to ``selected``; nats, relative."""
    backbone, prompts, ids = s.policy
    with torch.no_grad(), backbone.reference():
        stored = completion_logps(backbone, prompts, ids, torch.ones_like(ids))
    parameters, rows, expected = backbone.trainable_parameters(), {}, None
    for option in progress(sorted(OPTIONS, key=lambda option: option != "selected"), "options"):
        times = []
        for _ in range(s.repeats):
            backbone.zero_grad(set_to_none=True)
            start = time.perf_counter()
            ref = _update(backbone, prompts, ids, option, stored)
            times.append(time.perf_counter() - start)
        grad = flatten(p.grad for p in parameters).double()
        expected = grad if expected is None else expected
        backbone.zero_grad(set_to_none=True)

        with MemoryTracker() as tracker:
            _update(backbone, prompts, ids, option, stored)
        backbone.zero_grad(set_to_none=True)
        rows[option] = {
            "option": option, "seconds": sorted(times)[len(times) // 2],
            "peak_bytes": tracker.peak,
            "ref_max_abs_diff": float((ref - stored).abs().max()),
            "grad_rel_diff": float((grad - expected).norm() / expected.norm()),
        }  # fmt: skip
    return pd.DataFrame(rows[option] for option in OPTIONS)


@torch.no_grad()
def _layer_differences(backbone: Backbone, prompts: PromptBatch, ids: Tensor) -> tuple[pd.DataFrame, float]:
    """How far the policy's activations are from the base's on the same text, layer by layer.

    ``|h_policy - h_base| / |h_base|`` over completion positions, and the same ratio of the last layer between train and
    eval mode, adapter on (0 without dropout).
    """
    policy = _layer_outputs(backbone, prompts, ids)
    with backbone.reference():
        base = _layer_outputs(backbone, prompts, ids)
    backbone.model.train()
    training = _layer_outputs(backbone, prompts, ids)
    backbone.model.eval()
    differences = [float((p - b).norm() / b.norm()) for p, b in zip(policy, base, strict=True)]
    table = pd.DataFrame({"layer": range(1, len(base) + 1), "relative_difference": differences})
    return table, float((training[-1] - policy[-1]).norm() / policy[-1].norm())


def _layer_outputs(backbone: Backbone, prompts: PromptBatch, ids: Tensor) -> list[Tensor]:
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: tuple, out: Tensor | tuple) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        outputs.append(hidden[:, prompts.ids.shape[1] - 1 :].double())

    # The transformer's layers, whatever the model calls them: the longest list of modules.
    lists = [m for m in backbone.decoder.modules() if isinstance(m, nn.ModuleList)]
    hooks = [layer.register_forward_hook(keep) for layer in max(lists, key=len)]
    try:
        predicting_hidden(backbone, prompts, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


@torch.no_grad()
def _kls(backbone: Backbone, prompts: PromptBatch, ids: Tensor) -> dict[str, float]:
    """Mean k3 in nats per token to the base, and to the document's fallback: the same model, its adapter left on."""
    mask = torch.ones_like(ids)
    new, itself = (completion_logps(backbone, prompts, ids, mask) for _ in range(2))
    with backbone.reference():
        base = completion_logps(backbone, prompts, ids, mask)
    return {
        name: float(((ref - new).exp() - (ref - new) - 1).mean())
        for name, ref in (("kl_to_base", base), ("kl_to_itself", itself))
    }


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


def _layer(s: Settings) -> pd.DataFrame:
    """What a middle layer keeps for backward in a pass with all logits and no reference; shapes as text."""
    tables = []
    for attention in ("sdpa", "eager"):
        config = PolicyStepConfig(**s.sizes, attention=attention, logits="all", reference=False)
        tables.append(layer_inventory(config).assign(attention=attention))
    table = pd.concat(tables, ignore_index=True)
    return table.assign(shape=[" x ".join(map(str, shape)) for shape in table["shape"]])


TABLES = {
    "layer": _layer,
    "peaks": lambda s: pd.DataFrame(
        dict(option=option, peak_bytes=t.peak, step_bytes=t.step_bytes) for option, t in s.traces.items()
    ),
    "categories": lambda s: categories_table({option: s.traces[option] for option in OPTIONS}),
    "timelines": lambda s: timelines_table(
        {option: trace(s.config(option=option), all_layers=True) for option in _TIMELINES}
    ),
    "agreement": lambda s: s.compared.drop(columns="seconds"),
    "layer_differences": lambda s: s.differences[0],
    "policy": lambda s: _kls(*s.policy) | {"dropout": s.differences[1]},
}
TIMED = {"seconds": lambda s: s.compared[["option", "seconds"]]}
