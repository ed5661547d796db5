"""The LoRA adapter: its settings, a new one, one from a folder.

Plain LoRA on linear layers is exact in all three roles of the base: rank and alpha patterns, rank-stabilised scales,
regular expressions, Conv1D. Whatever else a configuration asks for is rejected by name: adapters on the head or the
embedding and prompt-learning ones, which change what policy, reference and reward share; initialisations and biases
that change the base, which is the reference; variants that sampling with folded weights would leave out.

Sampling uses weights with the adapter folded in. That is exact where a model calls its adapted layers. Some models
read the weight of a layer instead, as in absorbed projections of latent attention: a pass would leave the adapter out,
and sampling would not. So each new adapter is tried with both.

Left out: adapters in pickled files.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import logging
import math
import subprocess
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora.layer import Linear, LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from grade.errors import InputError, reading
from grade.files import read_json, write_json
from grade.models.parameters import MOST_RANKS, LoraSettings, fingerprint, restoring, same_base

logger = logging.getLogger(__name__)

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
BASE_FILE = "base_fingerprint.json"
_ANY_VALUE = {
    "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "r",
    "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora",
    "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "runtime_config", "eva_config",
    "ensure_weight_tying", "task_type", "init_lora_weights",
}  # fmt: skip
"""Settings of plain LoRA and of an initialisation that is over, and two with rules of their own."""
_INITIAL = (True, False, "gaussian", "orthogonal", "eva")
"""Initialisations that leave the base as it is and train all of A and B; a new adapter cannot have the last."""
_NOT_PLAIN = "plain LoRA on linear layers only: all else would be trained and not sampled from, or change the reference"

FOLDED_TYPES = (torch.float32, torch.float64)
"""Types of a base whose adapter is folded: rounding ``W + B A`` to 8 bits would lose the adapter."""
_NOISE, _SHARE, _TOKENS = 0.1, 0.1, 5
"""Of the check that folding is exact: size of its adapter against the weights', largest difference against the
adapter's effect, and tokens. A layer type that is left out has a larger share; rounding, TF32 included, a smaller."""
_FITS = "an adapter that fits this model"
MATCHING = 10.0
"""Seconds for a regular expression of layers: a thousand names take a hundredth."""
_OTHER_LAYERS = "layers other than the head and the embedding: policy, reference and reward share those"


def new_adapter(model: PreTrainedModel, lora: LoraSettings | LoraConfig, seed: int) -> PeftModel:
    """Put a new adapter on a frozen base, which is changed in place; the wrapped model is in eval mode.

    Dropout is set to 0. The seed is of the initialisation, and leaves the global state alone. `LoraSettings` with the
    default layers adapts all linear ones of a base that lacks one of those. A layer that does not exist or may not be
    adapted, or a setting that is not supported, is an `InputError`.
    """
    head = model.get_output_embeddings()
    modules = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head}
    linear = sorted({name.rsplit(".", 1)[-1] for name in modules})
    config = copy.deepcopy(lora)
    if isinstance(lora, LoraSettings):
        every = lora.target_modules == LoraSettings().target_modules and not {*linear}.issuperset(lora.target_modules)
        config = LoraConfig(
            r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout,
            target_modules="all-linear" if every else lora.target_modules, task_type="CAUSAL_LM",
        )  # fmt: skip
    refuse_adapted(model)
    _check_settings(config, "lora", _INITIAL[:-1])
    targets = sorted(config.target_modules) if isinstance(config.target_modules, set) else config.target_modules
    allowed = f"names of this model's linear layers ({', '.join(linear)})"
    with reading("lora.target_modules", f"{targets}", allowed):
        _check_targets(model, config)
        with torch.random.fork_rng(devices=[]), _wrapping(model):
            warnings.filterwarnings("error", "You have passed exclude_modules")  # and nothing was excluded
            torch.manual_seed(seed)
            peft = _checked(get_peft_model(model, config))
            _check_used(peft, config)
            return peft


def _check_used(peft: PeftModel, config: LoraConfig) -> None:
    """Reject patterns of ranks and alphas that no adapted layer takes."""
    names = [name for name, _ in _lora_layers(peft.get_base_model())]
    for field in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(config, field)
        unused = sorted(patterns.keys() - {get_pattern_key(patterns, name) for name in names})
        if unused:
            raise InputError(f"lora: {field}", unused, f"the first to match an adapted layer, such as {names[0]}")


def continued_adapter(model: PeftModel) -> PeftModel:
    """Make the active adapter of a wrapped model, whose base is frozen, trainable again; it is in eval mode.

    An adapter of another kind than LoRA, one that adapts what may not be adapted, is merged or is off is an
    `InputError`.
    """
    for config in model.peft_config.values():  # an adapter that is not active may have changed the base as well
        _check_settings(config)
    for name, layer in _lora_layers(model):
        if layer.merged:
            raise InputError("adapter", f"merged into {name}", "an adapter beside its base: call unmerge_adapter()")
        if layer.disable_adapters:
            raise InputError("adapter", f"off in {name}", "an adapter that is on: call enable_adapter_layers()")
        for key in layer.lora_dropout:
            layer.lora_dropout[key] = nn.Identity()
    if len(model.active_adapters) != 1:
        raise InputError("adapter", model.active_adapters, "one that is active: call set_adapter with its name")
    model.set_adapter(model.active_adapter)
    return _checked(model)


def load_adapter(model: PreTrainedModel, folder: str | Path) -> PeftModel:
    """Put an adapter that `Backbone.save_adapter` or PEFT saved on a frozen base, which is changed in place.

    The wrapped model is trainable and in eval mode. An adapter that is missing, pickled, damaged, of another kind or
    base, or that does not fit is an `InputError`.
    """
    refuse_adapted(model)
    _check_files(model, folder)
    with reading("adapter", folder, _FITS), _wrapping(model):
        config = PeftConfig.from_pretrained(str(folder))
        known = {field.name for field in dataclasses.fields(config)}
        for name, value in read_json(Path(folder) / ADAPTER_FILES[0]).items():
            if name not in known and value and isinstance(config, LoraConfig):
                raise InputError(f"adapter: {name}", value, "a setting that this version of PEFT knows")
        _check_settings(config)
        _check_targets(model, config)
        peft = PeftModel.from_pretrained(model, str(folder), config=config, is_trainable=True, use_safetensors=True)
        _check_tensors(peft, folder)
        return _checked(peft)


def write_fingerprint(model: PeftModel, folder: str | Path) -> Path:
    """Write ``base_fingerprint.json`` beside a saved adapter; where that lies."""
    place = _place(model, folder)
    write_json(place / BASE_FILE, fingerprint(model.get_base_model()), 2, sort_keys=True)
    return place


def restore_adapter(model: PeftModel, folder: str | Path) -> None:
    """Give the active adapter the values that a checkpoint has of it; whatever else lies there is not read.

    A saved adapter that is damaged, or has another base, other layers or another scale, is an `InputError`.
    """
    place = _place(model, folder)
    _check_same(model, place)
    model.load_adapter(str(place), model.active_adapter, is_trainable=True)


def saved_values(model: PeftModel, folder: str | Path, field: str) -> list[Tensor]:
    """The parameters of a saved adapter of the same base, layers, ranks and scale as the active one's, in its order."""
    _check_same(model, folder, field)
    saved, mark = load_file(Path(folder) / ADAPTER_FILES[1]), f".{model.active_adapter}"
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [saved[name.replace(mark, "")].to(p) for name, p in named]


def _check_same(model: PeftModel, folder: str | Path, field: str = "adapter") -> None:
    _check_files(model.get_base_model(), folder, field)
    _check_tensors(model, folder, field)
    here = model.peft_config[model.active_adapter]
    with reading(field, folder, _FITS):
        there = PeftConfig.from_pretrained(str(folder))
    for name in ("lora_alpha", "alpha_pattern", "use_rslora"):
        if getattr(there, name, None) != getattr(here, name):
            raise InputError(f"{field}: {name}", getattr(there, name, None), f"{getattr(here, name)}, as the policy's")


def standing(model: PeftModel) -> dict[str, list[object]]:
    """What stays while a policy is trained, by name."""
    layers = [layer for _, layer in _lora_layers(model)]
    return {
        "trained parameters": [id(p) for p in model.parameters() if p.requires_grad],
        "weights": [(id(p), p.shape) for p in model.parameters()],
        "merged adapters": [[*layer.merged_adapters] for layer in layers],
        "scaling": [dict(layer.scaling) for layer in layers],
    }


def refuse_adapted(model: PreTrainedModel) -> None:
    """Reject a base with adapter layers of its own: nothing would switch them off for the reference."""
    adapted = [name for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)]
    if adapted:
        allowed = "a base without adapter layers, or the PeftModel itself, whose adapter is continued"
        raise InputError("backbone", adapted[0], allowed)


@contextlib.contextmanager
def folded(model: nn.Module, report: Callable[[list[Tensor]], None] | None = None) -> Iterator[None]:
    """Within this context each adapted weight is ``W + scale * B A``; afterwards it is W again, bit by bit.

    The adapter is still on: switch it off inside. ``report`` is called with each new weight.
    """
    originals: list[tuple[nn.Parameter, Tensor]] = []
    try:
        with torch.no_grad():
            for _, layer in _lora_layers(model):
                active = [name for name in layer.active_adapters if name in layer.lora_A]
                if layer.disable_adapters or not active:
                    continue
                weight = layer.get_base_layer().weight
                originals.append((weight, weight.data))
                delta = sum(layer.get_delta_weight(name) for name in active)
                weight.data = weight.data + delta.to(weight.dtype)
                if report is not None:
                    report([weight])
        yield
    finally:
        for weight, original in reversed(originals):  # the first value of a weight that came twice is put back last
            weight.data = original


def _lora_layers(model: nn.Module) -> list[tuple[str, LoraLayer]]:
    return [(name, module) for name, module in model.named_modules() if isinstance(module, LoraLayer)]


def _place(model: PeftModel, folder: str | Path) -> Path:
    """Where PEFT keeps the active adapter: only the default one lies in the folder itself."""
    return Path(folder) if model.active_adapter == "default" else Path(folder) / model.active_adapter


@contextlib.contextmanager
def _wrapping(model: PreTrainedModel) -> Iterator[None]:
    """PEFT without its warnings, of what is checked here; after an error the model has no adapter layers again."""
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except Exception:
        for name, layer in _lora_layers(model):
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, layer.get_base_layer())
        raise


def _check_settings(config: PeftConfig, prefix: str = "adapter", initial: tuple[bool | str, ...] = _INITIAL) -> None:
    """Set dropout to 0, and reject what is not plain LoRA: a setting, known today or not, that is not its default."""
    kind = getattr(config.peft_type, "value", config.peft_type)
    if not isinstance(config, LoraConfig) or kind != "LORA":  # AdaLoRA's is derived from it
        raise InputError("adapter", kind, "LORA (other adapters change the inputs or the head, or their own ranks)")
    if config.lora_dropout:
        logger.warning(f"lora_dropout = {config.lora_dropout} is not used: a dropout mask is not part of a sample")
    config.lora_dropout = 0.0
    if config.task_type not in (None, "CAUSAL_LM"):
        raise InputError(f"{prefix}: task_type", str(getattr(config.task_type, "value", config.task_type)), "CAUSAL_LM")
    for rank in (config.r, *config.rank_pattern.values()):
        if not isinstance(rank, int) or not 1 <= rank <= MOST_RANKS:
            raise InputError(f"{prefix}: r", rank, f"a whole number from 1 to {MOST_RANKS}")
    for alpha in (config.lora_alpha, *config.alpha_pattern.values()):
        if not isinstance(alpha, int | float) or not math.isfinite(alpha) or alpha == 0:
            raise InputError(f"{prefix}: lora_alpha", alpha, "a finite number other than 0")
    if config.init_lora_weights not in initial:
        allowed = f"{', '.join(map(str, initial))} (others change the base, which is the reference, or need data)"
        raise InputError(f"{prefix}: init_lora_weights", config.init_lora_weights, allowed)
    for field in dataclasses.fields(config):
        value, made = getattr(config, field.name), field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        if field.name not in _ANY_VALUE and value != default and (value or default):
            raise InputError(f"{prefix}: {field.name}", value, f"{default!r} ({_NOT_PLAIN})")


def _check_targets(model: PreTrainedModel, config: LoraConfig) -> None:
    """Reject adapters on the head or the embedding before PEFT wraps these, which it warns of and cannot undo."""
    patterns = [p for p in (config.target_modules, config.exclude_modules) if isinstance(p, str)]
    if patterns:
        _check_patterns(patterns, [name for name, _ in model.named_modules()])
    shared = {id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    names = [name for name, module in model.named_modules() if id(module) in shared]
    hit = [name for name in names if config.target_modules and check_target_module_exists(config, name)]
    if hit:
        raise InputError("lora.target_modules", hit, _OTHER_LAYERS)


def _check_patterns(patterns: list[str], names: list[str]) -> None:
    """Reject a regular expression whose search of the layers' names goes on for ever: re cannot be interrupted."""
    code = "import json, re, sys; p, n = json.load(sys.stdin); [re.fullmatch(x, name) for x in p for name in n]"
    words, given = [sys.executable, "-S", "-c", code], json.dumps([patterns, names])
    try:
        subprocess.run(words, input=given, text=True, capture_output=True, timeout=MATCHING)
    except subprocess.TimeoutExpired:
        allowed = f"a regular expression that finds layers within {MATCHING:g} s"
        raise InputError("lora.target_modules", patterns[0], allowed) from None


def _check_files(model: PreTrainedModel, folder: str | Path, field: str = "adapter") -> None:
    """Reject a folder without an adapter in safetensors, with damaged files, or with the fingerprint of another base.

    One that plain PEFT wrote has no fingerprint, and fits any base of its shape.
    """
    for name in ADAPTER_FILES:
        if not (Path(folder) / name).is_file():
            allowed = f"a folder with {name} (an adapter_model.bin is pickled: loading it could run code)"
            raise InputError(field, str(folder), allowed)
    place = Path(folder) / BASE_FILE
    if not place.is_file():
        return
    with reading(field, folder, f"a {BASE_FILE} as written by training, or none"):
        stored = dict(read_json(place))
        _ = stored["shapes"]
    if not same_base(stored, fingerprint(model)):
        base = model.config._name_or_path or type(model).__name__
        allowed = f"{_FITS}: it was trained on a base with other weights than {base} ({BASE_FILE})"
        raise InputError(field, str(folder), allowed)


def _check_tensors(model: PeftModel, folder: str | Path, field: str = "adapter") -> None:
    """Reject adapter weights that lack a tensor, have one too many, or are not finite: PEFT takes what it can."""
    own = get_peft_model_state_dict(model, adapter_name=model.active_adapter, save_embedding_layers=False)
    with reading(field, folder, _FITS):
        saved = load_file(Path(folder) / ADAPTER_FILES[1])
    for name in sorted(saved.keys() | own.keys()):
        here, there = (list(tensors[name].shape) if name in tensors else "nothing" for tensors in (own, saved))
        if here != there:
            raise InputError(field, str(folder), f"{_FITS} ({name}: {there} in the file, {here} in the model)")
        if not saved[name].is_floating_point() or not saved[name].double().isfinite().all():
            raise InputError(field, str(folder), f"{_FITS} ({name} is not finite, or not in floating point)")


def _checked(peft: PeftModel) -> PeftModel:
    """The wrapped model in eval mode, if each adapted weight belongs to one layer only and is no one else's."""
    model = peft.get_base_model()
    children = ({*module._parameters.values(), *module._modules.values()} for module in model.modules())
    owners = Counter(id(child) for own in children for child in own if child is not None)
    vocabulary = {id(m.weight) for m in (model.get_input_embeddings(), model.get_output_embeddings()) if m is not None}
    alone = "layers with weights of their own: an adapter on weights that layers share would change them all"
    for name, layer in _lora_layers(model):
        base = layer.get_base_layer()
        weight = id(getattr(base, "weight", None))
        rules = (
            (isinstance(layer, Linear), "linear layers, not embeddings or parameters such as fused experts"),
            (weight not in vocabulary, _OTHER_LAYERS),
            (owners[id(base)] < 2 and owners[weight] < 2, alone),
        )
        for holds, allowed in rules:
            if not holds:
                raise InputError("lora.target_modules", name, allowed)
    for config in peft.peft_config.values():
        for key in ("target_modules", "exclude_modules"):  # a set's order, and so the file, changes between processes
            if isinstance(getattr(config, key), set):
                setattr(config, key, sorted(getattr(config, key)))
    _check_folding(peft.eval())
    return peft


def _check_folding(peft: PeftModel) -> None:
    """Reject layers with whose folded weights the logits are not those with the adapter beside them."""
    weight, layers = peft.get_base_model().get_input_embeddings().weight, _lora_layers(peft)
    if weight.is_meta or isinstance(weight, FakeTensor) or weight.dtype not in FOLDED_TYPES:
        return
    if _folds(peft, [layer for _, layer in layers]):
        return
    by_kind = defaultdict(list)
    for name, layer in layers:
        by_kind[name.rsplit(".", 1)[-1]].append(layer)
    wrong = [kind for kind in sorted(by_kind) if not _folds(peft, by_kind[kind])]
    allowed = "layers that the model calls: where it reads their weights itself, sampling would differ from training"
    raise InputError("lora.target_modules", wrong or sorted(by_kind), allowed)


@torch.no_grad()
def _folds(peft: PeftModel, layers: list[LoraLayer]) -> bool:
    """Whether folding changes nothing while the adapter is noise on these layers and 0 elsewhere."""
    model, generator = peft.get_base_model(), torch.Generator().manual_seed(0)
    table = model.get_input_embeddings().weight
    ids = torch.arange(1, 1 + _TOKENS, device=table.device).remainder(len(table)).view(1, -1)

    def logits() -> Tensor:
        return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.double()

    factors = [  # layer, A, B and scale of each active adapter
        (layer, layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])
        for _, layer in _lora_layers(peft) for name in layer.active_adapters if name in layer.lora_A
    ]  # fmt: skip
    with restoring([p for _, a, b, _ in factors for p in (a, b)]):
        for layer, a, b, scale in factors:
            size = _NOISE * layer.get_base_layer().weight.double().square().mean().sqrt() * (layer in layers)
            for p, factor in ((a, b.shape[1] ** -0.5), (b, size / scale if scale else 0.0)):
                p.copy_(torch.randn(p.shape, generator=generator, device="cpu").to(p) * factor)
        beside = logits()
        with folded(model), peft.disable_adapter():
            inside = logits()
        with peft.disable_adapter():
            effect = (beside - logits()).norm()
    rounding = 1e3 * torch.finfo(table.dtype).eps * beside.norm()
    return not (inside - beside).norm() > _SHARE * effect + rounding
