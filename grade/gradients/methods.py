"""Methods by name, with the settings of each: `METHODS` is the one table that a new method is added to.

A method's settings and its learner are imported when its name is used; those of settings need no torch, so that help
and errors are quick. `MethodConfig` built with ``method="grpo"`` has the fields that every method has and those of
`grpo`; a field of another method is an unknown key. A capability that several methods share (`CAPABILITIES`) adds its
fields in the same way where one of them is set.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from grade.config import Config, allowed_names
from grade.errors import InputError
from grade.plugins import ESTIMATORS, import_object

EngineName = Literal["replay", "checkpointed", "unrolled"]


@dataclass(frozen=True)
class _Relaxed:
    """A method that differentiates the reward through relaxed tokens."""

    estimator: str  # how tokens are relaxed
    engine: EngineName  # how the gradient is computed


RELAXED: dict[str, _Relaxed] = {name: _Relaxed(name, "replay") for name in ESTIMATORS} | {
    f"{name}_legacy": _Relaxed(name, "unrolled") for name in ("gumbel", "ste")
}
"""The last two are the source document's: the whole graph of the rollout is kept."""
POLICY_GRADIENTS: tuple[str, ...] = ("reinforce", "rloo", "remax", "grpo", "ppo")
TILT, TEACHER, AUTO = "tilt", "teacher", "auto"

FALLBACK = "rloo"
"""What `auto` trains with where tokens alone do not explain a reward: unbiased, and any reward will do."""


@dataclass(frozen=True)
class _Method:
    """Where a method's parts are, as import paths."""

    settings: str
    learner: str = ""  # none for auto
    rewarded: bool = True  # whether it learns from rewards


_SETTINGS = "grade.gradients.settings"
_RELAXED = "grade.gradients.relaxed"
_POLICY_GRADIENT = "grade.gradients.policy_gradient"
_TEACHER = "grade.training.teacher_settings:TeacherSettings"
METHODS: dict[str, _Method] = {
    **{
        name: _Method(
            f"{_SETTINGS}:{'Replayed' if relaxed.engine == 'replay' else 'Relaxed'}Settings",
            f"{_RELAXED}:RelaxedGradient",
        )
        for name, relaxed in RELAXED.items()
    },
    "reinforce": _Method(f"{_SETTINGS}:SampledSettings", f"{_POLICY_GRADIENT}:PolicyGradient"),
    "rloo": _Method(f"{_SETTINGS}:GroupSettings", f"{_POLICY_GRADIENT}:PolicyGradient"),
    "remax": _Method(f"{_SETTINGS}:SampledSettings", f"{_POLICY_GRADIENT}:PolicyGradient"),
    "grpo": _Method(f"{_SETTINGS}:GRPOSettings", f"{_POLICY_GRADIENT}:PolicyGradient"),
    "ppo": _Method(f"{_SETTINGS}:PPOSettings", f"{_POLICY_GRADIENT}:PolicyGradient"),
    TILT: _Method(f"{_SETTINGS}:TiltSettings", "grade.training.tilt:TiltLearner"),
    TEACHER: _Method(_TEACHER, "grade.training.teacher:TeacherGradient", rewarded=False),
    AUTO: _Method(f"{_SETTINGS}:GRPOSettings"),
}
"""Every method: name, settings, learner."""
CAPABILITIES: dict[str, str] = {
    "teacher": _TEACHER,
    "sampler": "grade.training.served_settings:SamplerSettings",
}
"""Settings that a run has only where it sets one of them: they begin with the capability's name."""

TAU_RANGE = (1e-4, 1e6)
"""Usable temperatures, of the Gumbel softmax and of sampling.

Softmax weights below ``exp(-104)`` are 0 in float32, so a position has a gradient only if its two largest values lie
within ``104 tau`` of each other: at 1e-4 one position in a hundred. The gradient falls as ``1/tau``: above 1e6 it is
less than the 1e-8 that AdamW adds to its root mean square, and the steps vanish.
"""
Tau = Annotated[float, Field(ge=TAU_RANGE[0], le=TAU_RANGE[1])]
Rate = Annotated[float, Field(gt=0, le=1000)]
"""A learning rate: AdamW moves a weight by about this much."""


def _known(name: str) -> str:
    if name not in METHODS:
        raise InputError("method", name, allowed_names(name, METHODS))
    return name


MethodName = Annotated[str, AfterValidator(_known)]


class MethodConfig(Config):
    """Settings of a method. `grade.training.config.GradeConfig` adds those of a training run."""

    base: ClassVar[type[MethodConfig]]
    """The class without any method's settings."""

    method: MethodName = Field(
        AUTO,
        description="auto: chosen from the reward; tilt: a token bias, refitted every step; teacher: no reward, a "
        "teacher's distributions; "
        f"{', '.join(ESTIMATORS)}: reward gradients by the replay engine; *_legacy: by the original's; "
        f"{', '.join(POLICY_GRADIENTS)}: policy gradients, which take any reward",
    )
    max_completion_length: PositiveInt = Field(512, description="completion length T in tokens")
    min_completion_length: NonNegativeInt = Field(
        0, description="end-of-sequence is not sampled before this many tokens"
    )
    gradient_checkpointing: bool = Field(
        False, description="recompute layers in backward (replay engine, policy gradients)"
    )

    @classmethod
    def kind(cls, values: Mapping[str, Any]) -> type[MethodConfig]:
        """This class with the fields of the method, the one ``then``, and the capabilities that the values name."""
        method = values.get("method", cls.model_fields["method"].default)
        methods = (method, values["then"]) if values.get("then") not in (None, AUTO) else (method,)
        capabilities = (name for name in CAPABILITIES if any(_belongs(key, name) for key in values))
        return _composed(cls.__dict__.get("base", cls), methods, tuple(capabilities))

    @classmethod
    def described(cls, prefix: str = "") -> Iterator[tuple[str, str]]:
        """As `Config.described`, with the settings of each method, and the methods that have one before its meaning."""
        yield from super().described(prefix)
        having: dict[tuple[str, str], list[str]] = {}
        for name, settings in _all_settings().items():
            for line in settings.described(prefix) if name != AUTO else ():
                having.setdefault(line, []).append(name)
        for (name, text), methods in having.items():
            yield name, f"[{', '.join(methods)}] {text}"

    @classmethod
    def known_keys(cls) -> list[str]:
        """As `Config.known_keys`, with those of the other methods."""
        others = (name for settings in _all_settings().values() for name in settings.model_fields)
        return [*super().known_keys(), *others]

    @classmethod
    def explain_unknown(cls, name: str) -> str:
        """As `Config.explain_unknown`; a field of other methods is named as theirs."""
        having = [other for other, settings in _all_settings().items() if name in settings.model_fields]
        if having:
            return f"a setting of this method: only {', '.join(having)} have {name}"
        return super().explain_unknown(name)

    @pydantic.model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.min_completion_length > self.max_completion_length:
            allowed = f"at most max_completion_length = {self.max_completion_length}"
            raise InputError("min_completion_length", self.min_completion_length, allowed)
        return self

    @classmethod
    def values_for(cls, method: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values that apply to a method, with ``method`` set: one file can serve several methods."""
        mine = cls.kind({**values, "method": method}).model_fields
        others = {name for settings in _all_settings().values() for name in settings.model_fields}
        return {name: value for name, value in values.items() if name in mine or name not in others} | {
            "method": method
        }

    def replace(self, **changes: Any) -> Self:
        """This config with other values, checked again."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        return self.base(**values | changes)

    @property
    def relaxed(self) -> bool:
        """Whether the method differentiates through relaxed tokens."""
        return self.method in RELAXED

    @property
    def group(self) -> int:
        """G, completions of each prompt."""
        return 1

    @property
    def samples_per_prompt(self) -> int:
        """Completions that are generated and scored for each prompt of a step, a greedy one included."""
        return self.group + (self.method == "remax")

    @property
    def updates(self) -> int:
        """Optimizer updates in a step."""
        return 1


def _belongs(key: str, capability: str) -> bool:
    return key == capability or key.startswith(f"{capability}_")


@functools.cache
def _all_settings() -> dict[str, type[Config]]:
    """Settings of every method and capability that is installed, by its name."""
    paths = {name: method.settings for name, method in METHODS.items()}
    paths |= {f"{name} = ...": path for name, path in CAPABILITIES.items()}
    found: dict[str, type[Config]] = {}
    for name, path in paths.items():
        with contextlib.suppress(ModuleNotFoundError):
            found[name] = import_object(path)
    return found


@functools.cache
def _composed(cls: type[MethodConfig], methods: tuple[str, ...], capabilities: tuple[str, ...]) -> type[MethodConfig]:
    """A config class with the fields of methods and of capabilities."""
    paths = [
        METHODS[name].settings for name in methods if name in METHODS
    ]  # the field's own check refuses another name
    paths += [CAPABILITIES[name] for name in capabilities]
    parts = tuple(import_object(path) for path in dict.fromkeys(paths))
    kind = pydantic.create_model(cls.__name__, __base__=(*parts, cls), __module__=cls.__module__, __doc__=cls.__doc__)
    kind.base = cls
    return kind
