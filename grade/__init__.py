"""Reward gradients through generated text: train a policy by backpropagating a reward through what it writes.

Shapes everywhere: B batch, P prompt tokens, T completion tokens, V vocabulary, K support (top-k), D hidden, G samples
per prompt. The public names below are imported on first use, so that ``import grade`` takes no time.

>>> import grade
>>> "replay" in dir(grade), grade.RelaxationConfig().estimator
(True, 'ste')
"""

from importlib import import_module

_PUBLIC = {
    # a policy and its prompts
    "Backbone": "grade.models.backbone",
    "LoraSettings": "grade.models.adapter",
    "encode_prompts": "grade.models.prompts",
    "decode": "grade.models.prompts",
    "generate": "grade.models.sampling",
    # a reward
    "RewardModel": "grade.rewards.model",
    "load_reward": "grade.rewards.model",
    "GoldJudge": "grade.rewards.gold",
    # a gradient
    "Objective": "grade.gradients.objective",
    "RelaxationConfig": "grade.gradients.estimators",
    "relax": "grade.gradients.estimators",
    "sample": "grade.gradients.rollout",
    "replay": "grade.gradients.replay",
    "unrolled": "grade.gradients.unrolled",
    "checkpointed": "grade.gradients.unrolled",
    # a token bias, and the limit
    "fit_bias": "grade.training.fit_bias",
    "limit_at": "grade.gradients.tilt",
    "limit_for": "grade.gradients.tilt",
    "efficiency": "grade.gradients.tilt",
    # a training run
    "GradeTrainer": "grade.training.loop",
    "GradeConfig": "grade.training.config",
    "TrainConfig": "grade.training.config",
    "train": "grade.training.run",
    "load_task": "grade.training.load",
    "toy_task": "grade.training.toy",
    "evaluate": "grade.training.evaluate",
    # the memory of a step
    "StepConfig": "grade.memory.settings",
    "trace": "grade.memory.trace",
    "trace_callable": "grade.memory.trace",
    "largest_batch": "grade.memory.plan",
    "parse_bytes": "grade.memory.plan",
    "MemoryTracker": "grade.memory.tracker",
    # the entropy of a policy
    "EntropyProbe": "grade.entropy.probe",
    # what bad input raises
    "InputError": "grade.errors",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'grade' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
