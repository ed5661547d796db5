"""A Hugging Face sequence classifier as a reward of text: any tokenizer, policy gradients only.

With one label the reward is the logit, as for reward models trained on preferences. With several labels it is the
probability of the one that is named. Where the tokenizer is the policy's, `grade.rewards.differentiable` makes the same
model a reward with a gradient.

Left out: truncation. A text that the classifier cannot read whole is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from grade.errors import InputError, file_error, reading
from grade.models.backbone import errors_only
from grade.models.head import wide
from grade.models.prompts import PromptBatch
from grade.rewards.base import Reward, RewardScope
from grade.rewards.functions import Message, Texts, beginning, decode_texts

if TYPE_CHECKING:
    from grade.models.backbone import Backbone

BATCH_ROWS = 64
_UNLIMITED = 10**9
"""Limit of a tokenizer that has none; transformers gives it a larger number."""
_BUFFERS = ("position_ids", "inv_freq", "masked_bias")
"""Ends of names that older versions of transformers wrote and that hold no weights."""


class TextClassifier(Reward):
    """A sequence classifier that reads decoded text with its own tokenizer.

    Plain text gets the tokenizer's usual special tokens. Messages go through the tokenizer's chat template, which
    holds them already.

    The model is frozen and in evaluation mode from now on. With several labels, ``label`` is the one whose probability
    is the reward.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        label: str | None = None,
        scope: RewardScope = "prompt_and_completion",
        name: str = "classifier",
        no_gradient: str = "a classifier of text, which has no gradient",
    ) -> None:
        self.model, self.tokenizer = model.requires_grad_(False).eval(), tokenizer
        self.scope, self.name, self.no_gradient = scope, name, no_gradient
        labels = {str(text): int(index) for index, text in model.config.id2label.items()}
        listed = ", ".join(labels)
        if label is None and model.config.num_labels > 1:
            raise InputError(f"reward {name!r}: label", None, f"one of {listed}, as in hf:{name}@{next(iter(labels))}")
        if label is not None and label not in labels:
            raise InputError(f"reward {name!r}: label", label, f"one of {listed}")
        self.column = 0 if label is None else labels[label]

    @property
    def limit(self) -> int:
        """The most tokens that it reads."""
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None) or _UNLIMITED
        return min(positions, getattr(self.tokenizer, "model_max_length", _UNLIMITED), _UNLIMITED)

    def value(self, logits: Tensor) -> Tensor:
        """Rewards [B] of the classifier's logits [B, labels], float32 (float64 for a float64 classifier)."""
        logits, kind = logits.to(wide(logits.dtype)), self.model.config.problem_type
        if logits.shape[1] == 1 or kind == "regression":
            return logits[:, self.column]
        if kind == "multi_label_classification":
            return logits[:, self.column].sigmoid()
        return logits.softmax(-1)[:, self.column]

    @torch.no_grad()
    def score(self, policy: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B] of completions [B, T]; an error names the row whose text is too long or cannot be rendered."""
        texts = decode_texts(policy.tokenizer, prompts, ids, mask)
        rows = self._encode(texts)
        for row, tokens in enumerate(rows):
            self.check_length(len(tokens), row, f", {beginning(texts.completions[row])}")
        return self.value(self.logits(rows)).to(ids.device)

    def check_length(self, tokens: int, row: int, what: str = "") -> None:
        """Reject a text of more tokens than the classifier reads."""
        if tokens > self.limit:
            allowed = f"at most {self.limit}: shorten prompts or completions, or score the completion only"
            raise InputError(f"reward {self.name!r}, row {row}{what}: tokens", tokens, allowed)

    def _encode(self, texts: Texts) -> list[list[int]]:
        whole = self.scope == "prompt_and_completion"
        pairs = list(zip(texts.prompts, texts.completions, strict=True))
        if isinstance(texts.completions[0], str):
            plain = [prompt + completion if whole else completion for prompt, completion in pairs]
            rows = self.tokenizer(plain)["input_ids"]
        else:
            chats = [[*prompt, *completion] if whole else completion for prompt, completion in pairs]
            rendered = [self._render(row, chat) for row, chat in enumerate(chats)]
            rows = self.tokenizer(rendered, add_special_tokens=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        return [row or [0 if end is None else end] for row in rows]  # nothing but the end

    def _render(self, row: int, chat: Sequence[Message]) -> str:
        try:
            return self.tokenizer.apply_chat_template(chat, tokenize=False)
        except Exception as error:  # no template, or one that refuses: jinja has classes of its own
            allowed = f"a classifier whose tokenizer has a chat template for them ({file_error(error)})"
            raise InputError(f"reward {self.name!r}, row {row}: messages", list(chat)[-1], allowed) from None

    def logits(self, rows: list[list[int]]) -> Tensor:
        """Logits [B, labels] of rows of ids, `BATCH_ROWS` at a time, or without a padding token one at a time."""
        device, padding = self.model.device, self.model.config.get_text_config().pad_token_id
        if padding is None:
            return torch.cat([self.model(input_ids=torch.tensor([row], device=device)).logits for row in rows])
        parts = []
        for start in range(0, len(rows), BATCH_ROWS):
            ids = [torch.tensor(row, device=device) for row in rows[start : start + BATCH_ROWS]]
            mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
            ids = pad_sequence(ids, batch_first=True, padding_value=padding)
            parts.append(self.model(input_ids=ids, attention_mask=mask).logits)
        return torch.cat(parts)


def load_classifier(source: str, device: torch.device | str = "cpu") -> tuple[PreTrainedModel, Any]:
    """A classifier of a folder or hub id, and its tokenizer: safetensors only, no remote code.

    A model without weights for the labels, or with weights that have no place in its trunk, is refused: it would score
    with random ones.
    """
    allowed = "a folder or hub id of a sequence classifier with safetensors weights, a tokenizer and no remote code"
    logging.disable_progress_bar()
    with reading("reward", source, allowed), errors_only():
        model, info = AutoModelForSequenceClassification.from_pretrained(
            source, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    tokenizer = load_tokenizer(source)
    missing = sorted([*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])])
    if missing:
        raise InputError("reward", source, f"a trained classifier: it has no weights for {', '.join(missing[:3])}")
    trunk = f"{model.base_model_prefix}."  # another task's head may stay unread, but not a part of the trunk
    unread = sorted(key for key in info["unexpected_keys"] if key.startswith(trunk) and not key.endswith(_BUFFERS))
    if unread:
        raise InputError("reward", source, f"a classifier whose config has a place for {', '.join(unread[:3])}")
    return model.to(device), tokenizer


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a classifier."""
    allowed = "a classifier with its tokenizer, or a processing class for it"
    with reading("reward: tokenizer", source, allowed):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # what transformers makes of a folder without any
        raise InputError("reward: tokenizer", source, f"{allowed} (its files are missing)")
    return tokenizer
