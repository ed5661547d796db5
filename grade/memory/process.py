"""Peak memory of the running process, as the system reports it."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory(device: torch.device) -> int:
    """Peak memory so far, in bytes.

    Args:
        device: A CUDA device gives ``max_memory_allocated``; anything else the process's peak resident set size
            (``ru_maxrss``), libraries and loading included.

    Returns:
        Bytes.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
