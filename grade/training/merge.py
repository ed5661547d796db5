"""An adapter and a token bias merged into their base: a plain transformers folder, which needs neither PEFT nor us.

The weights ``W + (alpha / r) B A`` are computed in float32 (float64 for a float64 base) and then rounded to the type of
the output. Rounding to bfloat16 keeps 8 bits, and with them only part of a small adapter; float32 keeps all of it.

A token bias becomes part of the head's own bias, rounded like all weights, if the architecture has one and no soft cap
lies between; else ``sequence_bias`` of the generation config. transformers' ``generate`` then adds it, to the same
logits as the policy does; a plain forward pass does not. Servers read neither: ``logit_bias.json`` has its largest
entries for their requests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from grade.errors import InputError
from grade.files import read_json, write_json
from grade.models.adapter import ADAPTER_CONFIG, check_base, has_lora, load_adapter
from grade.models.backbone import DTYPES
from grade.models.base import head_of
from grade.models.token_bias import BIAS_FILE, saved_bias

LOGIT_BIAS_FILE = "logit_bias.json"
LOGIT_BIASES = 300
"""Entries of ``logit_bias`` that servers take: OpenAI's protocol has this limit."""


class _Merged(NamedTuple):
    """What a merged folder holds."""

    dtype: torch.dtype  # of the weights
    token_bias: Literal["head", "sequence_bias"] | None  # where the token bias went; None: there was none


def merge(source: str | Path, output: str | Path, dtype: str | None = None) -> _Merged:
    """Merge a run's adapter and token bias into their base and write model, tokenizer and generation config.

    ``source`` is the folder of a run, of an adapter or of a checkpoint; ``output`` must not exist, or be empty.
    Without ``dtype`` weights have the base's.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError("dtype", dtype, ", ".join(DTYPES))
    output = Path(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError("OUT", str(output), "a folder that does not exist yet, or is empty")
    folders = (Path(source), Path(source, "adapter"))
    adapter = next((f for f in folders if has_lora(f) or (f / BIAS_FILE).is_file()), None)
    if adapter is None:
        raise InputError("RUN", str(source), "the folder of a finished run, of an adapter or of a checkpoint")
    lora = has_lora(adapter)
    base = read_json(adapter / ADAPTER_CONFIG)["base_model_name_or_path"] if lora else saved_bias(adapter)[1]
    if not base:
        file = ADAPTER_CONFIG if lora else BIAS_FILE
        raise InputError("base_model_name_or_path", base, f"a base that {file} names")
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto", use_safetensors=True, trust_remote_code=False)
    own = (adapter / "tokenizer_config.json").is_file()
    tokenizer = AutoTokenizer.from_pretrained(adapter if own else base, trust_remote_code=False)
    kind = model.dtype if dtype is None else DTYPES[dtype]
    if model.dtype != torch.float64:
        model.float()
    values, _ = saved_bias(adapter, len(model.get_output_embeddings().weight))
    check_base(model, adapter)
    if lora:
        model = load_adapter(model.eval(), adapter).merge_and_unload()
    place = None if values is None else add_token_bias(model, values)
    model.to(kind).save_pretrained(output)
    tokenizer.save_pretrained(output)
    if place == "sequence_bias":
        write_json(output / LOGIT_BIAS_FILE, _logit_bias(values))
    return _Merged(kind, place)


@torch.no_grad()
def add_token_bias(model: PreTrainedModel, values: Tensor) -> Literal["head", "sequence_bias"]:
    """Put a token bias [V] into a model, in place; where it went.

    The logits are ``cap(scale (h W^T + b_head)) + token_bias``, so without a cap ``b_head + token_bias / scale``.
    """
    head = head_of(model)
    if head.bias is not None and head.softcap is None:
        head.bias.add_(values.to(head.bias) / head.scale)
        return "head"
    biases = [[[token], value] for token, value in enumerate(values.tolist()) if value]
    model.generation_config.sequence_bias = biases or None  # transformers refuses an empty list
    return "sequence_bias"


def _logit_bias(values: Tensor, n: int = LOGIT_BIASES) -> dict[str, float]:
    """The n largest entries by magnitude of a token bias [V], largest first, as ``logit_bias`` of a server's requests.

    >>> _logit_bias(torch.tensor([0.5, -2.0, 0.0, 1.0]), 2)
    {'1': -2.0, '3': 1.0}
    """
    largest = values.abs().argsort(descending=True, stable=True)[:n]
    return {str(token): float(values[token]) for token in largest.tolist() if values[token]}
