"""Several rewards as one: a weighted sum, with what is logged about its parts; rewards by name.

`make_rewards` builds the `Rewards` of a trainer from what users give. As in YAML and on the command line, names are

| name | reward |
|---|---|
| ``package.module:function``, ``file.py:function`` | a function of text |
| ``hf:<id or folder>``, ``hf:<id or folder>@LABEL`` | a sequence classifier (`grade.rewards.classifier`) |
| ``<folder>`` with ``reward.json`` | a reward model that ``grade reward`` trained |
| ``self_certainty`` | the policy's own certainty (`grade.rewards.certainty`) |

A bare hub id or a classifier's folder works too, as in TRL.
"""

from __future__ import annotations

import functools
import importlib.util
import operator
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grade.errors import InputError
from grade.models.head import wide
from grade.models.prompts import PromptBatch
from grade.plugins import OWN_REWARDS, REWARD_FOLDER, REWARDS, import_object
from grade.rewards.base import EmbeddingReward, Reward, RewardScope, check_values
from grade.rewards.functions import FunctionReward, Log, decode_texts, run_functions

if TYPE_CHECKING:
    from grade.models.backbone import Backbone

KINDS = (
    "package.module:function, file.py:function, hf:<id or folder>[@LABEL], self_certainty, or a folder that "
    "'grade reward' wrote"
)


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

    Each part has a weight (default: 1), and is logged under its name, numbered where two are equal. One with weight 0
    beside others is not `learned`: it has no part in R, nor in which completions have one, and is not asked about
    relaxed tokens. All must be made for one ``scope``; ``dtype`` is that of R. ``last`` are the `Scores` of the batch
    that was scored last; ``trainer_state`` is passed to functions.
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
        self.trainer_state: Any = None

    @property
    def learned(self) -> Sequence[Reward]:
        """The parts whose weight is not 0, or all if each has 0."""
        return [part for part, weight in zip(self.parts, self.weights, strict=True) if weight] or self.parts

    def score(self, policy: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B] of completions [B, T]; `last` then holds the parts.

        NaN where every function that is learned returned None; any other value that is not finite is refused.
        """
        functions = [part for part in self.parts if isinstance(part, FunctionReward)]
        log, scored = Log(self.trainer_state), dict[Reward, tuple[Tensor, float]]()
        if functions:
            texts = decode_texts(policy.tokenizer, prompts, ids, mask)
            scored = dict(zip(functions, run_functions(functions, texts, log, self.dtype), strict=True))
        values, seconds = [], {}
        for name, part in zip(self.names, self.parts, strict=True):
            start = time.perf_counter()
            if part in scored:
                value, seconds[name] = scored[part]
            else:
                value = check_values(part, part.score(policy, prompts, ids, mask), len(ids))
                if not value.isfinite().all():
                    raise InputError(f"reward {name!r}", value.tolist(), "finite numbers")
                seconds[name] = time.perf_counter() - start
            values.append(value.to(device=ids.device, dtype=self.dtype))
        self.last = Scores(dict(zip(self.names, values, strict=True)), seconds, log.columns, log.metrics)
        learned = self.learned
        values = [value if part in learned else None for part, value in zip(self.parts, values, strict=True)]
        missing = torch.stack([value for value in values if value is not None]).isnan()
        if (~missing).all():  # so asked, fake tensors take this branch too
            return self._sum(values)
        unscored = missing.all(0)
        if unscored.any():
            warnings.warn("a completion whose rewards are all None has no advantage and is in no mean", stacklevel=2)
        values = [None if value is None else value.nan_to_num(0.0) for value in values]
        return self._sum(values).masked_fill(unscored, torch.nan)

    def combine(self, values: Sequence[Tensor | None]) -> Tensor:
        """The weighted sum [B] of the parts' values [B], differentiable; `last` then holds the parts.

        None for what is not `learned`.
        """
        values = [None if value is None else value.to(self.dtype) for value in values]
        given = zip(self.names, values, strict=True)
        self.last = Scores({name: value.detach() for name, value in given if value is not None})
        return self._sum(values)

    def _sum(self, values: Sequence[Tensor | None]) -> Tensor:
        weighted = zip(self.weights, values, strict=True)
        return functools.reduce(operator.add, (w * value for w, value in weighted if value is not None))


def make_rewards(
    reward_funcs: Any,
    backbone: Backbone,
    weights: Sequence[float] | None = None,
    processing_classes: Any = None,
    scope: RewardScope = "prompt_and_completion",
) -> Rewards:
    """The weighted sum of a trainer's rewards: none, one, or a list, of what `make_reward` takes.

    ``processing_classes`` are the classifiers' tokenizers: one, or a list with None where the default will do.
    """
    if isinstance(reward_funcs, Rewards):
        return reward_funcs
    funcs = [] if reward_funcs is None else reward_funcs
    funcs = list(funcs) if isinstance(funcs, (list, tuple)) else [funcs]
    tokenizers = [None] * len(funcs) if processing_classes is None else processing_classes
    tokenizers = tokenizers if isinstance(tokenizers, (list, tuple)) else [tokenizers]
    if len(tokenizers) != len(funcs):
        raise InputError("reward_processing_classes", len(tokenizers), f"{len(funcs)}, one for each reward")
    parts = [make_reward(one, backbone, scope, tokenizer) for one, tokenizer in zip(funcs, tokenizers, strict=True)]
    return Rewards(parts, weights, scope, wide(backbone.dtype))


def make_reward(
    reward: Any, backbone: Backbone, scope: RewardScope = "prompt_and_completion", tokenizer: Any = None
) -> Reward:
    """One reward for a policy.

    It is a function of text; a sequence classifier, whose own ``tokenizer`` can be replaced; a
    `grade.rewards.model.RewardModel` or another module of embeddings and mask; a `Reward`; or a name, see the module's
    table. ``scope`` is the text that classifiers and modules score; functions get prompts and completions.
    """
    if isinstance(reward, str):
        kind, colon, name = reward.partition(":")
        if reward in OWN_REWARDS:
            return import_object(OWN_REWARDS[reward])()
        if (Path(reward) / "reward.json").is_file():
            reward = import_object(REWARD_FOLDER)(reward, backbone)
        elif colon and kind not in REWARDS:
            reward = _imported(reward)
        else:
            return import_object(REWARDS[kind if colon else "hf"])(name or kind, backbone, scope, tokenizer)
    if isinstance(reward, Reward):
        return reward
    if not callable(reward):
        raise InputError("reward", reward, KINDS)
    if not isinstance(reward, nn.Module):
        return FunctionReward(reward)
    if hasattr(reward, "config"):  # a model of transformers
        return import_object(REWARDS["hf"])(reward, backbone, scope, tokenizer)
    return EmbeddingReward(reward.to(backbone.device).eval(), scope)


def _imported(name: str) -> Any:
    """What ``package.module:name`` or ``file.py:name`` names; its imports are looked for beside it too."""
    where, _, attribute = name.rpartition(":")
    in_file = where.endswith(".py")
    sys.path.insert(0, str((Path(where).parent if in_file else Path()).resolve()))
    try:
        if not in_file:
            return import_object(name)
        source = importlib.util.spec_from_file_location(f"reward_{Path(where).stem}", where)
        module = importlib.util.module_from_spec(source)
        sys.modules[source.name] = module  # dataclasses and pickle look there
        source.loader.exec_module(module)
        return getattr(module, attribute)
    except Exception as error:
        raise InputError("reward", name, f"{KINDS} ({type(error).__name__}: {error})") from error


def _distinct(names: Sequence[str]) -> list[str]:
    distinct: list[str] = []
    for name in names:
        same = sum(name == other for other in names[: len(distinct)])
        distinct.append(f"{name}_{same + 1}" if same else name)
    return distinct
