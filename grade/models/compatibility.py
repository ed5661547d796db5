"""What a model must do to be a backbone: tried once, when it is built, on a dozen tokens.

Everything after this relies on four things that transformers promises for no model in particular: embeddings instead of
ids give the same logits; a pass over a left-padded batch, decoding on a key-value cache, and a pass with recomputed
layers are one function; that function is causal; and nothing in it is random. A model that breaks one of them would
train without an error, on another policy than the one that was sampled.

Weights without contents (meta, fake tensors) are not run.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from grade.errors import InputError
from grade.models.base import FrozenBase
from grade.models.head import wide

EXACT, COARSE = (5e-3, 3e-2), (0.05, 0.9)
"""Relative differences of logits beyond which there is a warning, and beyond which the model is refused.

The first two are for float32 and float64, where rounding gives 1e-6 (many models compute norms, rotations or routers in
float32 whatever their type) and a context that is lost a few percent. The others are for half precision and TF32:
SmolLM2 (30 layers) reaches 1.3e-3 in float16 and 1.0e-2 in bfloat16, and a router may choose another expert, so that
only a warning can be given.
"""
LOUD = 1000.0
"""Largest logit of the check for an unknown soft cap: a cap of 3,000 changes it by 4 %, rounding by less than 1 %."""

_BUFFERS = re.compile(r"(^|\.)((self_)?(attn|attention)\.(masked_)?bias|inv_freq|position_ids)$")
"""Buffers that old checkpoints hold and models now compute: causal masks, rotary frequencies, positions."""


def rounds_coarsely(dtype: torch.dtype) -> bool:
    """Whether products of this type have fewer digits than float32's: half precision, or TF32 where it is allowed."""
    return dtype.itemsize < 4 or (dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest")


def check_loaded(name: str, info: Mapping[str, Any], field: str = "backbone") -> None:
    """Refuse weights that lack tensors of the model, which would be random; warn of tensors that the model ignores.

    ``info`` is what ``from_pretrained(..., output_loading_info=True)`` says of the weights ``name``.
    """
    lacking, ignored = (
        sorted(key for key in keys if not _BUFFERS.search(key))
        for keys in (info["missing_keys"] | {key for key, *_ in info["mismatched_keys"]}, info["unexpected_keys"])
    )
    if lacking:
        raise InputError(field, name, f"weights with the model's tensors, in its shapes; these lack {lacking[:3]}")
    if ignored:
        warnings.warn(f"{name}: the model ignores {len(ignored)} tensors, such as {ignored[0]}", stacklevel=2)


def probe(base: FrozenBase) -> None:
    """Run a base on two short rows, one padded on the left, and compare what has to agree.

    Raises:
        InputError: If results differ by more than rounding explains, with what differs. A difference that may be
            rounding is a warning.
    """
    limits = [getattr(module, "time_step_limit", None) or (0.0, math.inf) for module in base.model.modules()]
    if any(low > 0 or high < math.inf for low, high in limits):
        # Nemotron-H and Zamba-2: on the cache there is no limit, which differs below any tolerance.
        raise InputError("backbone", type(base.model).__name__, "a model without a time_step_limit")
    weight = base.embedding_weight
    if weight.is_meta or isinstance(weight, FakeTensor):
        return
    with torch.random.fork_rng(devices=[]):
        rows = _Probe(base)
        with torch.no_grad():
            rows.check_head()
            rows.check_one_function()
        rows.check_gradient()


class _Probe:
    """Two rows of ids, the second padded by two on the left, and what the model makes of them."""

    def __init__(self, base: FrozenBase) -> None:
        self.base = base
        first = torch.arange(1, 7, device=base.device)
        self.ids = torch.stack([first, first.flip(0) + 1]).remainder(base.vocab_size)
        self.mask = torch.ones_like(self.ids)
        self.mask[1, :2] = 0

    def agree(self, tensor: Tensor, expected: Tensor, allowed: str) -> None:
        """Refuse a model where tensors differ by more than rounding can; warn where it may or may not be that."""
        tensor, expected = tensor.double(), expected.double()
        difference = float((tensor - expected).norm() / expected.norm().clamp(min=1e-30))
        name, kind = type(self.base.model).__name__, str(self.base.dtype).removeprefix("torch.")
        unsure, wrong = COARSE if rounds_coarsely(self.base.dtype) else EXACT
        if not difference <= wrong:
            raise InputError("backbone", name, f"{allowed} (they differ by {difference:.2g} in {kind})")
        if difference > unsure:
            text = f"{name} may not be {allowed}: {difference:.2g} is much for rounding in {kind}; try float32"
            warnings.warn(text, stacklevel=2)

    def logits(self, embeds: Tensor, mask: Tensor) -> Tensor:
        return self.base.head(self.base.hidden(embeds, mask)).double()

    def check_head(self) -> None:
        """Logits are ``head(hidden(embed(ids)))``, also where a soft cap would show, and the embedding is a table."""
        base, ids, mask = self.base, self.ids[:1], self.mask[:1]
        embeds = base.embed(ids)
        one_head = "a model whose logits are head(last hidden state), scaled or soft-capped"
        expected = base.model(input_ids=ids, attention_mask=mask).logits.double()
        before, hidden = embeds.clone(), base.hidden(embeds, mask)
        self.agree(embeds, before, "a model that leaves its inputs_embeds as they are")
        self.agree(base.hidden(embeds, mask), hidden, "a model without dropout, dropped layers or jitter")
        self.agree(base.head(hidden), expected, one_head)
        room = torch.finfo(hidden.dtype).max / (4 * float(hidden.abs().max()) + 1e-3)  # float16 ends at 65,504
        factor = min(LOUD / (float(expected.abs().max()) + 1e-3), room)
        called = []  # stays empty if the model does not call its head

        def louder(_: object, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            called.append(factor)
            return inputs[0] * factor, *inputs[1:]

        handle = base.model.get_output_embeddings().register_forward_pre_hook(louder)
        try:
            expected = base.model(input_ids=ids, attention_mask=mask).logits.double()
        finally:
            handle.remove()
        if called:
            self.agree(base.head(hidden * factor), expected, one_head)
        rows = base.embedding_weight[ids] * base.embedding_scale
        self.agree(embeds, rows, "a model whose input embedding is a (scaled) row of one table")

    def check_one_function(self) -> None:
        """One pass, a pass without padding, a pass with another last token and decoding agree."""
        base, mask = self.base, self.mask
        embeds, real = base.embed(self.ids), mask.bool()
        whole = self.logits(embeds, mask)
        other = self.logits(torch.cat([embeds[:, :-1], embeds[:, :1]], 1), mask)
        allowed = "a causal model, whose logits do not depend on later tokens"
        self.agree(other[:, :-1][real[:, :-1]], whole[:, :-1][real[:, :-1]], allowed)
        allowed = "a model whose logits do not depend on padding on the left"
        self.agree(self.logits(embeds[1:, 2:], mask[1:, 2:]), whole[1:, 2:], allowed)
        cache, parts = base.new_cache(), []
        for start, end in ((0, 4), (4, 5), (5, 6)):
            parts.append(base.decode(embeds[:, start:end], mask[:, :end], cache))
        cached = base.head(torch.cat(parts, 1))
        self.agree(cached[real], whole[real], "a model that decodes on its cache as it computes in one pass")

    def check_gradient(self) -> None:
        """Soft tokens have a finite gradient, the same with recomputed layers, if the model has those."""
        plain, model = self.gradient(False), self.base.model
        self.agree(plain, plain, "a model with a finite gradient to its inputs_embeds")
        if not model.supports_gradient_checkpointing:
            return
        again = self.gradient(True)
        # A hook of transformers makes every embedding of a frozen base require a gradient: memory for nothing.
        model.disable_input_require_grads()
        self.agree(again, plain, "a model with the same gradient when its layers are recomputed")

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
