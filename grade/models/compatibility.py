"""What a model must do to be a backbone: checked once, when it is built, on a dozen tokens.

Everything after this relies on four things that transformers promises for no model in particular: embeddings instead of
ids give the same logits; a pass over a left-padded batch, decoding on a key-value cache, and a pass with recomputed
layers are one function; that function is causal; and nothing in it is random. A model that breaks one of them would
train without an error, on another policy than the one that was sampled. It is refused instead, with the reason.

Weights without contents (meta, fake tensors) cannot be run: there only what the configuration says is checked.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from grade.errors import InputError, reading
from grade.models.base import FrozenBase
from grade.models.head import wide

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.1, torch.bfloat16: 0.1}
"""Largest relative difference of logits that rounding may cause between two orders of the same computation.

Many models compute norms, rotations or routers in float32 whatever their type, hence 1e-6 for float64. SmolLM2 (30
layers) reaches 6e-7 in float32, 1.3e-3 in float16 and 1.0e-2 in bfloat16; routers may choose other experts there. What
the check is for, such as a context that is lost, is seen in float32 at the latest: a few percent and more.
"""
LOUD = 1000.0
"""Largest logit of the check for an unknown soft cap: a cap of 3,000 changes it by 4 %, rounding by less than 1 %."""

_RUNS = "a model that runs on embeddings, padding and a cache"
_BUFFERS = re.compile(r"(^|\.)((self_)?(attn|attention)\.(masked_)?bias|inv_freq|position_ids)$")
"""Buffers that old checkpoints hold and models now compute: causal masks, rotary frequencies, positions."""


def check_supported(model: PreTrainedModel) -> None:
    """Reject a model, with or without data, for what its code and configuration say."""
    name = type(model).__name__
    with reading("backbone", name, _RUNS):
        config, takes = model.config, inspect.signature(model.base_model.forward).parameters
        # Zamba-2 and Nemotron-H: limits that differ by a few dt < 1e-3, below any tolerance.
        limits = [getattr(module, "time_step_limit", None) or (0.0, math.inf) for module in model.modules()]
        rules = (
            (not getattr(config, "is_encoder_decoder", False), "a decoder-only causal model, not an encoder-decoder"),
            (not getattr(config, "quantization_config", None), "a base that is not quantised"),
            (model.get_output_embeddings() is not None, "a causal language model with an output head"),
            ("inputs_embeds" in takes, "a model that accepts inputs_embeds: soft tokens have no ids"),
            (
                "past_key_values" in takes,
                "a model with a key-value cache: others lose their context while sampling",
            ),
            (
                not getattr(config.get_text_config(), "hidden_size_per_layer_input", None),
                "a model without embeddings per layer: those need ids",
            ),
            (
                all(low <= 0 and high == math.inf for low, high in limits),
                "a model whose time steps have no limit: on its cache they have none",
            ),
        )
        for holds, allowed in rules:
            if not holds:
                raise InputError("backbone", name, allowed)


def check_vocabulary(base: FrozenBase) -> None:
    """Reject a tokenizer or end-of-sequence ids with tokens that the embedding table lacks."""
    rows = base.vocab_size
    for token in base.eos_token_ids:
        if type(token) is not int or not 0 <= token < rows:  # true is one, too
            raise InputError("eos_token_id", token, f"ids of the embedding table, 0 to {rows - 1}")
    check_tokens(base.tokenizer, rows)


def check_tokens(tokenizer: Any, rows: int, of: str = "") -> None:
    """Reject a tokenizer with tokens beyond the rows of its model's embedding table."""
    with contextlib.suppress(TypeError):  # a tokenizer may have no length
        tokens = max([len(tokenizer), *(number + 1 for number in getattr(tokenizer, "get_vocab", dict)().values())])
        if tokens > rows:
            allowed = f"at most {rows}, the rows of the model's embedding table: is it this model's tokenizer?"
            raise InputError(f"{of}tokens of the tokenizer", tokens, allowed)


def check_loaded(name: str, info: Mapping[str, Any]) -> None:
    """Reject weights that lack tensors of the model, which would be random, or hold others, which would be ignored.

    ``info`` is what ``from_pretrained(..., output_loading_info=True)`` says of the weights ``name``.
    """
    others = {key for key, *_ in info.get("mismatched_keys", ())}
    for found, reads in (
        (others, "hold in another shape"), (info.get("missing_keys", ()), "lack"),
        (info.get("unexpected_keys", ()), "hold, unknown to the model,"),
    ):  # fmt: skip
        keys = sorted(k for k in found if not _BUFFERS.search(k))
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            allowed = f"weights with exactly the model's tensors; these {reads} {keys[0]}{more}"
            raise InputError("backbone", name, allowed)


def probe(base: FrozenBase) -> None:
    """Check a base's vocabulary, then run it on two short rows, one padded on the left, and compare what has to agree.

    Without data it is not run; one whose results differ is rejected with what failed.
    """
    check_vocabulary(base)
    weight = base.embedding_weight
    if weight.is_meta or isinstance(weight, FakeTensor):
        return
    with torch.random.fork_rng(devices=[]), reading("backbone", type(base.model).__name__, _RUNS):
        rows = _Probe(base)
        with torch.no_grad():
            rows.check_head()
            rows.check_one_function()
        rows.check_gradient()


class _Probe:
    """Two rows of ids, the second padded by two on the left, and what the model makes of them."""

    def __init__(self, base: FrozenBase) -> None:
        self.base, self.tolerance = base, TOLERANCE.get(base.dtype, 0.1)
        self.same = max(self.tolerance / 10, 1e-6)  # same operators in the same order, but for the last few
        self.type = str(base.dtype).removeprefix("torch.")
        first = torch.arange(1, 7, device=base.device)
        self.ids = torch.stack([first, first.flip(0) + 1]).remainder(base.vocab_size)
        self.mask = torch.ones_like(self.ids)
        self.mask[1, :2] = 0

    def require(self, holds: Tensor | bool, allowed: str) -> None:
        if not holds:
            raise InputError("backbone", type(self.base.model).__name__, allowed)

    def logits(self, embeds: Tensor, mask: Tensor) -> Tensor:
        return self.base.head(self.base.hidden(embeds, mask)).double()

    def check_head(self) -> None:
        """Logits are ``head(hidden(embed(ids)))``, also where a soft cap would show, and the embedding is a table."""
        base, ids, mask, require = self.base, self.ids[:1], self.mask[:1], self.require
        embeds, limit = base.embed(ids), self.same
        one_head = "a model whose logits are head(last hidden state), scaled or soft-capped"
        expected = base.model(input_ids=ids, attention_mask=mask).logits.double()
        before, hidden = embeds.clone(), base.hidden(embeds, mask)
        unchanged = embeds.equal(before) or not before.isfinite().all()
        require(unchanged, "a model that leaves its inputs_embeds as they are")
        require(
            not hidden.isfinite().all() or _close(base.hidden(embeds, mask), hidden, limit),
            "a model without randomness: dropout, dropped layers and jitter are not part of a sample",
        )
        logits = base.head(hidden).double()
        finite = logits.isfinite().all() and expected.isfinite().all()
        require(finite, f"a model with finite logits in {self.type}")
        require(logits.shape == expected.shape and _close(logits, expected, limit), one_head)
        room = torch.finfo(hidden.dtype).max / (4 * float(hidden.abs().max()) + 1e-3)  # float16 ends at 65,504
        factor = min(LOUD / (float(logits.abs().max()) + 1e-3), room)
        heard = []  # stays empty if the model does not call its head

        def louder(_: object, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            heard.append(factor)
            return inputs[0] * factor, *inputs[1:]

        handle = base.model.get_output_embeddings().register_forward_pre_hook(louder)
        try:
            expected = base.model(input_ids=ids, attention_mask=mask).logits.double()
        finally:
            handle.remove()
        require(not heard or _close(base.head(hidden * factor).double(), expected, limit), one_head)
        rows = base.embedding_weight[ids] * base.embedding_scale
        require(_close(base.embed(ids), rows, limit), "a model whose input embedding is a (scaled) row of one table")

    def check_one_function(self) -> None:
        """One pass, a pass without padding, a pass with another last token and decoding agree."""
        base, mask, require = self.base, self.mask, self.require
        embeds, real = base.embed(self.ids), mask.bool()
        whole = self.logits(embeds, mask)
        allowed = f"a model with finite logits in {self.type} beside padding on the left (float32 may work)"
        require(whole[real].isfinite().all(), allowed)
        other = self.logits(torch.cat([embeds[:, :-1], embeds[:, :1]], 1), mask)
        require(
            _close(other[:, :-1][real[:, :-1]], whole[:, :-1][real[:, :-1]], self.tolerance),
            "a causal model: a position's logits may not depend on later tokens",
        )
        require(
            _close(self.logits(embeds[1:, 2:], mask[1:, 2:]), whole[1:, 2:], self.tolerance),
            "a model whose logits do not depend on padding on the left",
        )
        cache, parts = base.new_cache(), []
        for start, end in ((0, 4), (4, 5), (5, 6)):
            parts.append(base.decode(embeds[:, start:end], mask[:, :end], cache))
        cached = base.head(torch.cat(parts, 1)).double()
        allowed = "a model that decodes on its cache as it computes in one pass"
        require(_close(cached[real], whole[real], self.tolerance), allowed)

    def check_gradient(self) -> None:
        """Soft tokens have a finite gradient, the same with recomputed layers, if the model has those."""
        plain, model = self.gradient(False), self.base.model
        self.require(plain.isfinite().all(), "a model with a finite gradient to its inputs_embeds")
        if not model.supports_gradient_checkpointing:
            return
        hooked = getattr(model, "_require_grads_hook", None)
        again = self.gradient(True)
        if not hooked:  # transformers leaves a hook that makes every embedding require a gradient: memory for nothing
            model.disable_input_require_grads()
        allowed = "a model with the same gradient when its layers are recomputed (nested ones, dropout, jitter)"
        self.require(_close(again, plain, self.tolerance), allowed)

    def gradient(self, recompute: bool) -> Tensor:
        """Of a fixed weighted sum of hidden states, in the embeddings halfway between two tokens [2, 6, D]."""
        base = self.base
        with torch.no_grad():
            embeds = 0.5 * (base.embed(self.ids) + base.embed(self.ids.flip(1)))
        embeds.requires_grad_(True)
        with torch.enable_grad():
            with base.checkpointed_layers(recompute):
                hidden = base.hidden(embeds * 1, self.mask)[:, 2:]  # times 1: a leaf may not be changed in place
            hidden = hidden.to(wide(hidden.dtype))
            weights = torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view(hidden.shape)
            return torch.autograd.grad((hidden * weights).sum(), embeds)[0]  # outside, as the engines do it


def _close(tensor: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether tensors differ by at most this part of the second's norm; False if either is not finite."""
    tensor, expected = tensor.double(), expected.double()
    difference = (tensor - expected).norm()
    return bool(difference.isfinite() and difference <= tolerance * expected.norm())
