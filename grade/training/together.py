"""What processes do together: sums, means, lists, and failing with one message.

Two ways to fail. Work that communicates with no one is done by `Together.__call__`: all hear of an error before they go
on. Otherwise the process that fails leaves its message in the store where the processes met, and closes its
connections: the others, who wait for it in a collective operation, are thrown out of it and read the message
(`Together.ending`).
"""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed import distributed_c10d

from grade.errors import InputError
from grade.gradients.objective import Objective
from grade.models.backbone import Backbone
from grade.models.prompts import PromptBatch

Result = TypeVar("Result")

_MESSAGE, _LEFT = "grade/error", "grade/left"
_PATIENCE = 10.0
"""Seconds that the first process waits for the others to read a message: the store may end with it."""
_GLANCE = 0.5
"""Seconds between looks for a message, by a process whose collective operations outlive a closed connection."""


class Together:
    """Collective operations that cost nothing in a single process.

    Args:
        accelerator: The processes.
        sharded: Whether they hold the base together, so that a pass is a collective operation.
    """

    def __init__(self, accelerator: Accelerator, sharded: bool = False) -> None:
        self.accelerator, self.several, self.sharded = accelerator, accelerator.num_processes > 1, sharded
        self._ending = False

    def __call__(self, work: Callable[[], Result]) -> Result:
        """Do a piece of work that may fail on some processes; then it fails on all, instead of leaving them waiting.

        Args:
            work: Must not communicate itself, but for passes of a sharded base, whose errors are left to `ending`.

        Returns:
            Its result.

        Raises:
            InputError: This process's own, or the first of the others'.
        """
        if not self.several:
            return work()
        if self.sharded:
            with self.ending():
                return work()
        error, result = None, None
        try:
            result = work()
        except InputError as raised:
            error = raised
        told = self.gather([None if error is None else (error.field, error.value, error.allowed)])
        if error is not None:
            raise error
        for other in told:
            if other is not None:
                raise InputError(*other)
        return result

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Within this context an `InputError` of one process ends all, wherever they wait for each other.

        Raises:
            InputError: This process's own, or that of the one that failed first.
        """
        if not self.several or self._ending:
            yield
            return
        self._ending, done = True, threading.Event()
        if dist.get_backend() != "gloo":  # nccl's operations wait on when a partner has gone, unless they are aborted
            threading.Thread(target=_abort_when_told, args=(_store(), done), daemon=True).start()
        try:
            yield
        except InputError as error:
            self._leave((error.field, error.value, error.allowed))
            raise
        except RuntimeError as error:
            message = self._leave()
            if message is None:
                raise
            raise InputError(*message) from error
        finally:
            done.set()
            self._ending = False

    def _leave(self, message: tuple[Any, ...] | None = None) -> tuple[Any, ...] | None:
        """Tell the others, unless one has told already, and let go of them; what was told."""
        try:
            store = _store()
            if message is not None:
                store.compare_set(_MESSAGE, "", pickle.dumps(message).hex())
            elif store.check([_MESSAGE]):
                message = pickle.loads(bytes.fromhex(store.get(_MESSAGE).decode()))
            left, start = store.add(_LEFT, 1), time.monotonic()
            distributed_c10d._abort_process_group()
            while self.accelerator.is_main_process and left < self.accelerator.num_processes:
                if time.monotonic() > start + _PATIENCE:
                    break
                time.sleep(0.01)
                left = store.add(_LEFT, 0)
        except (RuntimeError, ValueError):  # the store has gone with the first process, which has said why
            message = message or ("process", self.accelerator.process_index, "one whose partners have not ended")
        return message

    def gather(self, rows: list[Any]) -> list[Any]:
        """The lists of all processes, joined in order of rank."""
        return gather_object(rows) if self.several else rows

    def sum(self, value: Tensor) -> Tensor:
        """The sum over processes."""
        return self.accelerator.reduce(value, reduction="sum") if self.several else value

    def mean(self, values: list[Tensor]) -> float:
        """The mean of values over processes, each of which has equally many."""
        mean = torch.stack([torch.as_tensor(v).detach().cpu() for v in values]).mean()
        if not self.several:
            return float(mean)
        return float(self.accelerator.reduce(mean.to(self.accelerator.device), reduction="mean"))

    def any(self, flag: bool) -> bool:
        """Whether a flag is set on any process."""
        return bool(self.sum(torch.tensor(int(flag), device=self.accelerator.device))) if self.several else flag

    def wait(self) -> None:
        """Wait until all processes are here."""
        self.accelerator.wait_for_everyone()


def _store() -> dist.Store:
    return distributed_c10d._get_default_store()


def _abort_when_told(store: dist.Store, done: threading.Event) -> None:
    with contextlib.suppress(RuntimeError):
        while not done.wait(_GLANCE):
            if store.check([_MESSAGE]):
                distributed_c10d._abort_process_group()
                return


@dataclass(frozen=True)
class SharedObjective(Objective):
    """An objective whose scores fail together: a reward that fails on one process ends all.

    Attributes:
        together: The processes. All must score equally often.
        scores: What the rewards gave, one by one, for each call.
    """

    together: Together | None = None
    scores: list[Any] = field(default_factory=list)

    def score(self, backbone: Backbone, prompts: PromptBatch, ids: Tensor, mask: Tensor) -> Tensor:
        """As `Objective.score`."""
        reward = self.together(lambda: Objective.score(self, backbone, prompts, ids, mask))
        self.scores.append(self.reward_model.last)
        return reward
