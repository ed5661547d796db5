"""The LoRA adapter: a new one, one from a folder, and weights with the adapter folded in.

PEFT checks its own settings. What would change the reference, or be trained and not sampled from, is refused here:
everything that trains more than ``lora_A`` and ``lora_B`` of linear layers, initialisations that change the base, and
adapters on the head or the embedding, which policy, reference and reward share.

Sampling uses weights with the adapter folded in. That is exact where a model calls its adapted layers. Some models
read the weight of a layer instead, as in absorbed projections of latent attention: a pass would leave the adapter out,
and sampling would not. So each new adapter is tried with both.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grade.errors import InputError
from grade.files import read_json
from grade.models.compatibility import rounds_coarsely
from grade.models.lora import LoraSettings
from grade.models.parameters import fingerprint, restoring, same_base

logger = logging.getLogger(__name__)

ADAPTER_FILES = ADAPTER_CONFIG, ADAPTER_WEIGHTS = ("adapter_config.json", "adapter_model.safetensors")
BASE_FILE = "base_fingerprint.json"
_UNCHANGED = (True, False, "gaussian", "orthogonal", "eva")
"""``init_lora_weights`` values that leave the base as it is."""

_FOLDED_TYPES = (torch.float32, torch.float64)
_NOISE, _SHARE, _TOKENS = 0.1, 0.1, 5
"""Of the check that folding is exact: size of its adapter against the weights', largest difference against the
adapter's effect, and tokens. A layer that is left out has a larger share; rounding, TF32 included, a smaller."""


def new_adapter(model: PreTrainedModel, lora: LoraSettings | LoraConfig, seed: int) -> PeftModel:
    """Put a new adapter on a frozen base, which is changed in place; the wrapped model is in eval mode.

    Dropout is set to 0. The seed is of the initialisation, and leaves the global state alone. `LoraSettings` with the
    default layers adapts all linear ones of a base that lacks one of those.

    Raises:
        InputError: If the adapter would change the reference, or be left out while sampling.
        ValueError: From PEFT, for instance if no layer has the target's name.
    """
    refuse_adapted(model)
    if isinstance(lora, LoraSettings):
        head = model.get_output_embeddings()
        linear = {
            name.rsplit(".", 1)[-1] for name, module in model.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and module is not head
        }  # fmt: skip
        every = lora.target_modules == LoraSettings().target_modules and not linear.issuperset(lora.target_modules)
        config = LoraConfig(
            r=lora.r, lora_alpha=lora.alpha, task_type="CAUSAL_LM",
            target_modules="all-linear" if every else lora.target_modules,
        )  # fmt: skip
    else:
        config = copy.deepcopy(lora)
    _prepare(config)
    with torch.random.fork_rng(devices=[]), _without_old_names():
        torch.manual_seed(seed)
        return _checked(get_peft_model(model, config))


def continued_adapter(model: PeftModel) -> PeftModel:
    """Make the active adapter of a wrapped model, whose base is frozen, trainable again; it is in eval mode."""
    if len(model.active_adapters) != 1:
        raise InputError("adapter", model.active_adapters, "one that is active: call set_adapter with its name")
    _prepare(model.peft_config[model.active_adapter])
    for name, layer in _lora_layers(model):
        if layer.merged:
            raise InputError("adapter", f"merged into {name}", "an adapter beside its base: call unmerge_adapter()")
        for key in layer.lora_dropout:
            layer.lora_dropout[key] = nn.Identity()
    model.set_adapter(model.active_adapter)
    return _checked(model)


def load_adapter(model: PreTrainedModel, folder: str | Path) -> PeftModel:
    """Put an adapter that `Backbone.save_adapter` or PEFT saved on a frozen base, which is changed in place.

    The wrapped model is trainable and in eval mode.

    Raises:
        InputError: If the adapter has another base or other tensors, or would change the reference.
    """
    refuse_adapted(model)
    _require_lora(folder)
    check_base(model, folder)
    config = PeftConfig.from_pretrained(str(folder))
    _prepare(config)
    with _without_old_names():
        peft = PeftModel.from_pretrained(model, str(folder), config=config, is_trainable=True, use_safetensors=True)
    _check_tensors(peft, folder)
    return _checked(peft)


@contextlib.contextmanager
def _without_old_names() -> Iterator[None]:
    """Without the warning of transformers at a property that PEFT still reads by its former name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        yield


def has_lora(folder: str | Path) -> bool:
    """Whether a folder holds a saved adapter of layers."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def restore_adapter(model: PeftModel, folder: str | Path) -> None:
    """Give the active adapter the values that a checkpoint has of it."""
    _require_lora(folder)
    check_base(model.get_base_model(), folder)
    _check_tensors(model, folder)
    model.load_adapter(str(folder), model.active_adapter, is_trainable=True)


def saved_values(model: PeftModel, folder: str | Path) -> list[Tensor]:
    """The parameters of a saved adapter of the same base, layers and ranks as the active one's, in its order."""
    _require_lora(folder)
    check_base(model.get_base_model(), folder)
    _check_tensors(model, folder)
    saved, mark = load_file(Path(folder) / ADAPTER_WEIGHTS), f".{model.active_adapter}"
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [saved[name.replace(mark, "")].to(p) for name, p in named]


def foldable(model: nn.Module) -> bool:
    """Whether no adapted weight is of half precision or quantised: rounding ``W + B A`` would lose the adapter."""
    return all(layer.get_base_layer().weight.dtype in _FOLDED_TYPES for _, layer in _lora_layers(model))


@contextlib.contextmanager
def folded(model: nn.Module, report: Callable[[list[Tensor]], None] | None = None) -> Iterator[None]:
    """Within this context each adapted layer is its base layer, of weight ``W + scale * B A``; then all is as before.

    The weights are put back bit by bit. PEFT's layers are out of the model meanwhile: they take time even when switched
    off, a twentieth of a decoding step of SmolLM2. ``report`` is called with each new weight.
    """
    layers, originals = _lora_layers(model), []
    try:
        with torch.no_grad():
            for _, layer in layers:
                active = [name for name in layer.active_adapters if name in layer.lora_A]
                if layer.disable_adapters or not active:
                    continue
                weight = layer.get_base_layer().weight
                originals.append((weight, weight.data))
                delta = sum(layer.get_delta_weight(name) for name in active)
                weight.data = weight.data + delta.to(weight.dtype)
                if report is not None:
                    report([weight])
        for name, layer in layers:
            model.set_submodule(name, layer.get_base_layer())
        yield
    finally:
        for name, layer in layers:
            model.set_submodule(name, layer)
        for weight, original in reversed(originals):  # the first value of a weight that came twice is put back last
            weight.data = original


def _lora_layers(model: nn.Module) -> list[tuple[str, LoraLayer]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def refuse_adapted(model: PreTrainedModel) -> None:
    """Refuse a base with adapter layers of its own: nothing would switch them off for the reference."""
    adapted = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    if adapted:
        allowed = "a base without adapter layers, or the PeftModel itself, whose adapter is continued"
        raise InputError("backbone", adapted[0], allowed)


def _prepare(config: PeftConfig) -> None:
    """Set dropout to 0, and refuse an initialisation that changes the base."""
    if type(config) is not LoraConfig:  # AdaLoRA's settings are derived from it
        raise InputError("adapter", str(config.peft_type), "LORA: other adapters change the inputs or the head")
    if config.init_lora_weights not in _UNCHANGED:
        allowed = f"{', '.join(map(str, _UNCHANGED))}: others change the base, which is the reference"
        raise InputError("lora: init_lora_weights", config.init_lora_weights, allowed)
    if config.lora_dropout:
        logger.warning(f"lora_dropout = {config.lora_dropout} is not used: a dropout mask is not part of a sample")
    config.lora_dropout = 0.0
    for key in ("target_modules", "exclude_modules"):  # a set's order, and so the file, changes between processes
        if isinstance(getattr(config, key), set):
            setattr(config, key, sorted(getattr(config, key)))


def _require_lora(folder: str | Path) -> None:
    if not (Path(folder) / ADAPTER_WEIGHTS).is_file():
        raise InputError("adapter", str(folder), f"a folder with {' and '.join(ADAPTER_FILES)}")


def check_base(model: PreTrainedModel, folder: str | Path) -> None:
    """Refuse an adapter with the fingerprint of another base; one that plain PEFT wrote has none."""
    path = Path(folder) / BASE_FILE
    if path.is_file() and not same_base(read_json(path), fingerprint(model)):
        base = model.config.name_or_path or type(model).__name__
        allowed = f"an adapter of {base}: it was trained on a base with other weights ({BASE_FILE})"
        raise InputError("adapter", str(folder), allowed)


def _check_tensors(model: PeftModel, folder: str | Path) -> None:
    """Refuse adapter weights that lack a tensor or have one too many, or another scale: PEFT takes what it can."""
    here, there = model.peft_config[model.active_adapter], PeftConfig.from_pretrained(str(folder))
    for name in ("lora_alpha", "alpha_pattern", "use_rslora"):
        if getattr(there, name) != getattr(here, name):
            raise InputError(f"adapter: {name}", getattr(there, name), f"{getattr(here, name)}, as the policy's")
    own = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
    saved = load_file(Path(folder) / ADAPTER_WEIGHTS)
    for name in sorted(saved.keys() | own.keys()):
        here, there = (list(tensors[name].shape) if name in tensors else "nothing" for tensors in (own, saved))
        if here != there:
            allowed = f"an adapter that fits this model ({name}: {there} in the file, {here} in the model)"
            raise InputError("adapter", str(folder), allowed)


def _checked(peft: PeftModel) -> PeftModel:
    """The wrapped model in eval mode, if it trains ``lora_A`` and ``lora_B`` of linear layers alone."""
    for name, p in peft.named_parameters():
        if p.requires_grad and not re.search(r"\.lora_[AB]\.[^.]+\.weight$", name):
            allowed = "lora_A and lora_B of linear layers alone: all else would change the reference"
            raise InputError("lora: trained parameter", name, allowed)
    model = peft.get_base_model()
    shared = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None}
    for name, layer in _lora_layers(peft):
        if not isinstance(layer.get_base_layer(), nn.Linear | Conv1D):
            raise InputError("lora.target_modules", name, "linear layers, not parameters such as fused experts")
        if id(layer.get_base_layer().weight) in shared:
            allowed = "layers other than the head and the embedding, which policy, reference and reward share"
            raise InputError("lora.target_modules", name, allowed)
    _check_folding(peft.eval())
    return peft


@torch.no_grad()
def _check_folding(peft: PeftModel) -> None:
    """Refuse an adapter with whose folded weights the logits are not those with the adapter beside them."""
    model, generator = peft.get_base_model(), torch.Generator().manual_seed(0)
    table = model.get_input_embeddings().weight
    if table.is_meta or isinstance(table, FakeTensor) or not foldable(peft):
        return
    ids = torch.arange(1, 1 + _TOKENS, device=table.device).remainder(len(table)).view(1, -1)

    def logits() -> Tensor:
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.double()

    factors = [  # layer, A, B and scale of each active adapter
        (layer, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])
        for _, layer in _lora_layers(peft) for name in layer.active_adapters if name in layer.lora_A
    ]  # fmt: skip
    with restoring([p for _, a, b, _ in factors for p in (a, b)]):
        for layer, a, b, scale in factors:
            size = _NOISE * layer.get_base_layer().weight.double().square().mean().sqrt()
            for p, factor in ((a, b.shape[1] ** -0.5), (b, size / scale if scale else 0.0)):
                p.copy_(torch.randn(p.shape, generator=generator, device="cpu").to(p) * factor)
        beside = logits()
        with folded(model):
            inside = logits()
        with peft.disable_adapter():
            effect = (beside - logits()).norm()
    rounding = 1e3 * torch.finfo(table.dtype).eps * beside.norm()
    if (inside - beside).norm() > _SHARE * effect + rounding:
        if rounds_coarsely(table.dtype):
            warnings.warn("sampling may differ from training by more than TF32 explains; try float32", stacklevel=2)
            return
        kinds = sorted({name.rsplit(".", 1)[-1] for name, _ in _lora_layers(peft)})
        allowed = "layers that the model calls: where it reads a weight itself, sampling would differ from training"
        raise InputError("lora.target_modules", kinds, allowed)
