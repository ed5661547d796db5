"""Settings of the adapter, apart from what builds it: reading settings needs neither peft nor transformers."""

from __future__ import annotations

from pydantic import Field

from grade.config import Config

MOST_RANKS = 16384
"""Largest rank: the width of the widest public models. A matrix has no higher one, and memory for more is not there."""


class LoraSettings(Config):
    """Settings of the trained adapter (Hu et al. 2021, arXiv:2106.09685)."""

    r: int = Field(16, ge=1, le=MOST_RANKS, description="rank")
    alpha: int = Field(32, ge=1, description="scale is alpha / r")
    dropout: float = Field(0.0, ge=0, le=0, description="must be 0: a dropout mask is not part of a sample")
    target_modules: list[str] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj"], description="names of the linear layers that get an adapter"
    )
