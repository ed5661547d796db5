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
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel

from grade.errors import InputError
from grade.models.head import wide

if TYPE_CHECKING:
    from grade.models.backbone import Backbone

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 0.1, torch.bfloat16: 0.1}
"""Largest relative difference of logits that rounding may cause between two orders of the same computation.

Many models compute norms, rotations or routers in float32 whatever their type, hence 1e-6 for float64. SmolLM2 (30
layers) reaches 6e-7 in float32, 1.3e-3 in float16 and 1.0e-2 in bfloat16; routers may choose other experts there. What
the check is for, such as a context that is lost, is seen in float32 at the latest: a few percent and more.
"""
HEAD_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}
"""As `TOLERANCE`, where the same operators run in the same order and only the last few round differently."""
LOUD = 1000.0
"""Largest logit of the check for an unknown soft cap: a cap of 3,000 changes it by 4 %, rounding by less than 1 %."""

_BUFFERS = re.compile(r"(^|\.)((self_)?(attn|attention)\.(masked_)?bias|inv_freq|position_ids)$")
"""Buffers that old checkpoints hold and models now compute: causal masks, rotary frequencies, positions."""


def check_supported(model: PreTrainedModel) -> None:
    """Reject a model for what its code and configuration say.

    Args:
        model: Of transformers, with or without data.

    Raises:
        InputError: With the reason.
    """
    name, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False):
        raise InputError("backbone", name, "a decoder-only causal language model, not an encoder-decoder")
    with _one_line(name):
        head, accepted = model.get_output_embeddings(), inspect.signature(model.base_model.forward).parameters
    if head is None:
        raise InputError("backbone", name, "a causal language model with an output head")
    if "inputs_embeds" not in accepted:
        raise InputError("backbone", name, "a model that accepts inputs_embeds: soft tokens have no ids")
    if "past_key_values" not in accepted:
        raise InputError("backbone", name, "a model with a key-value cache: others lose their context while sampling")
    if getattr(config.get_text_config(), "hidden_size_per_layer_input", None):
        raise InputError("backbone", name, "a model without embeddings per layer: those need ids")
    for module in model.modules():  # Zamba-2, Nemotron-H: a difference of a few dt < 1e-3, below any tolerance
        low, high = getattr(module, "time_step_limit", None) or (0.0, math.inf)
        if low > 0 or high < math.inf:
            allowed = f"a model whose time steps have no limit (here {low} to {high}): on its cache they have none"
            raise InputError("backbone", name, allowed)


def check_vocabulary(model: PreTrainedModel, tokenizer: Any, eos: tuple[Any, ...]) -> None:
    """Reject a tokenizer or end-of-sequence ids with tokens that the embedding table lacks.

    Args:
        model: The model.
        tokenizer: Its tokenizer, or None.
        eos: The ids that end a sequence.

    Raises:
        InputError: With the two sizes.
    """
    rows = model.get_input_embeddings().weight.shape[0]
    wrong = [token for token in eos if not isinstance(token, int) or not 0 <= token < rows]
    if wrong:
        raise InputError("eos_token_id", wrong[0], f"ids of the embedding table, 0 to {rows - 1}")
    with contextlib.suppress(TypeError):  # a tokenizer may have no length
        if tokenizer is not None and len(tokenizer) > rows:
            allowed = f"at most {rows}, the rows of the model's embedding table: is it this model's tokenizer?"
            raise InputError("tokens of the tokenizer", len(tokenizer), allowed)


def check_loaded(name: str, info: Mapping[str, Any]) -> None:
    """Reject weights that lack tensors of the model, which would be random, or hold others, which would be ignored.

    Args:
        name: Where the weights come from, for the message.
        info: What ``from_pretrained(..., output_loading_info=True)`` says; tied tensors count as there.

    Raises:
        InputError: Naming the first such tensor.
    """
    for key, reads in (("missing_keys", "lack"), ("unexpected_keys", "hold, unknown to the model,")):
        keys = sorted(k for k in info.get(key, ()) if not _BUFFERS.search(k))
        if keys:
            more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
            allowed = f"weights with exactly the model's tensors; these {reads} {keys[0]}{more}"
            raise InputError("backbone", name, allowed)


def silence(model: PreTrainedModel) -> None:
    """Put a model in eval mode, its weights frozen, the dropout rates that its layers hold themselves at 0.

    Those too, because recomputed layers run with their own ``training`` on (`Backbone.checkpointed_layers`), not their
    children's, and models that drop whole layers or call the function ``dropout`` look at that. Mixtures of experts run
    one by one in float64: the joint kernel knows no float64.

    Args:
        model: Changed in place.
    """
    model.requires_grad_(False).eval()
    for module in model.modules():
        for key, value in vars(module).items():
            if "drop" in key and isinstance(value, float):
                setattr(module, key, 0.0)
    choose = getattr(model, "set_experts_implementation", None)
    if choose is not None and model.dtype == torch.float64:
        choose("eager")


def check_probe(backbone: Backbone) -> None:
    """Run a model on two short rows, one padded on the left, and compare everything that has to agree.

    Args:
        backbone: Just built, without an adapter of its own. Without data it is not run.

    Raises:
        InputError: Naming the model and what failed.
    """
    weight = backbone.embedding_weight
    if weight.is_meta or isinstance(weight, FakeTensor):
        return
    probe = _Probe(backbone)
    with torch.random.fork_rng(devices=[]), _one_line(probe.name):
        with torch.no_grad():
            probe.check_head()
            probe.check_one_function()
        probe.check_gradient()


@contextlib.contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Turn what a model's own code raises into one line."""
    try:
        yield
    except (InputError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # any type: it is the code of some 200 models
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0][:120]}" if lines else type(error).__name__
        raise InputError("backbone", name, f"a model that runs on embeddings, padding and a cache ({reason})") from None


class _Probe:
    """Two rows of ids, the second padded by two on the left, and what the model makes of them."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone, self.name = backbone, type(backbone.model).__name__
        self.tolerance = TOLERANCE.get(backbone.dtype, 0.1)
        first = torch.arange(1, 7, device=backbone.device)
        self.ids = torch.stack([first, first.flip(0) + 1]).remainder(backbone.vocab_size)
        self.mask = torch.ones_like(self.ids)
        self.mask[1, :2] = 0

    def refuse(self, allowed: str) -> None:
        raise InputError("backbone", self.name, allowed)

    def logits(self, embeds: Tensor, mask: Tensor) -> Tensor:
        return self.backbone.head(self.backbone.hidden(embeds, mask)).double()

    def check_kept(self, embeds: Tensor, before: Tensor) -> None:
        if not torch.equal(embeds, before):
            self.refuse("a model that leaves its inputs_embeds as they are")

    def check_head(self) -> None:
        """Logits are ``head(hidden(embed(ids)))``, also where a soft cap would show, and the embedding is a table."""
        backbone, ids, mask = self.backbone, self.ids[:1], self.mask[:1]
        embeds, limit = backbone.embed(ids), HEAD_TOLERANCE.get(backbone.dtype, 1e-2)
        what = "a model whose logits are head(last hidden state), scaled or soft-capped"
        want = backbone.model(input_ids=ids, attention_mask=mask).logits.double()
        before, hidden = embeds.clone(), backbone.hidden(embeds, mask)
        self.check_kept(embeds, before)
        if hidden.isfinite().all() and not _close(backbone.hidden(embeds, mask), hidden, limit):
            self.refuse("a model without randomness: dropout, dropped layers and jitter are not part of a sample")
        got = backbone.head(hidden).double()
        if not got.isfinite().all() or not want.isfinite().all():
            self.refuse(f"a model with finite logits in {str(backbone.dtype).removeprefix('torch.')}")
        if got.shape != want.shape or not _close(got, want, limit):
            self.refuse(what)
        room = torch.finfo(hidden.dtype).max / (4 * float(hidden.abs().max()) + 1e-3)  # float16 ends at 65,504
        factor = min(LOUD / (float(got.abs().max()) + 1e-3), room)
        with _louder(backbone.model.get_output_embeddings(), factor) as heard:
            want = backbone.model(input_ids=ids, attention_mask=mask).logits.double()
        if heard and not _close(backbone.head(hidden * factor).double(), want, limit):
            self.refuse(what)
        if not _close(backbone.embed(ids), backbone.embedding_weight[ids] * backbone.embedding_scale, limit):
            self.refuse("a model whose input embedding is a (scaled) row of one table")

    def check_one_function(self) -> None:
        """One pass, a pass without padding, a pass with another last token and decoding agree; inputs are kept."""
        backbone, mask = self.backbone, self.mask
        embeds = backbone.embed(self.ids)
        before = embeds.clone()
        whole = self.logits(embeds, mask)
        real = mask.bool()
        if not whole[real].isfinite().all():
            kind = str(backbone.dtype).removeprefix("torch.")
            self.refuse(f"a model with finite logits in {kind} beside padding on the left (float32 may work)")
        last = torch.cat([embeds[:, :-1], embeds[:, :1]], 1)
        if not _close(self.logits(last, mask)[:, :-1][real[:, :-1]], whole[:, :-1][real[:, :-1]], self.tolerance):
            self.refuse("a causal model: a position's logits may not depend on later tokens")
        if not _close(self.logits(embeds[1:, 2:], mask[1:, 2:]), whole[1:, 2:], self.tolerance):
            self.refuse("a model whose logits do not depend on padding on the left")
        cache, parts = backbone.new_cache(), []
        for start, end in ((0, 4), (4, 5), (5, 6)):
            parts.append(backbone.decode(embeds[:, start:end], mask[:, :end], cache))
        cached = backbone.head(torch.cat(parts, 1)).double()
        if not _close(cached[real], whole[real], self.tolerance):
            self.refuse("a model that decodes on its cache as it computes in one pass")
        self.check_kept(embeds, before)

    def check_gradient(self) -> None:
        """Soft tokens have a finite gradient, the same with recomputed layers, if the model has those."""
        plain = self.gradient(False)
        if not plain.isfinite().all():
            self.refuse("a model with a finite gradient to its inputs_embeds")
        model = self.backbone.model
        if not model.supports_gradient_checkpointing:
            return
        hooked = getattr(model, "_require_grads_hook", None)
        again = self.gradient(True)
        if not hooked:  # transformers leaves a hook that makes every embedding require a gradient: memory for nothing
            model.disable_input_require_grads()
        if not _close(again, plain, self.tolerance):
            self.refuse("a model with the same gradient when its layers are recomputed (nested ones, dropout, jitter)")

    def gradient(self, recompute: bool) -> Tensor:
        """Of a fixed weighted sum of hidden states, in the embeddings halfway between two tokens [2, 6, D]."""
        backbone = self.backbone
        with torch.no_grad():
            embeds = 0.5 * (backbone.embed(self.ids) + backbone.embed(self.ids.flip(1)))
        embeds.requires_grad_(True)
        with torch.enable_grad():
            with backbone.checkpointed_layers(recompute):
                hidden = backbone.hidden(embeds * 1, self.mask)[:, 2:]  # times 1: a leaf may not be changed in place
            hidden = hidden.to(wide(hidden.dtype))
            weights = torch.linspace(-1, 1, hidden.numel(), device=hidden.device).view(hidden.shape)
            return torch.autograd.grad((hidden * weights).sum(), embeds)[0]  # outside, as the engines do it


def _close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    """Whether tensors differ by at most this part of the second's norm; False if either is not finite."""
    got, want = got.double(), want.double()
    difference = (got - want).norm()
    return bool(difference.isfinite() and difference <= tolerance * want.norm())


@contextlib.contextmanager
def _louder(head: nn.Module, factor: float) -> Iterator[list[float]]:
    """Within this context the model's head receives larger hidden states; the list stays empty if it is not called."""
    heard: list[float] = []

    def scale(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        heard.append(factor)
        return inputs[0] * factor, *inputs[1:]

    handle = head.register_forward_pre_hook(scale)
    try:
        yield heard
    finally:
        handle.remove()
