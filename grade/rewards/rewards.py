"""Several rewards as one: a weighted sum, with what is logged about its parts.

`Rewards` is what a trainer holds. `make_rewards` builds it from what users give: functions, classifiers, reward
models, or names of them (`grade.rewards.sources`).
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from grade.errors import InputError
from grade.models.embedding import RewardScope
from grade.models.head import wide
from grade.rewards.classifier import TextClassifier, load_tokenizer
from grade.rewards.functions import FunctionReward, Log, run_functions
from grade.rewards.sources import classifier_reward, resolve_reward
from grade.rewards.text import beginning, decode_texts

if TYPE_CHECKING:
    from grade.models.backbone import Backbone
    from grade.models.prompts import PromptBatch

ALL_NONE = "all reward functions returned None for {row}; its reward is 0"


@dataclass(frozen=True)
class Scores:
    """What one batch scored, part by part.

    Attributes:
        values: Each part's rewards [B], without weight; NaN where a function returned None.
        seconds: Time of each part; empty for relaxed completions.
        columns: Further columns of the table of completions (``log_extra``).
        metrics: Values of further metrics (``log_metric``).
    """

    values: dict[str, Tensor]
    seconds: dict[str, float] = field(default_factory=dict)
    columns: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)


class HeadReward:
    """A callable of the policy's embeddings, such as `grade.rewards.model.RewardModel`, that scores ids too.

    Args:
        function: Maps embeddings [B, L, D] and mask [B, L] to rewards [B].
        backbone: The policy, whose embeddings it reads.
        scope: Whether it reads the prompt too.
        name: How it is logged.
    """

    def __init__(
        self, function: Callable[[Tensor, Tensor], Tensor], backbone: Backbone, scope: RewardScope, name: str
    ) -> None:
        self.function, self.backbone, self.scope, self.name = function, backbone, scope, name
        self.kind = getattr(function, "kind", None)  # of a `RewardModel`; ``method: auto`` asks for it

    def __call__(self, embeds: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B], differentiable in the embeddings."""
        return self.function(embeds, mask)

    @torch.no_grad()
    def score(self, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B] of completions [B, T]."""
        embeds = self.backbone.embed(ids)
        if self.scope == "prompt_and_completion":
            embeds = torch.cat([self.backbone.embed(prompts.ids), embeds], 1)
            mask = torch.cat([prompts.mask, mask], 1)
        return self(embeds, mask)


Part = FunctionReward | TextClassifier | HeadReward


class Rewards:
    """``R = sum_i w_i R_i``; a part that does not apply to a row (None) adds nothing to it.

    Args:
        parts: The rewards, each with a ``score(prompts, ids, mask)``.
        weights: One for each; default: 1.
        names: One for each, as they are logged; default: their own, numbered where two are equal.
        scope: Which text they score.
        dtype: Type of R.

    Attributes:
        last: Parts of the batch that was scored last; None before the first.
        trainer_state: Passed to functions.

    Raises:
        InputError: If there is no reward, or weights do not fit or are not finite.
        ValueError: If a part was made for another scope.
    """

    name = "reward"

    def __init__(
        self,
        parts: Sequence[Part],
        weights: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
        scope: RewardScope = "prompt_and_completion",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if not parts:
            raise InputError("reward_funcs", list(parts), "at least one reward")
        weights = [1.0] * len(parts) if weights is None else list(weights)
        if len(weights) != len(parts):
            raise InputError("reward_weights", weights, f"{len(parts)} numbers, one for each reward")
        for weight in weights:
            if not isinstance(weight, (int, float)) or not math.isfinite(weight):
                raise InputError("reward_weights", weight, "finite numbers")
        for part in parts:
            if getattr(part, "scope", scope) != scope:
                raise ValueError(f"reward {part.name!r} was made for scope {part.scope!r}, the others have {scope!r}")
        self.parts, self.weights, self.scope, self.dtype = list(parts), weights, scope, dtype
        self.names = _distinct(names or [part.name for part in parts])
        self.last: Scores | None = None
        self.trainer_state: Any = None
        self._warned = False

    def score(self, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """Rewards [B] of completions [B, T]; `last` then holds the parts.

        Raises:
            InputError: From a part that fails, or is not finite; names the part and the row.
        """
        functions = {i: part for i, part in enumerate(self.parts) if isinstance(part, FunctionReward)}
        log = Log(self.trainer_state)
        scored: dict[int, tuple[Tensor, float]] = {}
        if functions:
            texts = decode_texts(next(iter(functions.values())).tokenizer, prompts, ids, mask)
            scored |= dict(zip(functions, run_functions(list(functions.values()), texts, log), strict=True))
        for i, part in enumerate(self.parts):
            if i not in functions:
                start = time.perf_counter()
                values = part.score(prompts, ids, mask)
                _check_finite(self.names[i], values)
                scored[i] = values, time.perf_counter() - start
        values = [scored[i][0].to(device=ids.device, dtype=self.dtype) for i in range(len(self.parts))]
        seconds = {name: scored[i][1] for i, name in enumerate(self.names)}
        self.last = Scores(dict(zip(self.names, values, strict=True)), seconds, dict(log.columns), dict(log.metrics))
        missing = torch.stack(values).isnan()
        if not missing.any():
            return self._sum(values)
        if missing.all(0).any():
            self._warn(texts.completions[int(missing.all(0).nonzero()[0])])
        return self._sum([value.nan_to_num(0.0) for value in values])

    def combine(self, values: Sequence[Tensor]) -> Tensor:
        """The weighted sum [B] of the parts' values [B], differentiable; `last` then holds the parts."""
        values = [value.to(self.dtype) for value in values]
        self.last = Scores({name: value.detach() for name, value in zip(self.names, values, strict=True)})
        return self._sum(values)

    def _sum(self, values: Sequence[Tensor]) -> Tensor:
        first, *others = (weight * value for weight, value in zip(self.weights, values, strict=True))
        for other in others:
            first = first + other
        return first

    def _warn(self, completion: Any) -> None:
        if not self._warned:
            warnings.warn(ALL_NONE.format(row=f"the completion {beginning(completion)}"), stacklevel=3)
        self._warned = True


def make_rewards(
    reward_funcs: Any,
    backbone: Backbone,
    weights: Sequence[float] | None = None,
    processing_classes: Any = None,
    scope: RewardScope = "prompt_and_completion",
) -> Rewards:
    """The rewards of a trainer, from what TRL's trainers take, and more.

    Args:
        reward_funcs: One, or a list, of: a function of text; a name (`grade.rewards.sources.resolve_reward`); a
            sequence classifier; a `RewardModel` or another module of embeddings and mask.
        backbone: The policy.
        weights: One for each; default: 1.
        processing_classes: The classifiers' tokenizers: one, or a list with None where the default will do.
        scope: Which text classifiers and reward models score. Functions always get prompts and completions.

    Returns:
        Their weighted sum.

    Raises:
        InputError: For anything that cannot be used.
    """
    if isinstance(reward_funcs, Rewards):
        return reward_funcs
    given = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    several = isinstance(processing_classes, (list, tuple))
    tokenizers = list(processing_classes) if several else [processing_classes] * len(given)
    if len(tokenizers) != len(given) or (processing_classes is not None and not several and len(given) > 1):
        allowed = f"{len(given)}, one for each reward (None for the default)"
        raise InputError("reward_processing_classes", len(tokenizers) if several else 1, allowed)
    parts = [_part(one, tokenizer, backbone, scope) for one, tokenizer in zip(given, tokenizers, strict=True)]
    return Rewards(parts, weights, None, scope, wide(backbone.dtype))


def _part(given: Any, tokenizer: Any, backbone: Backbone, scope: RewardScope) -> Part:
    if isinstance(given, str):
        given = resolve_reward(given, backbone, scope, tokenizer)
    if hasattr(given, "score") and not isinstance(given, nn.Module):
        return given
    if isinstance(given, nn.Module):
        given = given.to(backbone.device)
    if isinstance(given, nn.Module) and hasattr(given, "config"):  # a classifier, compiled ones included
        source = getattr(given.config, "_name_or_path", "")
        if tokenizer is None and not source:
            raise InputError("reward_processing_classes", None, "the tokenizer of a classifier given as an object")
        name = source.rstrip("/").split("/")[-1] or type(given).__name__
        return classifier_reward(given, tokenizer or load_tokenizer(source), backbone, None, scope, name)
    if isinstance(given, nn.Module):
        return HeadReward(given, backbone, scope, getattr(given, "name", None) or getattr(given, "kind", "reward"))
    return FunctionReward(given, backbone.tokenizer, dtype=wide(backbone.dtype))


def _check_finite(name: str, values: Tensor) -> None:
    wrong = (~torch.isfinite(values)).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise InputError(f"reward {name!r}, row {row}", float(values[row]), "a finite number")


def _distinct(names: Sequence[str]) -> list[str]:
    distinct: list[str] = []
    for name in names:
        same = sum(name == other for other in names[: len(distinct)])
        distinct.append(f"{name}_{same + 1}" if same else name)
    return distinct
