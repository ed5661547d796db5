"""What a run trains and on what: policy, reward, judge and prompts, from settings or from a user's own objects."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from grade.data.prompts import load_prompts
from grade.errors import InputError
from grade.files import require_source
from grade.models.adapter import LoraSettings
from grade.models.backbone import Backbone
from grade.models.prompts import check_prompts
from grade.plugins import JUDGE, import_object
from grade.rewards.rewards import make_rewards

if TYPE_CHECKING:
    from grade.training.config import GradeConfig, TrainConfig

Prompts = Sequence[str] | Sequence[Mapping[str, Any]]
DIVIDERS = {"ACCELERATE_USE_FSDP": "grade.models.sharded:divide"}
"""Variables of ``accelerate launch``, with what then divides the base among the processes."""
_DIVIDER = "GRADE_DIVIDER"


@dataclass
class Task:
    """What a run is trained on."""

    backbone: Backbone  # the policy
    reward_model: Any  # the reward, anything that `grade.rewards.rewards.make_rewards` takes; or None
    judge: Any  # its ``score(texts)`` gives numbers for evaluations only; or None
    train_prompts: Prompts  # texts, or rows of a dataset with a ``prompt``
    validation_prompts: Prompts  # the same, held out


def load_task(
    config: TrainConfig, device: str | torch.device = "cpu", adapter: str | None = None, new_adapter: bool = True
) -> Task:
    """Load backbone, rewards, judge and prompts of a run.

    Args:
        config: Names of files, folders, functions and hub ids.
        device: Where to put the models.
        adapter: Folder of an adapter to continue from, in place of ``config.adapter``.
        new_adapter: Whether a policy that continues from none gets a new one; also beside a token bias alone.

    Returns:
        The task.

    Raises:
        InputError: If something is missing or does not fit.
    """
    divided = divider(config) is not None
    backbone = Backbone.load(
        config.model, config.dtype, config.lora if new_adapter else None, adapter or config.adapter or None,
        "cpu" if divided else device, config.attention, config.seed, config.quantization_config,
    )  # fmt: skip
    if divided:  # before rewards read its tables; no device need hold all of it
        place_policy(backbone, config)
    name_base(backbone, config.base_name)
    rewards = None
    if config.reward:
        rewards = make_rewards(config.reward, backbone, config.reward_weights, None, config.reward_scope)
    judge = import_object(JUDGE)(config.gold) if config.gold else None
    train = load_prompts(config.train_dataset, field="train_dataset")
    held_out = load_prompts(config.eval_dataset, field="eval_dataset") if config.eval_dataset else []
    return Task(backbone, rewards, judge, train, held_out)


def checked_rows(rows: Any, name: str, backbone: Backbone, config: GradeConfig) -> Any:
    """Rows of a dataset, each of which has a prompt that fits the model with a completion; None if there are none."""
    if rows is None:
        return None
    if isinstance(rows, str | Path | Mapping | pd.DataFrame) or not hasattr(rows, "__len__"):
        raise InputError(name, type(rows).__name__, "a list of rows with a prompt, or one split of a dataset")
    try:
        # By number where there is no iterator: __getitem__ need not raise IndexError.
        all_rows = rows if hasattr(rows, "__iter__") else (rows[i] for i in range(len(rows)))
        longest, row = check_prompts(backbone.tokenizer, all_rows, **config.reading)
    except InputError as error:
        raise InputError(f"{name}: {error.field}", error.value, error.allowed) from error
    context, most = backbone.max_positions, config.max_completion_length
    if longest + most > context:
        room = f"at most {context - most}: the model's context of {context} less max_completion_length = {most}"
        raise InputError(f"{name}: tokens of the prompt in row {row}", longest, room)
    return rows


def make_policy(
    model: str | Path | PreTrainedModel | PeftModel | Backbone,
    tokenizer: PreTrainedTokenizerBase | None = None,
    peft_config: LoraConfig | None = None,
    init_kwargs: Mapping[str, Any] | None = None,
    seed: int = 0,
    train_bias: bool = False,
) -> Backbone:
    """A frozen base with an adapter to train, from whatever a user has.

    Without a tokenizer it is the model's own. Without ``peft_config`` a new adapter has `LoraSettings`; ``seed``
    initialises it. ``init_kwargs`` are for a model given by name. With ``train_bias`` the token bias is trained too; a
    `Backbone` with a token bias then needs no adapter.
    """
    if tokenizer is not None and not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise InputError("processing_class", type(tokenizer).__name__, "a tokenizer of transformers, or None")
    if peft_config is not None and not isinstance(peft_config, LoraConfig):
        raise InputError("peft_config", type(peft_config).__name__, "a LoraConfig")
    if peft_config is not None and isinstance(model, Backbone | PeftModel):
        raise InputError("peft_config", "given", f"none: the {type(model).__name__} has an adapter, which is continued")
    if init_kwargs and not isinstance(model, str | Path):
        raise InputError("model_init_kwargs", dict(init_kwargs), f"none: the {type(model).__name__} is loaded already")
    if isinstance(model, Backbone):
        if model.peft is None and model.token_bias is None and not train_bias:
            raise InputError("model", "a backbone without an adapter", "one made with lora=LoraSettings(...)")
        return _with_bias(model, train_bias)
    if isinstance(model, str | Path):
        neutral = {"revision": "main", "trust_remote_code": False}  # which TRL's scripts give
        given = (init_kwargs or {}).items()
        kwargs = {name: value for name, value in given if value not in (None, neutral.get(name))}
        dtype = str(kwargs.pop("dtype" if "dtype" in kwargs else "torch_dtype", "float32")).removeprefix("torch.")
        attention = kwargs.pop("attn_implementation", "auto")
        for name in kwargs.keys() - {"quantization_config"}:
            allowed = "dtype (or torch_dtype), attn_implementation and quantization_config alone"
            raise InputError("model_init_kwargs", name, allowed)
        backbone = Backbone.load(str(model), dtype, attention=attention, **kwargs)
    elif isinstance(model, PreTrainedModel | PeftModel):
        backbone = Backbone(model, tokenizer or _tokenizer_of(model))
    else:
        raise InputError("model", type(model).__name__, "a name, a PreTrainedModel, a PeftModel or a Backbone")
    if backbone.peft is None:
        backbone.add_adapter(peft_config or LoraSettings(), seed)
    name_base(backbone)
    return _with_bias(backbone, train_bias)


def _with_bias(backbone: Backbone, trained: bool) -> Backbone:
    """The same policy, its token bias trained or not."""
    bias = backbone.token_bias
    if bias is not None:
        bias.requires_grad_(trained)
    elif trained:
        backbone.set_token_bias(torch.zeros(len(backbone.ref_head.weight)), True)
    return backbone


def divider(config: GradeConfig) -> Callable[[Backbone, torch.device], Any] | None:
    """What divides the base among the processes, if ``accelerate launch`` has asked for it.

    Accelerate itself is no longer asked then: it would wrap a model that the engines do not call.
    """
    for variable, path in DIVIDERS.items():
        if os.environ.get(variable, "").lower() == "true":
            os.environ.update({variable: "false", _DIVIDER: path})
    path = os.environ.get(_DIVIDER)
    return import_object(path) if path and config.world_size > 1 else None


def place_policy(backbone: Backbone, config: GradeConfig) -> None:
    """Move a policy to the run's device, or what this process has of it; in bfloat16 if asked."""
    if backbone.lockstep:  # divided already
        return
    if config.bf16:
        for p in backbone.model.parameters():  # the frozen base; the adapter keeps its own type
            if not p.requires_grad and p.is_floating_point():  # quantised weights are not
                p.data = p.data.to(torch.bfloat16)
    if (divide := divider(config)) is not None:
        divide(backbone, config.device)
    else:
        backbone.to(config.device)


def name_base(backbone: Backbone, name: str | None = None) -> None:
    """Name the base for what is saved of the policy, so that it is found from any working directory.

    Without a name it is the Hugging Face id, or the absolute path of the folder that the base was read from.
    """
    config = None if backbone.peft is None else backbone.peft.peft_config[backbone.peft.active_adapter]
    source = name or backbone.model.config.name_or_path or (config and config.base_model_name_or_path)
    if name is None and source and Path(source).is_dir():
        source = str(Path(source).resolve())
    backbone.base_name = source or ""
    if config is not None:
        config.base_model_name_or_path = source


def _tokenizer_of(model: PreTrainedModel | PeftModel) -> PreTrainedTokenizerBase:
    name, allowed = model.config.name_or_path, "the policy's tokenizer: the model does not name a place that has one"
    if not name:
        raise InputError("processing_class", None, allowed)
    require_source("processing_class", name, allowed)
    return AutoTokenizer.from_pretrained(name)
