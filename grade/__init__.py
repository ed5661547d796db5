"""Reward gradients through generated text: train a policy by backpropagating a reward through what it writes.

Shapes everywhere: B batch, P prompt tokens, T completion tokens, V vocabulary, K support (top-k), D hidden, G samples
per prompt. The public names below are imported when first used, so that ``import grade`` is instant.
"""

from importlib import import_module

_PUBLIC = {
    "Backbone": "grade.backbone",
    "LoraSettings": "grade.adapter",
    "InputError": "grade.errors",
    "Objective": "grade.engines",
    "checkpointed": "grade.engines",
    "replay": "grade.engines",
    "unrolled": "grade.engines",
    "GoldJudge": "grade.gold",
    "MemoryTracker": "grade.memory.tracker",
    "encode_prompts": "grade.prompts",
    "RelaxationConfig": "grade.relaxation",
    "load_reward": "grade.reward",
    "generate": "grade.rollout",
    "sample": "grade.rollout",
    "TrainConfig": "grade.train_config",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'grade' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
