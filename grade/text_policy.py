"""A policy and real text to measure on, for the notebooks that need no reward; a tiny invented task by default."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from grade.backbone import Backbone
from grade.errors import InputError
from grade.prompts import PromptBatch
from grade.reviews import load_reviews
from grade.toy import toy_reviews, toy_task

_TOY_SCALE = 0.05  # standard deviation of the toy adapter's B, which would otherwise be 0 and without effect


def load_policy(backbone_dir: str, adapter_dir: str, reviews_dir: str) -> tuple[Backbone, list[str]]:
    """A policy in float32 on the CPU, and held-out texts.

    Args:
        backbone_dir: Folder of the base; empty for the toy task, whose adapter is then random.
        adapter_dir: Folder of a trained adapter; empty: the base alone.
        reviews_dir: Folder of the review splits.

    Returns:
        The policy and texts.
    """
    if backbone_dir:
        backbone = Backbone.load(backbone_dir, "float32", adapter=adapter_dir or None)
        return backbone, [r.text for r in load_reviews(reviews_dir, "test")]
    backbone = toy_task().backbone
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in backbone.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, _TOY_SCALE, generator=generator)
    return backbone, [r.text for r in toy_reviews(64, seed=1)]


def text_sequences(
    backbone: Backbone, texts: Sequence[str], batch: int, prompt: int, new: int
) -> tuple[PromptBatch, Tensor]:
    """The first ``prompt + new`` tokens of texts that are long enough, as prompts and completions.

    Args:
        backbone: Its tokenizer decides.
        texts: Texts.
        batch: B.
        prompt: P.
        new: T.

    Returns:
        Prompts [B, P] without padding, and completions [B, T].

    Raises:
        InputError: If too few texts are long enough.
    """
    length, rows = prompt + new, []
    for text in texts:
        ids = backbone.tokenizer(text)["input_ids"]
        if len(ids) >= length:
            rows.append(ids[:length])
        if len(rows) == batch:
            break
    if len(rows) < batch:
        raise InputError("prompt tokens + new tokens", length, f"a length that {batch} of the texts have")
    ids = torch.tensor(rows, device=backbone.device)
    return PromptBatch(ids[:, :prompt], torch.ones_like(ids[:, :prompt])), ids[:, prompt:]
