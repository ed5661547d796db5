"""An adapter merged into its base: a plain transformers folder, which needs neither PEFT nor this package.

The weights ``W + (alpha / r) B A`` are computed in float32 (float64 for a float64 base) and then rounded to the type of
the output. Rounding to bfloat16 keeps 8 bits, and with them only part of a small adapter; float32 keeps all of it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grade.errors import InputError
from grade.files import read_json
from grade.models.adapter import ADAPTER_FILES, load_adapter
from grade.models.backbone import DTYPES


def merge(source: str | Path, output: str | Path, dtype: str | None = None) -> torch.dtype:
    """Merge a run's adapter into its base and write model, tokenizer and generation config; the weights' type.

    ``source`` is the folder of a run, of an adapter or of a checkpoint; ``output`` must not exist, or be empty.
    Without ``dtype`` weights have the base's.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError("dtype", dtype, ", ".join(DTYPES))
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError("OUT", str(output), "a folder that does not exist yet, or is empty")
    adapter = next((f for f in (Path(source), Path(source, "adapter")) if (f / ADAPTER_FILES[0]).is_file()), None)
    if adapter is None:
        raise InputError("RUN", str(source), "the folder of a finished run, of an adapter or of a checkpoint")
    base = read_json(adapter / ADAPTER_FILES[0])["base_model_name_or_path"]
    if not base:
        raise InputError("base_model_name_or_path", base, "a base that adapter_config.json names")
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", use_safetensors=True, trust_remote_code=False)
    own = (adapter / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(adapter if own else base, trust_remote_code=False)
    kind = model.dtype if dtype is None else DTYPES[dtype]
    if model.dtype != torch.float64:
        model.float()
    merged = load_adapter(model.eval(), adapter).merge_and_unload().to(kind)
    merged.save_pretrained(output)
    tokenizer.save_pretrained(output)
    return kind
