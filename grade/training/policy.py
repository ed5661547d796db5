"""The policy of a training run, from whatever a user has: a name, a model, a PEFT model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from grade.errors import InputError
from grade.gradients.methods import DISTILLED
from grade.gradients.policy_gradient import PolicyGradient
from grade.models.adapter import LoraSettings
from grade.models.backbone import DTYPES, Backbone

if TYPE_CHECKING:
    from grade.gradients.distilled.learner import DistilledGradient
    from grade.training.config import GradeConfig

_INIT_KEYS = ("dtype", "torch_dtype", "attn_implementation")


def make_learner(args: GradeConfig, backbone: Backbone) -> PolicyGradient | DistilledGradient | None:
    """What takes a step's gradient, with its state between steps; None for relaxed methods, which have none.

    Args:
        args: Settings, which name the method.
        backbone: The policy.
    """
    if args.relaxed:
        return None
    if args.method != DISTILLED:
        return PolicyGradient(args, backbone)
    if args.sampler != "own":
        from grade.gradients.distilled_given import DistilledFromGiven

        return DistilledFromGiven(args, backbone)
    from grade.gradients.distilled.learner import DistilledGradient  # here: only this method needs it

    return DistilledGradient(args, backbone)


def make_policy(
    model: str | Path | PreTrainedModel | PeftModel | Backbone,
    args: GradeConfig,
    tokenizer: PreTrainedTokenizerBase | None = None,
    peft_config: LoraConfig | None = None,
) -> Backbone:
    """A frozen base with an adapter to train.

    Args:
        model: Hugging Face id or folder, a model, a ``PeftModel``, or a `Backbone` with an adapter.
        args: Temperature, type and seed.
        tokenizer: The policy's tokenizer; None: the model's own.
        peft_config: LoRA settings of a new adapter; None: `LoraSettings`, on all linear layers if the base has no
            layers of those names.

    Returns:
        The policy.

    Raises:
        InputError: If something is missing or does not fit together.
    """
    if peft_config is not None and not isinstance(peft_config, LoraConfig):
        raise InputError("peft_config", type(peft_config).__name__, "a LoraConfig")
    if isinstance(model, Backbone):
        backbone = model
        if backbone.peft is None:
            raise InputError("model", "a backbone without an adapter", "one made with lora=LoraSettings(...)")
        if peft_config is not None:
            raise InputError("peft_config", "given", "none: the backbone has an adapter")
        if tokenizer is not None:
            backbone.tokenizer = tokenizer
    elif isinstance(model, PeftModel):
        if peft_config is not None:
            raise InputError("peft_config", "given", "none: the model is a PeftModel, whose adapter is continued")
        backbone = Backbone(model, tokenizer or _tokenizer_of(model))
    elif isinstance(model, PreTrainedModel):
        lora = peft_config or _default_lora(model)
        backbone = Backbone(model, tokenizer or _tokenizer_of(model), lora, seed=args.seed)
    elif isinstance(model, str | Path):
        backbone = _load(str(model), args, tokenizer, peft_config)
    else:
        raise InputError("model", type(model).__name__, "a name, a PreTrainedModel, a PeftModel or a Backbone")
    place(backbone, args)
    if not isinstance(model, Backbone):
        name_base(backbone)
    if args.temperature != 1.0:
        backbone.head = replace(backbone.head, temperature=args.temperature)
    return backbone


def place(backbone: Backbone, args: GradeConfig) -> None:
    """Move a policy to the run's device, or its share of it if the base is divided among processes.

    Args:
        backbone: The policy, changed in place.
        args: Device, type and number of processes.

    Raises:
        InputError: If the base cannot be divided.
    """
    if backbone.shards is not None:
        return
    if args.bf16:
        for p in backbone.model.parameters():  # the frozen base; the adapter keeps its own type
            if not p.requires_grad:
                p.data = p.data.to(torch.bfloat16)
    if args.sharded:
        backbone.shard(args.device)
    else:
        backbone.to(args.device)


def _load(
    name: str, args: GradeConfig, tokenizer: PreTrainedTokenizerBase | None, peft_config: LoraConfig | None
) -> Backbone:
    given = dict(args.model_init_kwargs or {})
    unknown = sorted(set(given) - set(_INIT_KEYS))
    if unknown:
        raise InputError("model_init_kwargs", unknown[0], ", ".join(_INIT_KEYS))
    dtype = str(given.get("dtype", given.get("torch_dtype", "float32"))).removeprefix("torch.")
    if dtype not in DTYPES:
        raise InputError("model_init_kwargs: dtype", dtype, ", ".join(DTYPES))
    backbone = Backbone.load(name, dtype, attention=given.get("attn_implementation") or "auto")
    backbone.add_adapter(peft_config or _default_lora(backbone.model), args.seed)
    if tokenizer is not None:
        backbone.tokenizer = tokenizer
    return backbone


def _default_lora(model: PreTrainedModel) -> LoraSettings | LoraConfig:
    names = {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    settings = LoraSettings()
    if names.issuperset(settings.target_modules):
        return settings
    return LoraConfig(r=settings.r, lora_alpha=settings.alpha, target_modules="all-linear", task_type="CAUSAL_LM")


def _tokenizer_of(model: Any) -> PreTrainedTokenizerBase:
    name = model.config._name_or_path
    try:
        return AutoTokenizer.from_pretrained(name)
    except Exception:  # transformers raises a dozen types, which mean the same to the user
        allowed = "the policy's tokenizer: the model does not name a place that has one"
        raise InputError("processing_class", None, allowed) from None


def name_base(backbone: Backbone, name: str | None = None) -> None:
    """Name the base in the adapter's settings, so that the saved adapter finds it from any working directory.

    Args:
        backbone: The policy.
        name: What to call it; None: the Hugging Face id, or the absolute path of the folder it came from.
    """
    config = backbone.peft.peft_config[backbone.peft.active_adapter]
    source = name or backbone.model.config._name_or_path or config.base_model_name_or_path
    if name is None and source and Path(source).is_dir():
        source = str(Path(source).resolve())
    config.base_model_name_or_path = source
    if isinstance(config.target_modules, set):  # its order, and so a checkpoint's file, changes from process to process
        config.target_modules = sorted(config.target_modules)
