"""Reward gradients through generated text: train a policy by backpropagating a reward through what it writes.

Shapes everywhere: B batch, P prompt tokens, T completion tokens, V vocabulary, K support (top-k), D hidden, G samples
per prompt. The public names below are imported when first used, so that ``import grade`` is instant.
"""

from importlib import import_module

_PUBLIC = {
    "Backbone": "grade.models.backbone",
    "LoraSettings": "grade.models.adapter",
    "InputError": "grade.errors",
    "Objective": "grade.gradients.objective",
    "checkpointed": "grade.gradients.unrolled",
    "replay": "grade.gradients.replay",
    "unrolled": "grade.gradients.unrolled",
    "GoldJudge": "grade.rewards.gold",
    "MemoryTracker": "grade.memory.tracker",
    "encode_prompts": "grade.models.prompts",
    "RelaxationConfig": "grade.gradients.estimators",
    "load_reward": "grade.rewards.model",
    "generate": "grade.models.sampling",
    "sample": "grade.gradients.rollout",
    "TrainConfig": "grade.training.config",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'grade' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
