"""A Hugging Face sequence classifier as a differentiable reward, for a policy with the same vocabulary.

Soft tokens have no text, but where policy and classifier share a vocabulary they have embeddings in the classifier's
own table: ``e_R = sum_k y_k E_R[support_k]``, exactly ``E_R[token]`` for a hard token. So a published reward model can
teach by its gradient. Relaxed tokens and the ids of `score` go through the same forward pass.

transformers' classifiers expect ids: decoders look for padding ids to find the last token, which embeddings do not
have. When the reward is made, a probe therefore finds the way of padding that gives each row the logits it gets alone.

An end-of-sequence token is part of the text, as for reward models on the policy's embeddings.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from grade.errors import InputError
from grade.models.head import EmbeddingTable
from grade.models.prompts import position_ids
from grade.rewards.base import Reward, RewardScope
from grade.rewards.classifier import TextClassifier

if TYPE_CHECKING:
    from grade.models.backbone import Backbone

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
_HALF_TOLERANCE = 1e-2
"""Largest relative error of the probe: far above rounding, far below what a wrong position does."""

Padding = Callable[[PreTrainedModel, Tensor, Tensor], Tensor]


class EmbeddedClassifier(TextClassifier):
    """A classifier that reads embeddings in its own table, differentiably.

    Prompts, as encoded for the policy, begin with the tokenizer's special tokens already. What the tokenizer puts
    after a text is added here; with scope ``completion`` also what it puts before one.

    ``reads`` is its embedding table, with a row for each of the policy's ids. A classifier with another vocabulary, or
    one that treats embeddings unlike ids, is refused.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        backbone: Backbone,
        label: str | None = None,
        scope: RewardScope = "prompt_and_completion",
        name: str = "classifier",
    ) -> None:
        super().__init__(model, tokenizer, label, scope, name)
        why = _why_other_vocabulary(tokenizer, backbone.tokenizer)
        if why:
            raise InputError(f"reward {name!r}", why, "for a differentiable reward the policy's own vocabulary")
        layer = model.get_input_embeddings()
        scale = float(getattr(layer, "scalar_embed_scale", getattr(layer, "embed_scale", 1.0)))
        self.reads = EmbeddingTable(_rows(layer.weight.detach(), backbone.vocab_size), scale)
        prefix, suffix = _special_tokens(tokenizer)
        self.prefix = torch.tensor(prefix if scope == "completion" else [], dtype=torch.long, device=model.device)
        self.suffix = torch.tensor(suffix, dtype=torch.long, device=model.device)
        self.padding = _checked_padding(model, self.reads, min(len(tokenizer), layer.weight.shape[0]), name)

    def differentiable(self, embeds: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B] of embeddings [B, L, D_R] in the table `reads`, with mask [B, L], 0 at padding, anywhere."""
        rows, mask = embeds.to(self.reads.weight.dtype), mask.long()
        ends = [self.reads.embed(ids).expand(len(rows), -1, -1) for ids in (self.prefix, self.suffix)]
        rows = torch.cat([ends[0], rows, ends[1]], 1)
        mask = F.pad(mask, (len(self.prefix), len(self.suffix)), value=1)
        if mask.shape[1] > self.limit:
            counts = mask.sum(1)
            self.check_length(int(counts.max()), int(counts.argmax()))
            rows, mask = (part[:, : self.limit] for part in _moved(rows, mask, descending=True))
        with _any_batch(self.model):
            return self.value(self.padding(self.model, rows, mask))

    score = Reward.score  # by ids: what `differentiable` gives for hard tokens


def _why_other_vocabulary(tokenizer: Any, policy_tokenizer: Any) -> str | None:
    """Why a classifier's token ids do not mean what the policy's mean; None if they do."""
    if policy_tokenizer is None:
        return "a classifier for a policy without a tokenizer: vocabularies cannot be compared"
    own, policy = tokenizer.get_vocab(), policy_tokenizer.get_vocab()
    if own == policy:
        return None
    token = min((set(own.items()) ^ set(policy.items())), key=lambda pair: (pair[1], pair[0]))[0]
    first = f"{token!r} is {own.get(token, 'unknown')} here and {policy.get(token, 'unknown')} there"
    return f"a classifier with another vocabulary ({len(own)} tokens, the policy has {len(policy)}; {first})"


def _rows(weight: Tensor, vocab_size: int) -> Tensor:
    """The table with as many rows as the policy's: models pad theirs differently, beyond the tokenizer's ids."""
    missing = vocab_size - len(weight)
    return F.pad(weight, (0, 0, 0, missing)) if missing > 0 else weight[:vocab_size]  # a view where it is long enough


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What the tokenizer puts before and after a text."""
    plain, whole = tokenizer("a", add_special_tokens=False)["input_ids"], tokenizer("a")["input_ids"]
    starts = range(len(whole) - len(plain) + 1)
    start = next(i for i in starts if whole[i : i + len(plain)] == plain)
    return whole[:start], whole[start + len(plain) :]


def on_the_right(model: PreTrainedModel, embeds: Tensor, mask: Tensor) -> Tensor:
    """Logits of rows with their padding moved to the right: encoders, which attend to the mask."""
    embeds, mask = _moved(embeds, mask, descending=True)
    return model(inputs_embeds=embeds, attention_mask=mask).logits


def on_the_left(model: PreTrainedModel, embeds: Tensor, mask: Tensor) -> Tensor:
    """Logits of rows with their padding moved to the left: decoders, which pool the last position."""
    embeds, mask = _moved(embeds, mask, descending=False)
    accepted = inspect.signature(model.forward).parameters
    positions = {"position_ids": position_ids(mask)} if "position_ids" in accepted else {}
    return model(inputs_embeds=embeds, attention_mask=mask, **positions).logits


def _by_length(model: PreTrainedModel, embeds: Tensor, mask: Tensor) -> Tensor:
    """Logits of rows in groups of equal length, so that nothing is padded."""
    counts, logits = mask.sum(1), None
    for count in counts.unique().tolist():
        rows = (counts == count).nonzero().squeeze(1)
        group = model(inputs_embeds=embeds[rows][mask[rows].bool()].view(len(rows), count, -1)).logits
        logits = group.new_zeros(len(mask), group.shape[1]) if logits is None else logits
        logits = logits.index_put((rows,), group)
    return logits


def _moved(embeds: Tensor, mask: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    order = mask.argsort(dim=1, descending=descending, stable=True)
    return embeds.gather(1, order.unsqueeze(-1).expand_as(embeds)), mask.gather(1, order)


@contextlib.contextmanager
def _any_batch(model: PreTrainedModel) -> Iterator[None]:
    """Let decoders without a padding token read batches of embeddings: they get one that equals no id.

    Their warning that padding cannot be detected among embeddings is silenced, because the probe has checked that.
    """
    config, noise = model.config.get_text_config(), logging.getLogger("transformers.modeling_layers")
    before, level = config.pad_token_id, noise.level
    config.pad_token_id = -1
    noise.setLevel(logging.ERROR)
    try:
        yield
    finally:
        config.pad_token_id = before
        noise.setLevel(level)


@torch.no_grad()
def _checked_padding(model: PreTrainedModel, table: EmbeddingTable, tokens: int, name: str) -> Padding:
    """The first way of padding that gives every row the logits of its ids alone."""
    ids = torch.arange(tokens - 1, tokens - 17, -1, device=model.device).remainder(tokens).view(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :2], mask[1, 5:] = 0, 0
    reason, tolerance = "logits that differ", _TOLERANCE.get(table.weight.dtype, _HALF_TOLERANCE)
    with _any_batch(model):
        want = torch.cat([model(input_ids=row[m.bool()].unsqueeze(0)).logits for row, m in zip(ids, mask, strict=True)])
    for padding in (on_the_right, on_the_left, _by_length):
        with _any_batch(model):
            try:
                got = padding(model, table.embed(ids), mask)
            except (TypeError, ValueError, RuntimeError) as error:
                reason = str(error).strip().split("\n")[0]
                continue
        if (got - want).norm() <= tolerance * want.norm():
            return padding
    raise InputError(f"reward {name!r}", reason, "a classifier that reads inputs_embeds as it reads input_ids")
