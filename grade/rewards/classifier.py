"""Hugging Face sequence classifiers as rewards: of text, or of embeddings where the vocabulary is the policy's.

With one label the reward is the logit, as for reward models trained on preferences. With several labels it is the
probability of the one that is named. As text it may have any tokenizer, and has no gradient.

Soft tokens have no text, but where policy and classifier share a vocabulary they have embeddings in the classifier's
own table: ``e_R = sum_k y_k E_R[support_k]``, exactly ``E_R[token]`` for a hard token. So a published reward model can
teach by its gradient. Relaxed tokens and the ids of `score` go through the same forward pass. An end-of-sequence token
is part of the text, as for reward models on the policy's embeddings.

transformers' classifiers expect ids: decoders look for padding ids to find the last token, which embeddings do not
have. When the reward is made, a probe finds the side of the padding that gives each row the logits it gets alone.

Left out: truncation. A text that the classifier cannot read whole is an error.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from grade.errors import InputError
from grade.models.backbone import errors_only
from grade.models.head import EmbeddingTable, wide
from grade.models.prompts import PromptBatch, padded, position_ids, readable, special_tokens
from grade.rewards.base import Reward, RewardScope
from grade.rewards.functions import Texts, decode_texts

if TYPE_CHECKING:
    from grade.models.backbone import Backbone

BATCH_ROWS = 64
SAME_LOGITS = 0.05
"""Largest relative difference of the same logits: bfloat16 gives up to 0.02, padding on the wrong side 0.66."""
_BUFFERS = ("position_ids", "inv_freq", "masked_bias")
"""Ends of names that older versions of transformers wrote and that hold no weights."""


def classifier_reward(
    model: str | PreTrainedModel, backbone: Backbone, scope: RewardScope, tokenizer: Any = None
) -> TextClassifier:
    """The reward that a classifier is for a policy: differentiable where the vocabulary is the policy's.

    It is a model, or a folder or hub id, with ``@LABEL`` for one of several labels. ``tokenizer`` replaces its own.
    """
    label = None
    if isinstance(model, str):
        source, _, label = model.rpartition("@") if "@" in Path(model).name else (model, "", None)
        try:
            model = load_classifier(source)
        except OSError as error:  # transformers' does not name the setting
            raise InputError("reward", source, "a folder or hub id of a classifier with safetensors weights") from error
    model, source = model.to(backbone.device), model.config.name_or_path
    if model.base_model is model:
        raise InputError("reward", type(model).__name__, "a model with labels, as AutoModelForSequenceClassification's")
    name = source.rstrip("/").split("/")[-1] or type(model).__name__
    reward = TextClassifier(model, tokenizer or _load_tokenizer(source), label, scope, name)
    try:
        return EmbeddedClassifier(model, reward.tokenizer, backbone, label, scope, name)
    except InputError as error:  # another vocabulary, or embeddings that it reads unlike ids
        reward.no_gradient = str(error.value)
        return reward


class TextClassifier(Reward):
    """A sequence classifier that reads decoded text with its own tokenizer.

    Plain text gets the tokenizer's usual special tokens. Messages go through the tokenizer's chat template, which
    holds them already.

    The model is frozen and in evaluation mode from now on. With several labels, ``label`` is the one whose probability
    is the reward.
    """

    no_gradient = "a classifier of text, which has no gradient"

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        label: str | None = None,
        scope: RewardScope = "prompt_and_completion",
        name: str = "classifier",
    ) -> None:
        self.model, self.tokenizer = model.requires_grad_(False).eval(), tokenizer
        self.scope, self.name = scope, name
        labels = {str(text): int(index) for index, text in model.config.id2label.items()}
        if label not in labels and (label is not None or len(labels) > 1):
            raise InputError(f"reward {name!r}: label", label, f"one of {', '.join(labels)}, as in hf:{name}@LABEL")
        self.column = labels.get(label, 0)

    @property
    def limit(self) -> int:
        """The most tokens that it reads."""
        most = self.tokenizer.model_max_length  # a huge number for a tokenizer without a limit
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or most
        table = getattr(getattr(self.model.base_model, "embeddings", None), "position_embeddings", None)
        if getattr(table, "padding_idx", None) is not None:
            positions -= table.padding_idx + 1  # RoBERTa and its kin count from there
        return min(positions, most)

    def value(self, logits: Tensor) -> Tensor:
        """Rewards [B] of the classifier's logits [B, labels], float32 (float64 for a float64 classifier)."""
        logits, kind = logits.to(wide(logits.dtype)), self.model.config.problem_type
        if kind == "multi_label_classification" and logits.shape[1] > 1:
            logits = logits.sigmoid()
        elif kind != "regression" and logits.shape[1] > 1:
            logits = logits.softmax(-1)
        return logits[:, self.column]

    @torch.no_grad()
    def score(self, policy: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B] of completions [B, T]; an error names the row whose text is too long."""
        rows = self._encode(decode_texts(policy.tokenizer, prompts, ids, mask))
        self.check_lengths([len(tokens) for tokens in rows])
        return self.value(self.logits(rows)).to(ids.device)

    def check_lengths(self, lengths: list[int]) -> None:
        """Reject a text of more tokens than the classifier reads: decoders would read on, and score it wrong."""
        if max(lengths) > self.limit:
            allowed = f"at most {self.limit}: shorten prompts or completions, or score the completion only"
            row = lengths.index(max(lengths))
            raise InputError(f"reward {self.name!r}, row {row}: tokens", lengths[row], allowed)

    def _encode(self, texts: Texts) -> list[list[int]]:
        rows = texts.completions
        if self.scope == "prompt_and_completion":
            rows = [prompt + completion for prompt, completion in zip(texts.prompts, rows, strict=True)]
        plain = isinstance(rows[0], str)
        if not plain:
            chats = [readable(self.tokenizer, chat) for chat in rows]
            rows = [self.tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
        end = self.tokenizer.eos_token_id or 0
        encoded = self.tokenizer(rows, add_special_tokens=plain)["input_ids"]
        return [row or [end] for row in encoded]  # nothing but the end

    def logits(self, rows: list[list[int]]) -> Tensor:
        """Logits [B, labels] of rows of ids, `BATCH_ROWS` at a time, or without a padding token one at a time."""
        padding = self.model.config.get_text_config().pad_token_id
        size = 1 if padding is None else BATCH_ROWS
        batches = (rows[start : start + size] for start in range(0, len(rows), size))
        pairs = (padded(batch, padding or 0, device=self.model.device) for batch in batches)
        return torch.cat([self.model(input_ids=ids, attention_mask=mask).logits for ids, mask in pairs])


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
        if backbone.tokenizer is None or tokenizer.get_vocab() != backbone.tokenizer.get_vocab():
            allowed = "for a differentiable reward the policy's own vocabulary"
            raise InputError(f"reward {name!r}", "a classifier with another vocabulary", allowed)
        table = EmbeddingTable.of(model.get_input_embeddings())
        self.reads = replace(table, weight=_rows(table.weight, backbone.vocab_size))
        prefix, suffix = special_tokens(tokenizer)
        self.prefix = torch.tensor(prefix if scope == "completion" else [], dtype=torch.long, device=model.device)
        self.suffix = torch.tensor(suffix, dtype=torch.long, device=model.device)
        self.left = _checked_side(model, self.reads, len(tokenizer), name)

    def differentiable(self, embeds: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B] of embeddings [B, L, D_R] in the table `reads`, with mask [B, L], 0 at padding, anywhere."""
        rows, mask = embeds.to(self.reads.weight.dtype), mask.long()
        ends = [self.reads.embed(ids).expand(len(rows), -1, -1) for ids in (self.prefix, self.suffix)]
        rows = torch.cat([ends[0], rows, ends[1]], 1)
        mask = F.pad(mask, (len(self.prefix), len(self.suffix)), value=1)
        if mask.shape[1] > self.limit:
            self.check_lengths(mask.sum(1).tolist())
            rows, mask = (part[:, : self.limit] for part in _moved(rows, mask, left=False))
        with _any_batch(self.model):
            return self.value(_logits(self.model, rows, mask, self.left))

    score = Reward.score  # by ids: what `differentiable` gives for hard tokens


def _rows(weight: Tensor, vocab_size: int) -> Tensor:
    """The table with as many rows as the policy's: models pad theirs differently, beyond the tokenizer's ids."""
    missing = vocab_size - len(weight)
    return F.pad(weight, (0, 0, 0, missing)) if missing > 0 else weight[:vocab_size]  # a view where it is long enough


def _logits(model: PreTrainedModel, embeds: Tensor, mask: Tensor, left: bool) -> Tensor:
    """Logits of rows whose padding is moved to one side: to the left for decoders, which pool the last position."""
    embeds, mask = _moved(embeds, mask, left)
    takes_positions = left and "position_ids" in inspect.signature(model.forward).parameters
    positions = {"position_ids": position_ids(mask)} if takes_positions else {}
    return model(inputs_embeds=embeds, attention_mask=mask, **positions).logits


def _moved(embeds: Tensor, mask: Tensor, left: bool) -> tuple[Tensor, Tensor]:
    order = mask.argsort(dim=1, descending=not left, stable=True)
    return embeds.gather(1, order.unsqueeze(-1).expand_as(embeds)), mask.gather(1, order)


@contextlib.contextmanager
def _any_batch(model: PreTrainedModel) -> Iterator[None]:
    """Let decoders without a padding token read batches of embeddings: they get one that equals no id.

    Their warning that padding cannot be detected among embeddings is silenced, because the probe has checked that.
    """
    config = model.config.get_text_config()
    before, config.pad_token_id = config.pad_token_id, -1
    try:
        with errors_only():
            yield
    finally:
        config.pad_token_id = before


def _checked_side(model: PreTrainedModel, table: EmbeddingTable, tokens: int, name: str) -> bool:
    """Whether padding on the left, not on the right, gives every row the logits of its ids alone."""
    left, error, reason = _best_side(model, table, tokens)
    if not error <= SAME_LOGITS and table.weight.dtype.itemsize < 4:  # rounding, or another function: float32 tells
        wide_model = copy.deepcopy(model).float()
        wide_table = replace(table, weight=wide_model.get_input_embeddings().weight)
        left, error, reason = _best_side(wide_model, wide_table, tokens)
    if not error <= SAME_LOGITS:
        raise InputError(f"reward {name!r}", reason, "a classifier that reads inputs_embeds as it reads input_ids")
    return left


@torch.no_grad()
def _best_side(model: PreTrainedModel, table: EmbeddingTable, tokens: int) -> tuple[bool, float, str]:
    """The side of the padding whose logits are closer to those of the ids alone; its relative error; what failed."""
    ids = torch.arange(tokens - 1, tokens - 17, -1, device=model.device).remainder(tokens).view(2, 8)
    mask = torch.ones_like(ids)
    mask[0, :2], mask[1, 5:] = 0, 0
    errors, reason = [torch.inf, torch.inf], "logits that differ"
    with _any_batch(model):
        for left in (False, True):
            try:
                alone = [model(input_ids=row[m.bool()].unsqueeze(0)).logits for row, m in zip(ids, mask, strict=True)]
                want = torch.cat(alone).double()
                got = _logits(model, table.embed(ids), mask, left).double()
            except (TypeError, ValueError, RuntimeError, IndexError) as error:
                reason = str(error).strip().split("\n")[0]
                continue
            errors[left] = float((got - want).norm() / want.norm().clamp_min(1e-30))
    left = not errors[False] <= 4 * errors[True]  # where both agree, on the right
    return left, errors[left], reason


def load_classifier(source: str) -> PreTrainedModel:
    """A classifier of a folder or hub id: safetensors only, no remote code.

    A model without weights for the labels, or with weights that have no place in its trunk, is refused: it would score
    with random ones.
    """
    with errors_only():
        model, info = AutoModelForSequenceClassification.from_pretrained(
            source, use_safetensors=True, trust_remote_code=False, output_loading_info=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
    missing = sorted([*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])])
    if missing:
        raise InputError("reward", source, f"a trained classifier: it has no weights for {', '.join(missing[:3])}")
    trunk = f"{model.base_model_prefix}."  # another task's head may stay unread, but not a part of the trunk
    unread = sorted(key for key in info["unexpected_keys"] if key.startswith(trunk) and not key.endswith(_BUFFERS))
    if unread:
        raise InputError("reward", source, f"a classifier whose config has a place for {', '.join(unread[:3])}")
    return model


def _load_tokenizer(source: str) -> Any:
    """The tokenizer of a classifier."""
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False) if source else ()
    if not source or len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers' of a folder without its files
        raise InputError("reward: tokenizer", source, "a classifier with its tokenizer, or reward_processing_classes")
    return tokenizer
