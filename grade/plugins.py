"""What is found by name or import path: capabilities that the core does not import."""

from __future__ import annotations

import importlib
from typing import Any


def import_object(path: str) -> Any:
    """The object that an import path ``package.module:name`` names.

    >>> import_object("math:tau") == 2 * import_object("math:pi")
    True
    """
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


REWARDS = {"hf": "grade.rewards.classifier:classifier_reward"}
"""Makers of rewards, by what stands before the colon of a reward's name."""
