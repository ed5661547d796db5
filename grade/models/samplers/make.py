"""A sampler by name."""

from __future__ import annotations

from pathlib import Path

from grade.models.samplers.http import address_of
from grade.models.samplers.interface import Sampler

LOCAL = ("own", "shared", "transformers")
"""Samplers of this process."""


def known_sampler(name: str) -> str:
    """The name, if there is such a sampler: own, shared, transformers, or a server's address.

    Raises:
        InputError: Otherwise.
    """
    if name not in LOCAL:
        address_of(name)
    return name


def make_sampler(name: str, timeout: float = 600.0, folder: str | Path | None = None) -> Sampler:
    """The sampler of that name.

    Args:
        name: own, shared, transformers, or a server's address.
        timeout: Seconds to wait for a server's answer.
        folder: Where adapters for a server are saved; None: a temporary folder.

    Returns:
        The sampler.

    Raises:
        InputError: For another name.
    """
    known_sampler(name)
    if name == "own":
        from grade.models.samplers.own import OwnSampler  # here and below: only what is asked for is imported

        return OwnSampler()
    if name == "shared":
        from grade.models.samplers.shared import SharedPrompts

        return SharedPrompts()
    if name == "transformers":
        from grade.models.samplers.continuous import ContinuousBatching

        return ContinuousBatching()
    from grade.models.samplers.server import CompletionsServer

    return CompletionsServer(name, timeout, folder)
