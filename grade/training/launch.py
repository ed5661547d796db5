"""What ``accelerate launch`` asks of the processes that it starts, read from their environment.

Plain data parallelism and FSDP2 are supported; the rest is refused by name. FSDP2 is then done here
(`grade.models.sharding`) and no longer asked of Accelerate, which would wrap a model that the engines do not call.
"""

from __future__ import annotations

import os

from grade.errors import InputError

FSDP2 = "fsdp2"
SHARDING = "GRADE_SHARDING"
"""Variable that asks for sharding without Accelerate, and remembers that it did."""
_ENGINES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed", "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "tensor, context or hybrid parallelism",
}  # fmt: skip
_FSDP = {
    "FSDP_OFFLOAD_PARAMS": ("fsdp_offload_params", ("false",), "false: shards stay on their device"),
    "FSDP_RESHARD_AFTER_FORWARD": (
        "fsdp_reshard_after_forward", ("true", "full_shard"), "true: a layer is freed after each pass",
    ),
    "FSDP_ACTIVATION_CHECKPOINTING": (
        "fsdp_activation_checkpointing", ("false",), "false, and gradient_checkpointing: true in the run's settings",
    ),
    "FSDP_AUTO_WRAP_POLICY": (
        "fsdp_auto_wrap_policy", ("transformer_based_wrap",), "TRANSFORMER_BASED_WRAP: every layer is a unit",
    ),
}  # fmt: skip
"""Of each variable its name in Accelerate's file, the values that are supported, and what to say of others."""
_EVERY = "fsdp_version: 2, or plain data parallelism"


def sharding() -> str:
    """How the base is divided among the processes: ``fsdp2``, or empty where each has a copy.

    Raises:
        InputError: For what Accelerate can do and this project cannot, naming it.
    """
    for variable, name in _ENGINES.items():
        if _is_true(variable):
            raise InputError("accelerate launch", name, _EVERY)
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if precision not in ("", "no"):
        allowed = "no: the base's type is a setting of the run (dtype: bfloat16, or bf16: true)"
        raise InputError("accelerate launch: mixed_precision", precision, allowed)
    if _is_true("ACCELERATE_USE_FSDP"):
        _check_fsdp()
        os.environ.update({"ACCELERATE_USE_FSDP": "false", SHARDING: FSDP2})
    given = os.environ.get(SHARDING, "")
    if given not in ("", FSDP2):
        raise InputError(SHARDING, given, f"{FSDP2}, or empty")
    return given


def _check_fsdp() -> None:
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise InputError("accelerate launch", "FSDP1", _EVERY)
    for variable, (name, values, allowed) in _FSDP.items():
        given = os.environ.get(variable)
        if given is not None and given.lower() not in values:
            raise InputError(f"accelerate launch: {name}", given, allowed)
    for variable in ("FSDP_IGNORED_MODULES", "FSDP_TRANSFORMER_CLS_TO_WRAP"):
        given = os.environ.get(variable)
        if given:
            raise InputError(f"accelerate launch: {variable.lower()}", given, "none: every layer is a unit")


def _is_true(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() in ("true", "1", "yes")
