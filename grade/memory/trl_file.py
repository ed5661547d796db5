"""TRL's settings of a run, from the YAML of its command line or from a script, which is read and never executed."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import yaml

from grade.errors import InputError, reading, require_file
from grade.memory.settings import TrlName

NAMES = get_args(TrlName)
_CONFIGS = {f"{name.upper()}Config": name for name in NAMES}
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save",
         "target_parameters": "lora_target_parameters", "task_type": "lora_task_type"}  # fmt: skip
"""Names of ``LoraConfig`` that TRL's command line calls otherwise."""
_TYPES = {"torch_dtype": "dtype", "dtype": "dtype", "attn_implementation": "attn_implementation"}
"""Arguments of ``from_pretrained`` that memory depends on."""


def read_trl(path: str, trainer: str | None = None) -> tuple[TrlName, dict[str, Any], list[str]]:
    """The trainer, its settings by the names of TRL's command line, and what a script leaves open.

    Args:
        path: A YAML as ``trl grpo --config`` takes, or a script with a ``GRPOConfig``, ``SFTConfig`` or ``DPOConfig``.
        trainer: Which of `NAMES` it is for; None: the only one that has all settings of the file.

    Raises:
        InputError: Without TRL, for another trainer, a file that cannot be read, or a setting that TRL does not know.
    """
    if importlib.util.find_spec("trl") is None:
        raise InputError("--trl", path, "with the package trl, installed: pip install -e '.[peers]'")
    if trainer not in (None, *NAMES):
        raise InputError("--trl", trainer, f"{', '.join(NAMES)}: no other trainer of TRL's is traced")
    open_: list[str] = []
    with reading("--trl", path, "a readable YAML file, or a Python file"):
        text = require_file(path).read_text(encoding="utf-8")
        if Path(path).suffix == ".py":
            named, values = _script(path, ast.parse(text), open_)
            trainer = trainer or named
        else:
            values = yaml.safe_load(text)  # YAML 1.1, as TRL reads it
    if not isinstance(values, dict):
        raise InputError(Path(path).name, values, "a mapping of TRL's settings to values")
    unknown = {name: sorted(map(str, values.keys() - known(name))) for name in NAMES}
    if trainer is None:
        fitting = [name for name in NAMES if not unknown[name]] or [min(NAMES, key=lambda name: len(unknown[name]))]
        if len(fitting) > 1:
            allowed = f"the trainer before the file, as its settings are of {' and '.join(fitting)}: --trl sft {path}"
            raise InputError("--trl", path, allowed)
        (trainer,) = fitting
    for name in unknown[trainer]:
        close = difflib.get_close_matches(name, known(trainer), n=1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise InputError(f"{Path(path).name}: {name}", values[name], f"a setting of trl {trainer}{meant}")
    return trainer, values, open_


@cache
def known(trainer: str) -> set[str]:
    """Every setting of ``trl <trainer>``."""
    return {field.name for kind in parser(trainer).dataclass_types for field in fields(kind)} | {"env"}


def parser(trainer: str) -> Any:
    """TRL's own parser, which raises instead of ending the process."""
    made = import_module(f"trl.scripts.{trainer}").make_parser()

    def error(message: str) -> None:
        raise ValueError(message)

    made.error = error
    return made


def _script(path: str, tree: ast.Module, open_: list[str]) -> tuple[str, dict[str, Any]]:
    """Trainer and settings of a script: those that are constants; of the others ``open_`` gets a line each."""
    constants = {
        target.id: node.value
        for node in ast.walk(tree) if isinstance(node, ast.Assign)
        for target in node.targets if isinstance(target, ast.Name)
    }  # fmt: skip

    def given(call: ast.Call, names: Mapping[str, str] | None = None) -> Iterator[tuple[str, Any]]:
        for keyword in call.keywords:
            node, name = keyword.value, keyword.arg or "**" + ast.unparse(keyword.value)
            if names is not None and name not in names:
                continue
            node = constants.get(node.id, node) if isinstance(node, ast.Name) else node
            try:
                value = _literal(node)
            except ValueError:
                open_.append(f"{Path(path).name}:{node.lineno}: {name} is no constant; TRL's default is taken")
            else:
                yield (names or {}).get(name, name), value

    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    trainer, values, others = None, {}, []
    for call in calls:
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if name in _CONFIGS:
            trainer = _CONFIGS[name]
            values |= dict(given(call))
        elif name == "LoraConfig":
            values |= {"use_peft": True} | {_LORA.get(key, key): value for key, value in given(call)}
        elif name == "from_pretrained" and "Model" in ast.unparse(call.func):
            values |= {"dtype": "auto"} | dict(given(call, _TYPES)) | _first(call, constants)
        elif name in (f"{kind.upper()}Trainer" for kind in NAMES):
            named = [keyword.value for keyword in call.keywords if keyword.arg == "model"]
            values |= _first(ast.Call(call.func, [*call.args[:1], *named], []), constants)
        elif name.endswith(("Config", "Trainer")):
            others.append(name)
    if trainer is None:
        raise InputError("--trl", others[0] if others else path, f"a script with {', '.join(_CONFIGS)}")
    for name in ("bias", "init_lora_weights", "inference_mode"):  # of an adapter, and no setting of the command line
        values.pop(name, None)
    return trainer, values


def _literal(node: ast.AST) -> Any:
    """A constant's value; of ``torch.bfloat16`` the name."""
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
        return node.attr
    if isinstance(node, ast.Dict):
        return {_literal(key): _literal(value) for key, value in zip(node.keys, node.values, strict=True)}
    return ast.literal_eval(node)


def _first(call: ast.Call, constants: Mapping[str, ast.AST]) -> dict[str, str]:
    """The model that is named first, if it is a name."""
    for node in call.args[:1]:
        node = constants.get(node.id, node) if isinstance(node, ast.Name) else node
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return {"model_name_or_path": node.value}
    return {}
