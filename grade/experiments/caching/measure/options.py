"""Document 002's options: what a training step keeps of the reference pass.

The step is a policy gradient with KL to the base (k3 estimator), on completions that exist already. The options differ
in how the reference's log-probabilities are obtained; all must give the same numbers and the same gradient.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Literal

import pandas as pd
import torch
from peft.tuners.lora import LoraLayer
from pydantic import Field
from torch import Tensor, nn

from grade.experiments.measured import progress
from grade.memory.records import LiveTracker
from grade.memory.settings import Microbatch, TracedConfig, generator_on, phase
from grade.memory.tracker import MemoryTracker
from grade.models.backbone import Backbone
from grade.models.head import token_logps
from grade.models.parameters import flatten
from grade.models.prompts import PromptBatch
from grade.models.scoring import completion_logps, predicting_hidden

Option = Literal["selected", "clone", "activations", "dual", "hybrid", "stored"]
OPTIONS: dict[Option, str] = {
    "clone": "1 as coded: also a clone of the logits",
    "selected": "1 as described: selected log-probs",
    "activations": "2 the reference's activations",
    "dual": "3 one pass, dual output",
    "hybrid": "4 selected, layers checkpointed",
    "stored": "stored once, layers checkpointed",
}
"""The document's four options, its first one twice, and the one that it leaves out."""


class CachingConfig(TracedConfig):
    """A policy-gradient step with one of document 002's options."""

    option: Option = Field("selected", description=", ".join(OPTIONS))
    kl_coef: float = Field(0.1, ge=0, description="weight beta of KL (k3 estimator)")

    def microbatch(self, backbone: Backbone, others: list[nn.Module]) -> Microbatch:  # noqa: D102
        prompts, generator = self.prompts(backbone), generator_on(backbone)
        shape = (self.batch_size, self.max_new_tokens)
        ids = torch.randint(backbone.vocab_size, shape, generator=generator, device=backbone.device)
        stored = torch.zeros(shape, device=backbone.device)

        def run(tracker: LiveTracker | None) -> None:
            update(backbone, prompts, ids, self.option, self.kl_coef, stored, tracker)

        return run


def update(
    backbone: Backbone,
    prompts: PromptBatch,
    ids: Tensor,
    option: Option = "selected",
    kl_coef: float = 0.1,
    stored: Tensor | None = None,
    tracker: LiveTracker | None = None,
) -> Tensor:
    """Add one gradient of ``-mean(logp) + beta * mean(k3)``: every completion with advantage 1.

    Reference log-probabilities [B, T].
    """
    mask, held = torch.ones_like(ids), None
    if option == "dual":
        hidden = _both(backbone, prompts, ids)
        logps = token_logps(backbone.head, hidden.flatten(0, 1), ids.repeat(2, 1).flatten()).view(2, *ids.shape)
        new, ref = logps[0], logps[1].detach()
    else:
        with phase(tracker, "reference"):
            ref, held = _reference(backbone, prompts, ids, option, stored)
        with backbone.checkpointed_layers(option in ("hybrid", "stored")):
            new = completion_logps(backbone, prompts, ids, mask)
    k3 = (ref - new).exp() - (ref - new) - 1
    (kl_coef * k3 - new).mean().backward()
    del held  # what the option keeps, it keeps until here
    return ref


def _reference(backbone: Backbone, prompts: PromptBatch, ids: Tensor, option: Option, stored: Tensor | None):
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


def compare_options(
    backbone: Backbone, prompts: PromptBatch, ids: Tensor, repeats: int = 1, kl_coef: float = 0.1
) -> pd.DataFrame:
    """Run every option for real.

    One row per option: ``seconds``, ``peak_bytes`` beyond what was there before, ``ref_max_abs_diff`` (nats) and
    ``grad_rel_diff`` against the option ``selected``.
    """
    with torch.no_grad(), backbone.reference():
        stored = completion_logps(backbone, prompts, ids, torch.ones_like(ids))
    parameters, rows, expected = backbone.trainable_parameters(), [], None
    for option in progress(["selected", *[o for o in OPTIONS if o != "selected"]], "options"):
        times = []
        for _ in range(repeats):
            backbone.zero_grad(set_to_none=True)
            start = time.perf_counter()
            ref = update(backbone, prompts, ids, option, kl_coef, stored)
            times.append(time.perf_counter() - start)
        grad = flatten(p.grad for p in parameters).double()
        expected = grad if expected is None else expected
        backbone.zero_grad(set_to_none=True)

        with MemoryTracker() as tracker:
            update(backbone, prompts, ids, option, kl_coef, stored)
        backbone.zero_grad(set_to_none=True)
        rows.append({
            "option": option, "seconds": sorted(times)[len(times) // 2],
            "peak_bytes": tracker.peak,
            "ref_max_abs_diff": float((ref - stored).abs().max()),
            "grad_rel_diff": float((grad - expected).norm() / expected.norm()),
        })  # fmt: skip
    return pd.DataFrame(rows).set_index("option").loc[list(OPTIONS)].reset_index()


@torch.no_grad()
def layer_differences(backbone: Backbone, prompts: PromptBatch, ids: Tensor) -> pd.DataFrame:
    """How far the policy's activations are from the base's on the same text, layer by layer.

    Columns layer (1 .. L) and relative_difference, ``|h_policy - h_base| / |h_base|`` over completion positions;
    attribute ``dropout`` is the same ratio between train and eval mode, adapter on (0 without dropout).
    """
    policy = _layer_outputs(backbone, prompts, ids)
    with backbone.reference():
        base = _layer_outputs(backbone, prompts, ids)
    backbone.model.train()
    training = _layer_outputs(backbone, prompts, ids)
    backbone.model.eval()
    table = pd.DataFrame({
        "layer": range(1, len(base) + 1),
        "relative_difference": [float((p - b).norm() / b.norm()) for p, b in zip(policy, base, strict=True)],
    })  # fmt: skip
    table.attrs["dropout"] = float((training[-1] - policy[-1]).norm() / policy[-1].norm())
    return table


def _layer_outputs(backbone: Backbone, prompts: PromptBatch, ids: Tensor) -> list[Tensor]:
    outputs: list[Tensor] = []

    def keep(module: nn.Module, args: tuple, out: Tensor | tuple) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        outputs.append(hidden[:, prompts.ids.shape[1] - 1 :].double())

    hooks = [layer.register_forward_hook(keep) for layer in _decoder_layers(backbone)]
    try:
        predicting_hidden(backbone, prompts, ids)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _decoder_layers(backbone: Backbone) -> list[nn.Module]:
    """The transformer's layers, whatever the model calls them: the longest list of modules."""
    lists = [m for m in backbone.decoder.modules() if isinstance(m, nn.ModuleList)]
    return list(max(lists, key=len))


@torch.no_grad()
def reference_that_keeps_its_adapter(backbone: Backbone, prompts: PromptBatch, ids: Tensor) -> Mapping[str, float]:
    """KL to the base, and to the document's fallback "reference": the same model with the adapter left on.

    ``kl_to_base`` and ``kl_to_itself``: mean k3 estimates in nats per token.
    """
    mask = torch.ones_like(ids)
    new, itself = (completion_logps(backbone, prompts, ids, mask) for _ in range(2))
    with backbone.reference():
        base = completion_logps(backbone, prompts, ids, mask)
    return {
        name: float(((ref - new).exp() - (ref - new) - 1).mean())
        for name, ref in (("kl_to_base", base), ("kl_to_itself", itself))
    }
