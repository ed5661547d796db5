"""An adapter merged into its base: a plain transformers folder, which needs neither PEFT nor this package.

The weights ``W + (alpha / r) B A`` are computed in float32 (float64 for a float64 base) and then rounded to the type of
the output. Rounding to bfloat16 keeps 8 bits, and with them only part of a small adapter; float32 keeps all of it.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from grade.errors import InputError, reading
from grade.files import check_whole, claimed, read_json, require_source
from grade.models.adapter import ADAPTER_FILES, load_adapter
from grade.models.backbone import DTYPES, errors_only
from grade.models.compatibility import check_loaded
from grade.training.folder import ADAPTER_MANIFEST, last_checkpoint


def merge(source: str | Path, output: str | Path, dtype: str | None = None) -> torch.dtype:
    """Merge a run's adapter into its base and write model, tokenizer and generation config; the weights' type.

    ``source`` is the folder of a run, of an adapter or of a checkpoint; ``output`` must not exist, or be empty, and is
    complete or not there. Without ``dtype`` weights have the base's.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError("dtype", dtype, ", ".join(DTYPES))
    adapter = _adapter_folder(Path(source))
    if adapter != Path(source):
        check_whole(Path(source), "RUN", (ADAPTER_MANIFEST,))
    check_whole(adapter, "adapter")
    with reading("adapter", adapter, "a folder whose adapter_config.json names its base"):
        base = read_json(adapter / ADAPTER_FILES[0])["base_model_name_or_path"]
    allowed = "a base to be named in adapter_config.json, by a Hugging Face id or a folder with safetensors weights"
    if not base or not isinstance(base, str):
        raise InputError("base_model_name_or_path", base, allowed)
    require_source("base_model_name_or_path", base, allowed)
    logging.disable_progress_bar()
    with claimed(output, (), inputs=(source,), option="OUT") as folder:
        with warnings.catch_warnings(action="ignore"):  # transformers' and PEFT's on what is checked here
            with reading("base_model_name_or_path", base, allowed), errors_only():
                model, info = AutoModelForCausalLM.from_pretrained(
                    base, dtype="auto", use_safetensors=True, trust_remote_code=False, output_loading_info=True,
                    ignore_mismatched_sizes=True,
                )  # fmt: skip
                own = (adapter / "tokenizer_config.json").is_file()
                tokenizer = AutoTokenizer.from_pretrained(adapter if own else base, trust_remote_code=False)
            check_loaded(base, info)
            kind = model.dtype if dtype is None else DTYPES[dtype]
            if model.dtype != torch.float64:
                model.float()
            merged = load_adapter(model.eval(), adapter).merge_and_unload().to(kind)
        for name, weight in merged.named_parameters():
            if not weight.isfinite().all():
                raise InputError("dtype", str(kind).removeprefix("torch."), f"a type in which {name} is finite")
        with folder.replacement() as staging, reading("OUT", output, "a folder that can be written"):
            merged.save_pretrained(staging)
            tokenizer.save_pretrained(staging)
    return kind


def _adapter_folder(source: Path) -> Path:
    """The adapter of a run, or the folder itself if it is an adapter or a checkpoint."""
    for place in (source, source / "adapter"):
        if all((place / name).is_file() for name in ADAPTER_FILES):
            return place
    named, newest = sorted(source.glob(f"*/{ADAPTER_FILES[0]}")), last_checkpoint(source)
    hint = f"; the newest checkpoint of this unfinished run is {newest}" if newest else ""
    hint = f", such as {named[0].parent}" if named and not newest else hint
    raise InputError("RUN", str(source), f"the folder of a finished run, of an adapter or of a checkpoint{hint}")
