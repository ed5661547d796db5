"""Identity of a tokenizer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from grade.files import hashed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of how a tokenizer turns text into ids and back: vocabulary, rules, special tokens."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    for passing in ("truncation", "padding"):  # of the last call
        rules.pop(passing, None)
    about = [rules, {name: str(token) for name, token in tokenizer.special_tokens_map.items()}]
    about.append(getattr(tokenizer, "clean_up_tokenization_spaces", None))
    return hashed(*about)
