"""The LoRA adapter: its settings, a new one, and one from a folder.

Rejected: adapters on the head or the embedding, and prompt-learning ones. Both would change what policy, reference and
reward share.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from pydantic import Field
from torch import nn
from transformers import PreTrainedModel

from grade.config import Config
from grade.errors import InputError


class LoraSettings(Config):
    """Settings of the trained adapter (Hu et al. 2021, arXiv:2106.09685)."""

    r: int = Field(16, ge=1, description="rank")
    alpha: int = Field(32, ge=1, description="scale is alpha / r")
    dropout: float = Field(0.0, ge=0, le=0, description="must be 0: a dropout mask is not part of a sample")
    target_modules: list[str] = Field(
        ["q_proj", "k_proj", "v_proj", "o_proj"], description="names of the linear layers that get an adapter"
    )


def new_adapter(model: PreTrainedModel, lora: LoraSettings | LoraConfig, seed: int) -> PeftModel:
    """Put a new adapter on a model, which is changed in place.

    Args:
        model: The frozen base.
        lora: Rank, scale and layers, ours or PEFT's; dropout is set to 0.
        seed: Seed of the initialisation; the global state is not touched.

    Returns:
        The wrapped model, in eval mode.

    Raises:
        InputError: If a layer does not exist or may not be adapted.
    """
    config = copy.deepcopy(lora)
    if isinstance(lora, LoraSettings):
        config = LoraConfig(
            r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=lora.target_modules,
            task_type="CAUSAL_LM",
        )  # fmt: skip
    config.lora_dropout = 0.0
    refuse_vocabulary_modules(model, config.target_modules or [], config.modules_to_save)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft still reads a property that transformers has renamed.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, config).eval()
        except ValueError as error:
            linear = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
            allowed = f"names of linear layers of this model ({', '.join(linear)})"
            raise InputError("lora.target_modules", config.target_modules, allowed) from error


def continued_adapter(model: PeftModel) -> PeftModel:
    """Make the active adapter of a wrapped model trainable again.

    Args:
        model: Wrapped by PEFT; its base is frozen.

    Returns:
        The same model, in eval mode.

    Raises:
        InputError: If the adapter is of another kind than LoRA or adapts what may not be adapted.
    """
    config = model.peft_config[model.active_adapter]
    _refuse_kind(config)
    refuse_vocabulary_modules(model.get_base_model(), config.target_modules or [], config.modules_to_save)
    model.set_adapter(model.active_adapter)
    return model.eval()


def _refuse_kind(config: PeftConfig) -> None:
    if not isinstance(config, LoraConfig):
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise InputError("adapter", kind, "LORA (prompt-learning and other adapters change the inputs or the head)")


def load_adapter(model: PreTrainedModel, folder: str | Path) -> PeftModel:
    """Put a saved adapter on a model, which is changed in place.

    Args:
        model: The frozen base.
        folder: As written by `Backbone.save_adapter` or PEFT.

    Returns:
        The wrapped model, trainable, in eval mode.

    Raises:
        InputError: If the adapter is missing, of another kind, or does not fit.
    """
    if not (Path(folder) / "adapter_config.json").is_file():
        raise InputError("adapter", str(folder), "a folder with adapter_config.json, as saved by training")
    config = PeftConfig.from_pretrained(str(folder))
    _refuse_kind(config)
    refuse_vocabulary_modules(model, config.target_modules or [], config.modules_to_save)
    config.lora_dropout = 0.0
    try:
        peft = PeftModel.from_pretrained(model, str(folder), config=config, is_trainable=True, use_safetensors=True)
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError("adapter", str(folder), f"an adapter that fits this model ({reason})") from None
    return peft.eval()


def refuse_vocabulary_modules(model: PreTrainedModel, targets: Any, saved: Any = None) -> None:
    """Reject adapters on the head or the embedding, which policy, reference and reward share."""
    shared = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    names = [name for name, module in model.named_modules() if id(module) in shared]
    listed = [targets] if isinstance(targets, str) else list(targets)
    hit = [t for t in listed + list(saved or []) if any(n == t or n.endswith("." + t) for n in names)]
    if hit:
        allowed = "layers other than the head and the embedding: policy, reference and reward share those"
        raise InputError("lora.target_modules", hit, allowed)
