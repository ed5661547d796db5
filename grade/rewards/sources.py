"""Rewards by name, as in YAML and on the command line.

| name | reward |
|---|---|
| ``package.module:function``, ``file.py:function`` | a function of text, or a verifier made there |
| ``hf:<id or folder>``, ``hf:<id or folder>@LABEL`` | a sequence classifier |
| ``<folder>`` with ``reward.json`` | a reward model that ``grade reward`` trained |

A bare hub id or a classifier's folder works too, as in TRL.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from grade.config import allowed_names
from grade.errors import InputError
from grade.models.embedding import RewardScope
from grade.rewards.classifier import TextClassifier, load_classifier
from grade.rewards.differentiable import EmbeddedClassifier
from grade.rewards.model import RewardModel, load_reward

if TYPE_CHECKING:
    from grade.models.backbone import Backbone

KINDS = "package.module:function, file.py:function, hf:<id or folder>[@LABEL], or a folder that 'grade reward' wrote"


def resolve_reward(
    spec: str, backbone: Backbone, scope: RewardScope = "prompt_and_completion", tokenizer: Any = None
) -> TextClassifier | RewardModel | Callable[..., Any]:
    """The reward of a name.

    Args:
        spec: The name; see the module's table.
        backbone: The policy.
        scope: Which text a classifier scores.
        tokenizer: A classifier's, instead of its own.

    Returns:
        A function, a classifier (differentiable if its vocabulary is the policy's) or a reward model.

    Raises:
        InputError: In one line, for a name that leads nowhere.
    """
    if spec.startswith("hf:"):
        return _classifier(spec[3:], backbone, scope, tokenizer)
    path = Path(spec)
    if not spec.strip():
        raise InputError("reward", spec, KINDS)
    if path.is_dir():
        if (path / "reward.json").is_file():
            return load_reward(path, backbone).to(backbone.device)
        if (path / "config.json").is_file():
            return _classifier(spec, backbone, scope, tokenizer)
        raise InputError("reward", spec, "a folder with reward.json ('grade reward'), or with a classifier's files")
    if ":" in spec:
        return _function(spec)
    if path.suffix == ".py" or path.exists():
        raise InputError("reward", spec, f"a function in it, as in {path.name}:function")
    if re.fullmatch(r"[\w.-]+/[\w.@ -]+", spec):
        return _classifier(spec, backbone, scope, tokenizer)
    raise InputError("reward", spec, KINDS)


def classifier_reward(
    model: PreTrainedModel, tokenizer: Any, backbone: Backbone, label: str | None, scope: RewardScope, name: str
) -> TextClassifier:
    """A classifier as a reward: differentiable if the vocabulary is the policy's, otherwise of text.

    Args:
        model: The classifier.
        tokenizer: Its tokenizer.
        backbone: The policy.
        label: The label whose probability is the reward.
        scope: Which text it scores.
        name: How it is logged.

    Returns:
        The reward; one of text keeps the reason for error messages.

    Raises:
        InputError: For a wrong label.
    """
    reward = TextClassifier(model, tokenizer, backbone.tokenizer, label, scope, name)
    try:
        return EmbeddedClassifier(model, tokenizer, backbone, label, scope, name)
    except InputError as error:
        reward.no_gradient = str(error.value)
        return reward


def _classifier(source: str, backbone: Backbone, scope: RewardScope, tokenizer: Any) -> TextClassifier:
    source, _, label = source.rpartition("@") if "@" in Path(source).name else (source, "", "")
    if not source:
        raise InputError("reward", "hf:", "hf:<id or folder>, with @LABEL for one of several labels")
    model, own = load_classifier(source, backbone.device)
    name = Path(source).name
    return classifier_reward(model, tokenizer or own, backbone, label or None, scope, name)


def _function(spec: str) -> Callable[..., Any]:
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise InputError("reward", spec, KINDS)
    module = _file(where, spec) if where.endswith(".py") else _module(where, spec)
    function = module
    for part in name.split("."):
        if not hasattr(function, part):
            public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
            raise InputError("reward", spec, f"a function of {where}: {allowed_names(name, public or ['none'])}")
        function = getattr(function, part)
    if not callable(function) or isinstance(function, type):
        raise InputError("reward", spec, f"a function, not {type(function).__name__}")
    return function


def _file(where: str, spec: str) -> ModuleType:
    path = Path(where)
    if not path.is_file():
        raise InputError("reward", spec, f"an existing file ({where} is not there)")
    loader = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
    module = importlib.util.module_from_spec(loader)
    with _importing(path.parent, spec):
        sys.modules[loader.name] = module  # dataclasses and pickle look there
        loader.loader.exec_module(module)
    return module


def _module(where: str, spec: str) -> ModuleType:
    if not all(part.isidentifier() for part in where.split(".")):
        raise InputError("reward", spec, KINDS)
    with _importing(Path.cwd(), spec):
        return importlib.import_module(where)


@contextlib.contextmanager
def _importing(folder: Path, spec: str) -> Iterator[None]:
    """Imports find modules in the folder too; whatever goes wrong is one line."""
    sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        raise InputError("reward", spec, f"a module that can be imported ({type(error).__name__}: {reason})") from error
    finally:
        sys.path.remove(str(folder.resolve()))
