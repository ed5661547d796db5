"""TRL's settings of a run, from the YAML of its command line or from a script, which is read and never executed."""

from __future__ import annotations

import ast
import difflib
from dataclasses import fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import yaml

from grade.errors import InputError, reading, require_file
from grade.memory.settings import TrlName

NAMES = get_args(TrlName)
_CONFIGS = {f"{name.upper()}Config": name for name in NAMES}
_LORA = {"r": "lora_r", "target_modules": "lora_target_modules", "modules_to_save": "lora_modules_to_save",
         "target_parameters": "lora_target_parameters", "task_type": "lora_task_type",
         "bias": "", "init_lora_weights": "", "inference_mode": ""}  # fmt: skip
"""Names of ``LoraConfig`` that TRL's command line calls otherwise, or does not have."""
_LOADED = {"model": "model_name_or_path", "pretrained_model_name_or_path": "model_name_or_path",
           "torch_dtype": "dtype", "dtype": "dtype", "attn_implementation": "attn_implementation"}  # fmt: skip
"""Arguments of ``from_pretrained`` that memory depends on; the first one is the model."""


def have_trl() -> bool:
    """Whether TRL is installed; a folder of that name, such as a clone of it, is not TRL."""
    spec = find_spec("trl")
    return spec is not None and spec.origin is not None


def read_trl(path: str, trainer: str | None = None) -> tuple[TrlName, dict[str, Any], list[str]]:
    """The trainer, its settings by the names of TRL's command line, and a line for each that a script leaves open.

    ``path``: a YAML as ``trl grpo --config`` takes, or a script with one of TRL's configs. ``trainer``: one of `NAMES`;
    None: the only one that has all settings of the file. Raises `InputError` without TRL, for another trainer, a file
    that cannot be read, or a setting that TRL does not know.
    """
    if not have_trl():
        raise InputError("--trl", path, "with the package trl, installed: pip install -e '.[peers]'")
    if trainer not in (None, *NAMES):
        raise InputError("--trl", trainer, f"{', '.join(NAMES)}: no other trainer of TRL's is traced")
    unread: list[str] = []
    with reading("--trl", path, "a readable YAML file, or a Python file"):
        text = require_file(path).read_text(encoding="utf-8")
        if Path(path).suffix == ".py":
            named, values = _script(Path(path).name, ast.parse(text), unread)
            trainer = trainer or named
        else:
            values = yaml.safe_load(text)  # YAML 1.1, as TRL reads it
    if not isinstance(values, dict):
        raise InputError(Path(path).name, values, "a mapping of TRL's settings to values")
    unknown = {name: sorted(map(str, values.keys() - known(name))) for name in NAMES}
    if trainer is None:
        fewest = min(map(len, unknown.values()))
        trainer, *others = [name for name in NAMES if len(unknown[name]) == fewest]
        if others:
            allowed = f"{trainer} or {' or '.join(others)} before the file, whose settings are those of each"
            raise InputError("--trl", path, allowed)
    for name in unknown[trainer]:
        close = difflib.get_close_matches(name, known(trainer), n=1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        raise InputError(f"{Path(path).name}: {name}", values[name], f"a setting of trl {trainer}{meant}")
    return trainer, values, unread


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


def _script(path: str, tree: ast.Module, unread: list[str]) -> tuple[str, dict[str, Any]]:
    """Trainer and settings of a script: those that are constants."""
    nodes = list(ast.walk(tree))
    assigned = [(target, node.value) for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    constants = {target.id: value for target, value in assigned if isinstance(target, ast.Name)}

    def value(node: ast.AST) -> Any:
        node = constants.get(getattr(node, "id", ""), node)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
            return node.attr  # a type's name
        return ast.literal_eval(node)

    trainer, values, others = None, {}, []
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        name, names = ast.unparse(call.func).split(".")[-1], _LOADED
        if name in _CONFIGS:
            trainer, names = _CONFIGS[name], {}
        elif name == "LoraConfig":
            names = _LORA
            values["use_peft"] = True
        elif name == "from_pretrained" and "Model" in ast.unparse(call.func):
            values.setdefault("dtype", "auto")
        elif name.replace("Trainer", "Config") not in _CONFIGS:
            others += [name] if name.endswith(("Config", "Trainer")) else []
            continue
        first = [ast.keyword("model", node) for node in call.args[:1]] if names is _LOADED else []
        for keyword in [*first, *call.keywords]:
            known_as = names.get(keyword.arg, "" if names is _LOADED else keyword.arg)
            try:
                values |= {known_as: value(keyword.value)} if known_as else {}
            except ValueError:
                if known_as != "model_name_or_path":  # a model that is loaded elsewhere
                    unread.append(f"{path}:{keyword.value.lineno}: {known_as} is no constant; TRL's default is taken")
    if trainer is None:
        raise InputError("--trl", others[0] if others else path, f"a script with {', '.join(_CONFIGS)}")
    return trainer, values
