"""An adapter merged into its base: a plain transformers folder, which needs neither PEFT nor this package.

The weights ``W + (alpha / r) B A`` are computed in float32 (float64 for a float64 base) and then rounded to the type of
the output. Rounding to bfloat16 keeps 8 bits, and with them only part of a small adapter; float32 keeps all of it.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging

from grade.errors import InputError
from grade.files import claimed
from grade.models.adapter import ADAPTER_FILES, load_adapter
from grade.models.backbone import DTYPES, errors_only
from grade.models.compatibility import check_loaded
from grade.training.checkpoint import last_checkpoint


def merge(source: str | Path, output: str | Path, dtype: str | None = None) -> torch.dtype:
    """Merge a run's adapter into its base and write model, tokenizer and generation config.

    Args:
        source: Folder of a run, of an adapter or of a checkpoint.
        output: Folder to write; it must not exist, or be empty. It is complete or not there.
        dtype: Type of its weights; None: the base's.

    Returns:
        The type of the weights.

    Raises:
        InputError: If there is no adapter, its base is missing or does not fit it, or the folder cannot be written.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError("dtype", dtype, ", ".join(DTYPES))
    adapter = adapter_folder(source)
    with claimed(output, (), inputs=(source,), option="OUT") as folder:
        with warnings.catch_warnings(action="ignore"):  # transformers' and PEFT's on what is checked here
            model, tokenizer = _load(adapter)
            kind = model.dtype if dtype is None else DTYPES[dtype]
            if model.dtype != torch.float64:
                model.float()
            merged = load_adapter(model, adapter).merge_and_unload().to(kind)
        with folder.replacement() as staging:
            try:
                merged.save_pretrained(staging)
                tokenizer.save_pretrained(staging)
            except (ValueError, RuntimeError) as error:  # the generation config's checks raise ValueError
                raise InputError("OUT", str(output), f"a folder that can be written ({_reason(error)})") from None
    return kind


def adapter_folder(source: str | Path) -> Path:
    """The adapter of a run, or the folder itself if it is an adapter or a checkpoint.

    Args:
        source: The folder.

    Raises:
        InputError: If it holds no adapter.
    """
    folder = Path(source)
    for place in (folder, folder / "adapter"):
        if all((place / name).is_file() for name in ADAPTER_FILES):
            return place
    newest = last_checkpoint(folder)
    hint = f"; the newest checkpoint of this unfinished run is {newest}" if newest else ""
    raise InputError("RUN", str(source), f"the folder of a finished run, of an adapter or of a checkpoint{hint}")


def _load(adapter: Path) -> tuple[PreTrainedModel, Any]:
    """The base that an adapter names, in its own type, and the tokenizer beside the adapter or else the base's."""
    try:
        base = json.loads((adapter / ADAPTER_FILES[0]).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        allowed = f"a folder whose adapter_config.json names its base ({_reason(error)})"
        raise InputError("adapter", str(adapter), allowed) from None
    allowed = "a base to be named in adapter_config.json, by a Hugging Face id or a folder with safetensors weights"
    if not base:
        raise InputError("base_model_name_or_path", base, allowed)
    logging.disable_progress_bar()
    try:
        with errors_only():
            model, info = AutoModelForCausalLM.from_pretrained(
                base, dtype="auto", use_safetensors=True, trust_remote_code=False, output_loading_info=True
            )
        own = (adapter / "tokenizer_config.json").is_file()
        tokenizer = AutoTokenizer.from_pretrained(adapter if own else base, trust_remote_code=False)
    except Exception as error:  # transformers raises a dozen types, which mean the same to the user
        raise InputError("base_model_name_or_path", base, f"{allowed} ({_reason(error)})") from None
    check_loaded(base, info)
    return model.eval(), tokenizer


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
