"""TRL's settings: what does here what its configs ask for, and how the config of a sampling trainer becomes ours."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from argparse import Namespace
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import numpy as np

from grade.errors import InputError
from grade.gradients.methods import TEACHER, reads

logger = logging.getLogger(__name__)

_PACKING = "per_device_train_batch_size and gradient_accumulation_steps: a step samples what it trains on"
_SERVER = "sampler: http://host:port, a server that is started by itself"
_TABLES = "log_completions, which writes them as tables"
_CLIPPING = "nothing without a second pass: a step updates once"
_OF_TEACHERS, _LENGTH, _COLUMNS = "teacher_model_name_or_path", "max_completion_length", "remove_unused_columns"
_LOSSES = ("grpo", "bnpo", "dr_grpo", "dapo")
DROPPED = {
    "loss_type": "method: the loss is a mean over sequences of a sum over tokens",
    "epsilon_high": "epsilon, both sides", "delta": _CLIPPING, "off_policy_mask_threshold": _CLIPPING,
    "importance_sampling_level": "importance_sampling", "use_bias_correction_kl": _CLIPPING,
    "num_generations_eval": "eval_prompts, one completion of each", "num_completions_to_print": _TABLES,
    "log_unique_prompts": _TABLES, "wandb_log_unique_prompts": _TABLES, "log_multimodal": _TABLES,
    "log_completions_hub_repo": _TABLES, "ds3_gather_for_generation": "accelerate launch with FSDP2",
    "cast_lm_head_to_fp32": "dtype or bf16", "logging_dir": "the variable TENSORBOARD_LOGGING_DIR",
    "disable_dropout": "nothing: dropout is always off",
    **dict.fromkeys((
        "vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
        "vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_max_model_length", "vllm_model_impl",
        "vllm_enable_sleep_mode", "vllm_guided_decoding_regex", "vllm_structured_outputs_regex", "vllm_group_port",
        "use_transformers_paged", "use_transformers_continuous_batching", "transformers_continuous_batching_config",
    ), _SERVER),
    **dict.fromkeys((
        "vllm_importance_sampling_correction", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max",
        "vllm_importance_sampling_clip_min", "vllm_importance_sampling_cap",
    ), "importance_sampling, importance_sampling_cap"),
}  # fmt: skip
"""Settings of TRL's that are not ours, with what does it here. Without them the objective is the same."""
NEUTRAL = {
    "mask_truncated_completions": False, "sync_ref_model": False, "use_adaptive_entropy": False,
    "use_liger_loss": False, "top_entropy_quantile": 1.0, "entropy_coef": 0.0, "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0, "entropy_coef_delta": 0.005, "entropy_target": 0.2,
    "ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 512, "sapo_temperature_neg": 1.05,
    "sapo_temperature_pos": 1.0, "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0, "pad_to_multiple_of": None, "cache_implementation": None, "router_aux_loss_coef": None,
    "max_tool_calling_iterations": None,
}  # fmt: skip
"""Those that nothing does here, with TRL's defaults, which ask for nothing."""
REFUSED = {
    "steps_per_generation": (None, _PACKING), "generation_batch_size": (None, _PACKING),
    "generation_kwargs": (None, "temperature, max_completion_length, min_completion_length"),
    "multi_objective_aggregation": ("sum_then_normalize", "reward_weights: rewards are added up"),
    "normalize_advantages": (False, "nothing: advantages are not divided; method = grpo has scale_rewards"),
    "teacher_model_revision": (None, "teacher: a folder, or a hub id without a revision"),
    "teacher_model_init_kwargs": (None, "teacher_dtype"), "seq_kd": (False, "texts, with lmbda"),
    "reward_clip_range": (None, "the reward function, which can clip what it returns"),
}  # fmt: skip
"""Those that would train something else, with the value that asks for nothing."""
RENAMED = {
    "evaluation_strategy": "eval_strategy", "warmup_ratio": "warmup_steps: below 1 it is a share of all steps",
    "no_cuda": "use_cpu", "group_by_length": "nothing: prompts are shuffled", "overwrite_output_dir": "nothing: "
    "checkpoints stay until they are replaced", "save_safetensors": "nothing: weights are always safetensors",
    "max_new_tokens": "max_completion_length", "max_length": "max_completion_length, max_prompt_length",
    "response_length": "max_completion_length", "kl_coef": "beta", "rloo_k": "num_generations",
    "num_ppo_epochs": "passes_per_step", "num_mini_batches": "minibatches", "cliprange": "epsilon",
    "tokenizer": "processing_class", "reward_model": "reward_funcs",
    "teacher_model": "teacher", "teacher_model_name_or_path": "teacher",
    "ref_model": "nothing: the base is the reference",
}  # fmt: skip
"""Older names in such scripts."""


def refuse_theirs(values: Mapping[str, Any]) -> None:
    """Say of a setting of TRL's, or of an older name, what does it here."""
    for name, value in values.items():
        if name in DROPPED or name in REFUSED:
            here = DROPPED.get(name) or REFUSED[name][1]
            raise InputError(name, value, f"TRL's, not ours; here: {here}")
        if name in NEUTRAL:
            raise InputError(name, value, "TRL's, not ours; there is no such setting here")
        if name in RENAMED:
            raise InputError(name, value, f"not a setting; here: {RENAMED[name]}")


def refuse_unknown(values: Mapping[str, Any], known: Iterable[str], kind: str = "setting") -> None:
    """`refuse_theirs`, and any other name that is not known."""
    refuse_theirs(values)
    for name in values.keys() - set(known):
        close = difflib.get_close_matches(str(name), known, n=1)
        raise InputError(str(name), values[name], f"a known {kind}{f' (did you mean {close[0]!r}?)' if close else ''}")


def translated(config: Any, ours: Any, own: set[str], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values of our config from one of TRL's; a line is logged for each that is translated or dropped.

    ``ours`` is a config of our defaults, ``own`` the settings whose defaults are not those of ``TrainingArguments``,
    ``changes`` are those of ours that come last.
    """
    if isinstance(config, Mapping | Namespace):
        given, theirs = dict(config if isinstance(config, Mapping) else vars(config)), NEUTRAL
        _say("defaults", f"what is not given is as here: scale_rewards {ours.scale_rewards}, learning_rate "
             f"{ours.learning_rate:g}, logging_steps {ours.logging_steps}")  # fmt: skip
    elif dataclasses.is_dataclass(config) and not isinstance(config, type | type(ours)):
        given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
        theirs = {field.name: field.default for field in dataclasses.fields(config)}
        if given.get(_COLUMNS) == theirs.get(_COLUMNS):  # which TRL's trainers change themselves
            given.pop(_COLUMNS, None)
    else:
        raise InputError("config", config, "a config of TRL's, or a mapping or argparse.Namespace with its names")
    for name, value in given.items():
        if isinstance(value, Enum):
            given[name] = value.value
        elif isinstance(value, np.generic):
            given[name] = value.item()
    distils = _OF_TEACHERS in given
    theirs_alone = TEACHER if distils else "rloo" if "RLOO" in type(config).__name__.upper() else "grpo"
    method = changes.get("method") or given.get("method") or theirs_alone
    if distils:
        _distillation(given)
    values: dict[str, Any] = {"method": method}
    loss = given.pop("loss_type", None)
    if loss not in (None, *_LOSSES):
        raise InputError("loss_type", loss, f"{' or '.join(_LOSSES)}; here: {DROPPED['loss_type']}")
    if loss is not None:
        _say("loss_type", f"{loss!r} dropped; here: {DROPPED['loss_type']}")
    _packing(given, ours)
    given = _generation(given)
    multiplied = {name: value for name, value in (given | changes).items() if name in ("beta", _LENGTH)}
    type(ours).schema().parse(multiplied)
    for name, value in given.items():
        if name in ours.__dataclass_fields__:
            changed = value != getattr(ours, name)
            if changed and not reads(method, name):
                _say(name, f"{value!r} dropped: {method} does not have it")
            elif name in own or changed:
                values[name] = value
        elif name in REFUSED:
            neutral, here = REFUSED[name]
            if value != neutral:
                raise InputError(name, value, f"{neutral}, because it is not here; instead: {here}")
        elif value in (None, theirs.get(name)):
            continue
        elif name in DROPPED:
            _say(name, f"{value!r} dropped; here: {DROPPED[name]}")
        else:
            refuse_unknown({name: value}, ours.__dataclass_fields__)
    if values.get("beta") and "beta" not in changes:
        length = multiplied.get(_LENGTH, ours.max_completion_length)
        values["beta"] *= length
        _say("beta", f"{given['beta']!r} times max_completion_length = {length} is {values['beta']:g}: TRL's weighs a "
             "sum over tokens, ours a mean")  # fmt: skip
    if values.get("bf16"):
        _say("bf16", "the frozen base is held in bfloat16; the adapter keeps its own type")
    return values


def _distillation(given: dict[str, Any]) -> None:
    """Settings of ``DistillationConfig`` or ``GKDConfig`` by our names."""
    given.pop("loss_type", None)  # GKDConfig has it from SFTConfig, and its trainer does not read it
    for theirs, ours in ((_OF_TEACHERS, "teacher"), ("beta", "teacher_beta"), ("max_new_tokens", _LENGTH)):
        if theirs in given:
            given[ours] = given.pop(theirs)
            _say(theirs, f"{ours} = {given[ours]!r}")
    options = _mapping(given, "teacher_model_init_kwargs")
    for name in options.keys() & {"dtype", "torch_dtype"}:
        given["teacher_dtype"] = str(options.pop(name)).removeprefix("torch.")
    given["teacher_model_init_kwargs"] = options or None
    _say("loss", "a mean over sequences of a mean over their tokens; TRL's is one over all tokens")


def _packing(given: dict[str, Any], ours: Any) -> None:
    """Drop how TRL divides a generation into steps, where it is the division here."""
    microbatches = given.get("gradient_accumulation_steps", ours.gradient_accumulation_steps)
    batch = given.get("per_device_train_batch_size", ours.per_device_train_batch_size)
    whole = microbatches * batch * int(os.environ.get("WORLD_SIZE", 1))
    for name, here in (("steps_per_generation", microbatches), ("generation_batch_size", whole)):
        if given.pop(name, None) not in (None, here):
            raise InputError(name, "a generation for several steps", f"{here}, that of one step; {_PACKING}")


def _generation(given: dict[str, Any]) -> dict[str, Any]:
    """With ``generation_kwargs`` and other spellings as our settings."""
    others = _mapping(given, "generation_kwargs")
    if "min_new_tokens" in others:
        given["min_completion_length"] = others.pop("min_new_tokens")
        _say("generation_kwargs", f"min_completion_length = {given['min_completion_length']}")
    if others:
        raise InputError("generation_kwargs", others, f"min_new_tokens alone; here: {REFUSED['generation_kwargs'][1]}")
    if given.get("max_prompt_length") is not None and "truncation" not in given:
        given["truncation"] = "left"
        _say("max_prompt_length", "truncation = left, as in TRL")
    neutral = {"top_k": 0, "shuffle_dataset": True}
    return {name: neutral[name] if value is None and name in neutral else value for name, value in given.items()}


def _mapping(given: dict[str, Any], name: str) -> dict[str, Any]:
    value = given.pop(name, None) or {}
    if not isinstance(value, Mapping):
        raise InputError(name, value, "a mapping")
    return dict(value)


def _say(name: str, text: str) -> None:
    logger.warning(f"from_trl: {name}: {text}")
