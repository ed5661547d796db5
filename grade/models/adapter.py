"""The LoRA adapter: its settings, a new one, one from a folder.

Plain LoRA on linear layers is exact in all three roles of the base: rank and alpha patterns, rank-stabilised scales,
regular expressions, Conv1D. Whatever else a configuration asks for is rejected by name: adapters on the head or the
embedding and prompt-learning ones, which change what policy, reference and reward share; initialisations and biases
that change the base, which is the reference; variants that sampling with folded weights would leave out.

Left out: adapters in pickled files.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.layer import Embedding, Linear
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel

from grade.config import Config
from grade.errors import InputError
from grade.models.fingerprint import fingerprint, same_base
from grade.models.folding import lora_layers, refuse_unfoldable

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
BASE_FILE = "base_fingerprint.json"
_ANY_VALUE = {
    "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "r",
    "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "runtime_config", "megatron_core",
    "loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "ensure_weight_tying",
    "task_type", "init_lora_weights",
}  # fmt: skip
"""Settings of plain LoRA, those of what another setting would have to switch on, and two that are checked apart."""
_INITIAL = (True, False, "gaussian", "orthogonal", "eva")
"""Initialisations that leave the base as it is and train all of A and B; a new adapter cannot have the last."""
_REASONS = {
    "bias": "trained biases are part of the base, which is the reference",
    "modules_to_save": "their copies would be trained and not sampled from",
    "trainable_token_indices": "policy, reference and reward share the embedding",
    "layer_replication": "replicated layers share their weights, to which a layer's adapter cannot be added",
    "target_parameters": "linear layers only, not parameters such as fused experts",
}
_NOT_PLAIN = "plain LoRA only: what sampling leaves out would be trained and not sampled from"

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


def new_adapter(model: PreTrainedModel, lora: LoraSettings | LoraConfig, seed: int) -> PeftModel:
    """Put a new adapter on a model, which is changed in place.

    Args:
        model: The frozen base.
        lora: Rank, scale and layers, ours or PEFT's; dropout is set to 0.
        seed: Seed of the initialisation; the global state is not touched.

    Returns:
        The wrapped model, in eval mode.

    Raises:
        InputError: If a layer does not exist or may not be adapted, or a setting is not supported.
    """
    refuse_adapted(model)
    config = copy.deepcopy(lora)
    if isinstance(lora, LoraSettings):
        config = LoraConfig(
            r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=lora.target_modules,
            task_type="CAUSAL_LM",
        )  # fmt: skip
    config.lora_dropout = 0.0
    _refuse_settings(config, "lora", _INITIAL[:-1])
    refuse_vocabulary_modules(model, config)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # peft still reads a property that transformers has renamed.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        # peft says that it corrects its own default for GPT-2's layers, as it does.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to", category=UserWarning)
        torch.manual_seed(seed)
        try:
            with _bare_after_errors(model):
                return _checked(get_peft_model(model, config))
        except InputError:
            raise
        except ValueError as error:
            linear = sorted({n.rsplit(".", 1)[-1] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
            allowed = f"names of linear layers of this model ({', '.join(linear)})"
            targets = config.target_modules
            shown = sorted(targets) if isinstance(targets, set) else targets
            raise InputError("lora.target_modules", shown, allowed) from error


def continued_adapter(model: PeftModel) -> PeftModel:
    """Make the active adapter of a wrapped model trainable again.

    Args:
        model: Wrapped by PEFT; its base is frozen.

    Returns:
        The same model, in eval mode.

    Raises:
        InputError: If the adapter is of another kind than LoRA, adapts what may not be adapted, or is merged.
    """
    for config in model.peft_config.values():  # an adapter that is not active may have changed the base as well
        _refuse_kind(config)
        _refuse_settings(config)
        config.lora_dropout = 0.0
    for name, layer in lora_layers(model):
        if layer.merged:
            raise InputError("adapter", f"merged into {name}", "an adapter beside its base: call unmerge_adapter()")
        for key in layer.lora_dropout:
            layer.lora_dropout[key] = nn.Identity()
    model.set_adapter(model.active_adapter)
    return _checked(model)


def _refuse_kind(config: PeftConfig) -> None:
    if not isinstance(config, LoraConfig):
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise InputError("adapter", kind, "LORA (prompt-learning and other adapters change the inputs or the head)")


def load_adapter(model: PreTrainedModel, folder: str | Path) -> PeftModel:
    """Put a saved adapter on a model, which is changed in place.

    Args:
        model: The frozen base.
        folder: As written by `save_adapter` or PEFT.

    Returns:
        The wrapped model, trainable, in eval mode.

    Raises:
        InputError: If the adapter is missing, pickled, damaged, of another kind or base, or does not fit.
    """
    refuse_adapted(model)
    refuse_files(model, folder)
    allowed = "an adapter that fits this model"
    try:
        with _bare_after_errors(model), warnings.catch_warnings(action="ignore"):  # PEFT's on what is checked here
            config = PeftConfig.from_pretrained(str(folder))
            _refuse_kind(config)
            _refuse_unknown(config, json.loads((Path(folder) / ADAPTER_FILES[0]).read_text("utf-8")))
            _refuse_settings(config)
            refuse_vocabulary_modules(model, config)
            config.lora_dropout = 0.0
            peft = PeftModel.from_pretrained(model, str(folder), config=config, is_trainable=True, use_safetensors=True)
            refuse_tensors(peft, folder)
            return _checked(peft)
    except (InputError, torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # PEFT, re and safetensors raise many types, which mean the same to the user
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = next((line.strip() for line in lines if "size mismatch" in line), lines[0])
        raise InputError("adapter", str(folder), f"{allowed} ({reason})") from None


def save_adapter(model: PeftModel, folder: str | Path) -> None:
    """Write an adapter as PEFT does (safetensors and ``adapter_config.json``), and which base it belongs to.

    Args:
        model: Base and adapter.
        folder: Target folder.
    """
    model.save_pretrained(str(folder))
    write_fingerprint(model, folder)


def write_fingerprint(model: PeftModel, folder: str | Path) -> None:
    """Write ``base_fingerprint.json`` beside a saved adapter.

    Args:
        model: Base and adapter.
        folder: The adapter's folder.
    """
    text = json.dumps(fingerprint(model.get_base_model()), indent=2, sort_keys=True)
    (_place(model, folder) / BASE_FILE).write_text(text + "\n", encoding="utf-8")


def refuse_saved(model: PeftModel, folder: str | Path) -> None:
    """Reject a saved adapter that does not continue the one on a model.

    Args:
        model: Base and adapter.
        folder: As written by `save_adapter` or a Trainer.

    Raises:
        InputError: If it is missing, pickled or damaged, or belongs to another base or other layers.
    """
    refuse_files(model.get_base_model(), _place(model, folder))
    refuse_tensors(model, _place(model, folder))


def _place(model: PeftModel, folder: str | Path) -> Path:
    """Where PEFT keeps the active adapter: only the default one lies in the folder itself."""
    return Path(folder) if model.active_adapter == "default" else Path(folder) / model.active_adapter


def refuse_files(model: PreTrainedModel, folder: str | Path) -> None:
    """Reject a folder without an adapter in safetensors, or with the fingerprint of another base.

    Args:
        model: The base, with or without an adapter.
        folder: The adapter's; one that plain PEFT wrote has no fingerprint, and fits any base of its shape.

    Raises:
        InputError: Naming what is missing or differs.
    """
    folder = Path(folder)
    if not (folder / ADAPTER_FILES[0]).is_file():
        raise InputError("adapter", str(folder), "a folder with adapter_config.json, as saved by training")
    if not (folder / ADAPTER_FILES[1]).is_file():
        pickled = "; adapter_model.bin is pickled, and loading it could run code"
        hint = pickled if (folder / "adapter_model.bin").is_file() else ""
        raise InputError("adapter", str(folder), f"a folder with {ADAPTER_FILES[1]}{hint}")
    if not (folder / BASE_FILE).is_file():
        return
    try:
        stored = dict(json.loads((folder / BASE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        allowed = f"a {BASE_FILE} as written by training, or none ({type(error).__name__})"
        raise InputError("adapter", str(folder), allowed) from None
    if not same_base(stored, fingerprint(model)):
        base = model.config._name_or_path or type(model).__name__
        allowed = f"an adapter that fits this model: it was trained on a base with other weights than {base}"
        raise InputError("adapter", str(folder), f"{allowed} ({BASE_FILE})")


def refuse_tensors(model: PeftModel, folder: str | Path) -> None:
    """Reject adapter weights that lack a tensor, have one too many, or are not finite: PEFT takes what it can.

    Args:
        model: Base and adapter.
        folder: The saved adapter's.

    Raises:
        InputError: Naming the first such tensor.
    """
    wanted = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
    reason = ""
    try:
        with safe_open(Path(folder) / ADAPTER_FILES[1], "pt") as file:
            given = set(file.keys())
            if given != set(wanted):
                odd = min(given - set(wanted) or set(wanted) - given)
                reason = f"{odd} has no place in the base" if odd in given else f"it lacks {odd}"
            for name in () if reason else sorted(given):
                tensor = file.get_tensor(name)
                if tensor.shape != wanted[name].shape:
                    reason = f"{name} has shape {list(tensor.shape)}, not {list(wanted[name].shape)}"
                elif not torch.isfinite(tensor).all():
                    reason = f"{name} is not finite"
                if reason:
                    break
    except (OSError, SafetensorError) as error:
        reason = str(error).strip() or type(error).__name__
    if reason:
        raise InputError("adapter", str(folder), f"an adapter that fits this model ({reason})")


def _refuse_unknown(config: LoraConfig, written: dict[str, Any]) -> None:
    for name in sorted(written.keys() - {field.name for field in dataclasses.fields(config)}):
        if written[name]:
            raise InputError(f"adapter: {name}", written[name], "a setting that this version of PEFT knows")


def _refuse_settings(config: LoraConfig, prefix: str = "adapter", initial: tuple[bool | str, ...] = _INITIAL) -> None:
    """Reject what is not plain LoRA: a setting, known today or not, whose value is not its default."""
    if config.task_type not in (None, "CAUSAL_LM"):
        raise InputError(f"{prefix}: task_type", str(getattr(config.task_type, "value", config.task_type)), "CAUSAL_LM")
    for rank in (config.r, *config.rank_pattern.values()):
        if not isinstance(rank, int) or not 1 <= rank <= MOST_RANKS:
            raise InputError(f"{prefix}: r", rank, f"a whole number from 1 to {MOST_RANKS}")
    if config.init_lora_weights not in initial:
        allowed = f"{', '.join(map(str, initial))} (others change the base, which is the reference, or need data)"
        raise InputError(f"{prefix}: init_lora_weights", config.init_lora_weights, allowed)
    for field in dataclasses.fields(config):
        value, default = getattr(config, field.name), field.default
        if field.name not in _ANY_VALUE and value != default and (value or default):
            reason = _REASONS.get(field.name, _NOT_PLAIN)
            raise InputError(f"{prefix}: {field.name}", value, f"{default!r} ({reason})")


def refuse_vocabulary_modules(model: PreTrainedModel, config: LoraConfig) -> None:
    """Reject adapters on the head or the embedding, which policy, reference and reward share."""
    shared = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    names = [name for name, module in model.named_modules() if id(module) in shared]
    if config.target_modules:
        _refuse_vocabulary([name for name in names if check_target_module_exists(config, name)])


def _refuse_vocabulary(hit: list[str]) -> None:
    if hit:
        allowed = "layers other than the head and the embedding: policy, reference and reward share those"
        raise InputError("lora.target_modules", hit, allowed)


def refuse_adapted(model: PreTrainedModel) -> None:
    """Reject a base with adapter layers of its own: nothing would switch them off for the reference."""
    adapted = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    if adapted:
        allowed = "a base without adapter layers, or the PeftModel itself, whose adapter is continued"
        raise InputError("backbone", adapted[0], allowed)


@contextlib.contextmanager
def _bare_after_errors(model: PreTrainedModel) -> Iterator[None]:
    """After an error within this context the model is without adapter layers again, as before."""
    try:
        yield
    except Exception:
        for name, layer in lora_layers(model):
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, layer.get_base_layer())
        raise


def _checked(peft: PeftModel) -> PeftModel:
    """The wrapped model in eval mode, if each adapted weight belongs to one layer only and is no one else's."""
    model, owners = peft.get_base_model(), defaultdict(set)
    for module in model.modules():
        for child in (*module._parameters.values(), *module._modules.values()):
            owners[id(child)].add(id(module))
    vocabulary = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None}
    for name, layer in lora_layers(model):
        base = layer.get_base_layer()
        if not isinstance(layer, Linear | Embedding):
            raise InputError("lora.target_modules", name, "linear layers, not parameters such as fused experts")
        if id(base.weight) in vocabulary:
            _refuse_vocabulary([name])
        if len(owners[id(base)]) > 1 or len(owners[id(base.weight)]) > 1:
            allowed = "layers with weights of their own: an adapter on weights that layers share would change them all"
            raise InputError("lora.target_modules", name, allowed)
        if not all(map(math.isfinite, layer.scaling.values())):
            raise InputError("adapter: lora_alpha", max(layer.lora_alpha.values()), "a finite number")
    for config in peft.peft_config.values():
        for key in ("target_modules", "exclude_modules"):  # a set's order, and so the file, changes between processes
            if isinstance(getattr(config, key), set):
                setattr(config, key, sorted(getattr(config, key)))
    refuse_unfoldable(peft.eval())
    return peft
