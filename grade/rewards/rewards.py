"""Several rewards as one: a weighted sum, with what is logged about its parts; a teacher as one; rewards by name.

`make_rewards` builds the `Rewards` of a trainer from what users give. As in YAML and on the command line, names are

| name | reward |
|---|---|
| ``package.module:function``, ``file.py:function`` | a function of text |
| ``hf:<id or folder>``, ``hf:<id or folder>@LABEL`` | a sequence classifier |
| ``<folder>`` with ``reward.json`` | a reward model that ``grade reward`` trained |

A bare hub id or a classifier's folder works too, as in TRL.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
import re
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grade.config import allowed_names
from grade.errors import InputError
from grade.models.head import wide
from grade.models.prompts import PromptBatch
from grade.models.scoring import predicting_hidden
from grade.models.teacher import Teacher
from grade.rewards.base import EmbeddingReward, Reward, RewardScope, check_values
from grade.rewards.classifier import EmbeddedClassifier, TextClassifier, load_classifier, load_tokenizer
from grade.rewards.functions import FunctionReward, Log, decode_texts, run_functions
from grade.rewards.model import load_reward

if TYPE_CHECKING:
    from grade.models.backbone import Backbone

KINDS = "package.module:function, file.py:function, hf:<id or folder>[@LABEL], or a folder that 'grade reward' wrote"


@dataclass(frozen=True)
class Scores:
    """What one batch scored, part by part."""

    values: dict[str, Tensor]  # each part's rewards [B], without weight; NaN where a function returned None
    seconds: dict[str, float] = field(default_factory=dict)  # time of each part; empty for relaxed completions
    # further columns of the table of completions (``log_extra``)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)  # values of further metrics (``log_metric``)


class Rewards(Reward):
    """``R = sum_i w_i R_i``; a part that does not apply to a row (None) adds nothing to it, and none makes R NaN.

    Each part has a weight (default: 1), and is logged under its name, numbered where two are equal. All must be made
    for one ``scope``; ``dtype`` is that of R. ``last`` are the `Scores` of the batch that was scored last; a list
    ``recorded``, if there is one, takes those of every batch; ``trainer_state`` is passed to functions.
    """

    parts: Sequence[Reward] = ()

    def __init__(
        self,
        parts: Sequence[Reward],
        weights: Sequence[float] | None = None,
        scope: RewardScope = "prompt_and_completion",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if not parts:
            raise InputError("reward_funcs", list(parts), "at least one reward")
        weights = [1.0] * len(parts) if weights is None else list(weights)
        if len(weights) != len(parts):
            raise InputError("reward_weights", weights, f"{len(parts)} numbers, one for each reward")
        for part in parts:
            if part.scope not in (None, scope):
                raise InputError("reward_scope", scope, f"{part.scope}, for which reward {part.name!r} was made")
        self.parts, self.weights, self.scope, self.dtype = list(parts), weights, scope, dtype
        self.names = _distinct([part.name for part in parts])
        self.last: Scores | None = None
        self.recorded: list[Scores] | None = None
        self.trainer_state: Any = None
        self._warned = False

    def score(self, policy: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B] of completions [B, T]; `last` then holds the parts.

        NaN where every function returned None; any other value that is not finite is refused.
        """
        functions = [part for part in self.parts if isinstance(part, FunctionReward)]
        log, scored = Log(self.trainer_state), dict[Reward, tuple[Tensor, float]]()
        if functions:
            texts = decode_texts(policy.tokenizer, prompts, ids, mask)
            scored = dict(zip(functions, run_functions(functions, texts, log, self.dtype), strict=True))
        values, seconds = [], {}
        for name, part in zip(self.names, self.parts, strict=True):
            start = time.perf_counter()
            given, took = scored[part] if part in scored else (part.score(policy, prompts, ids, mask), None)
            if took is None and not torch.isfinite(check_values(part, given, len(ids))).all():
                row = int((~torch.isfinite(given)).nonzero()[0])
                raise InputError(f"reward {name!r}, row {row}", float(given[row]), "a finite number")
            seconds[name] = time.perf_counter() - start if took is None else took
            values.append(given.to(device=ids.device, dtype=self.dtype))
        self.last = Scores(dict(zip(self.names, values, strict=True)), seconds, log.columns, log.metrics)
        if self.recorded is not None:
            self.recorded.append(self.last)
        missing = torch.stack(values).isnan()
        if (~missing).all():  # so asked, fake tensors take this branch too
            return self._sum(values)
        unscored = missing.all(0)
        if unscored.any() and not self._warned:
            row = int(unscored.nonzero()[0])
            warnings.warn(f"row {row}: every reward is None, so it has no advantage and no part in means", stacklevel=2)
            self._warned = True
        return self._sum([value.nan_to_num(0.0) for value in values]).masked_fill(unscored, torch.nan)

    def combine(self, values: Sequence[Tensor]) -> Tensor:
        """The weighted sum [B] of the parts' values [B], differentiable; `last` then holds the parts."""
        values = [value.to(self.dtype) for value in values]
        self.last = Scores({name: value.detach() for name, value in zip(self.names, values, strict=True)})
        return self._sum(values)

    def _sum(self, values: Sequence[Tensor]) -> Tensor:
        return functools.reduce(operator.add, (w * value for w, value in zip(self.weights, values, strict=True)))


class TeacherReward(Reward):
    """A teacher as a reward: the closer the policy's distributions are to its own, the higher.

    It is ``-mean_t D_t`` in nats per token, of the policy's divergence from a teacher along a completion.
    """

    name = "teacher"
    no_gradient = "a divergence of distributions, of which relaxed tokens have none"

    def __init__(self, teacher: Teacher) -> None:
        self.teacher = teacher

    @torch.no_grad()
    def score(self, policy: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Of completions [B, T] of the policy as it is now; see `Reward.score`."""
        states = self.teacher.hidden(prompts, ids, mask)
        each = self.teacher.divergence(predicting_hidden(policy, prompts, ids), states, mask)
        return -each.sum(1) / mask.sum(1)


def beside(rewards: Rewards | None, teacher: Teacher, scope: RewardScope, dtype: torch.dtype) -> Rewards:
    """The sum of rewards, if there are any, and of a teacher's with its weight."""
    parts, weights = ([], []) if rewards is None else (rewards.parts, rewards.weights)
    return Rewards([*parts, TeacherReward(teacher)], [*weights, teacher.weight], scope, dtype)


def make_rewards(
    reward_funcs: Any,
    backbone: Backbone,
    weights: Sequence[float] | None = None,
    processing_classes: Any = None,
    scope: RewardScope = "prompt_and_completion",
) -> Rewards:
    """The weighted sum of a trainer's rewards: one, or a list, of what `make_reward` takes.

    ``processing_classes`` are the classifiers' tokenizers: one, or a list with None where the default will do.
    """
    if isinstance(reward_funcs, Rewards):
        return reward_funcs
    given = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    tokenizers = [None] * len(given) if processing_classes is None else processing_classes
    tokenizers = tokenizers if isinstance(tokenizers, (list, tuple)) else [tokenizers]
    if len(tokenizers) != len(given):
        allowed = f"{len(given)}, one for each reward (None for the default)"
        raise InputError("reward_processing_classes", len(tokenizers), allowed)
    parts = [make_reward(one, backbone, scope, tokenizer) for one, tokenizer in zip(given, tokenizers, strict=True)]
    return Rewards(parts, weights, scope, wide(backbone.dtype))


def make_reward(
    given: Any, backbone: Backbone, scope: RewardScope = "prompt_and_completion", tokenizer: Any = None
) -> Reward:
    """One reward for a policy.

    It is given as a function of text; a sequence classifier, whose own ``tokenizer`` can be replaced; a
    `grade.rewards.model.RewardModel` or another module of embeddings and mask; a `Reward`; or a name, see the module's
    table. ``scope`` is the text that classifiers and modules score; functions get prompts and completions.
    """
    label = None
    if isinstance(given, str):
        given, own, label = _named(given, backbone)
        tokenizer = tokenizer or own
    if isinstance(given, Reward):
        return given
    if not callable(given):
        raise InputError("reward", given, KINDS)
    if not isinstance(given, nn.Module):
        reward = FunctionReward(given)
        if backbone.tokenizer is None:
            raise InputError("tokenizer", None, f"the policy's tokenizer: reward {reward.name!r} reads text")
        return reward
    given = given.to(backbone.device).eval()
    if not hasattr(given, "config"):
        return EmbeddingReward(given, scope)
    source = getattr(given.config, "_name_or_path", "")  # a classifier, compiled ones included
    if getattr(given, "base_model_prefix", "") and given.base_model is given:
        raise InputError("reward", type(given).__name__, "a model with labels, as AutoModelForSequenceClassification's")
    if tokenizer is None:
        if not source:
            raise InputError("reward_processing_classes", None, "the tokenizer of a classifier given as an object")
        tokenizer = load_tokenizer(source)
    name = source.rstrip("/").split("/")[-1] or type(given).__name__
    reward = TextClassifier(given, tokenizer, label, scope, name)
    try:
        return EmbeddedClassifier(given, tokenizer, backbone, label, scope, name)
    except InputError as error:  # another vocabulary, or embeddings that it reads unlike ids
        reward.no_gradient = str(error.value)
        return reward


def _named(spec: str, backbone: Backbone) -> tuple[Any, Any, str | None]:
    """A function, reward model or classifier by name; of a classifier also its tokenizer and the label."""
    path = Path(spec)
    if not spec.strip():
        raise InputError("reward", spec, KINDS)
    if path.is_dir() and (path / "reward.json").is_file():
        return load_reward(path, backbone), None, None
    if path.is_dir() and not (path / "config.json").is_file():
        raise InputError("reward", spec, "a folder with reward.json ('grade reward'), or with a classifier's files")
    if not path.is_dir() and not spec.startswith("hf:"):
        if ":" in spec:
            return _function(spec), None, None
        if path.suffix == ".py" or path.exists():
            raise InputError("reward", spec, f"a function in it, as in {path.name}:function")
        if not re.fullmatch(r"[\w.-]+/[\w.@ -]+", spec):
            raise InputError("reward", spec, KINDS)
    source = spec.removeprefix("hf:")
    source, _, label = source.rpartition("@") if "@" in Path(source).name else (source, "", "")
    if not source:
        raise InputError("reward", "hf:", "hf:<id or folder>, with @LABEL for one of several labels")
    return *load_classifier(source, backbone.device), label or None


def _function(spec: str) -> Callable[..., Any]:
    """A function of a module or file. `pydoc.locate` knows neither files nor why an import fails."""
    where, _, name = spec.rpartition(":")
    path, in_file = Path(where), where.endswith(".py")
    if not name or not (in_file or all(part.isidentifier() for part in where.split("."))):
        raise InputError("reward", spec, KINDS)
    if in_file and not path.is_file():
        raise InputError("reward", spec, f"an existing file ({where} is not there)")
    folder = str((path.parent if in_file else Path.cwd()).resolve())
    sys.path.insert(0, folder)  # for what the module imports, too
    try:
        with torch.enable_grad(), chdir("."):  # which are restored, if the module changes them for itself
            if in_file:
                source = importlib.util.spec_from_file_location(f"reward_{path.stem}", path)
                module = importlib.util.module_from_spec(source)
                sys.modules[source.name] = module  # dataclasses and pickle look there
                source.loader.exec_module(module)
            else:
                module = importlib.import_module(where)
    except (Exception, SystemExit) as error:
        reason = " ".join(str(error).split())
        raise InputError("reward", spec, f"a module that can be imported ({type(error).__name__}: {reason})") from error
    finally:
        sys.path.remove(folder)
    try:
        function = operator.attrgetter(name)(module)
    except AttributeError:
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        allowed = f"a function of {where}: {allowed_names(name, public or ['none'])}"
        raise InputError("reward", spec, allowed) from None
    if not callable(function) or isinstance(function, type):
        raise InputError("reward", spec, f"a function, not {type(function).__name__}")
    return function


def _distinct(names: Sequence[str]) -> list[str]:
    distinct: list[str] = []
    for name in names:
        same = sum(name == other for other in names[: len(distinct)])
        distinct.append(f"{name}_{same + 1}" if same else name)
    return distinct
