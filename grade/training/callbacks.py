"""Callbacks of every run: seconds of a step, evaluation at the end, stopping on a signal, lines for a log."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from grade.training.trainer import GradeTrainer


class StepEnd(TrainerCallback):
    """Counts a step's seconds, adjusts beta, and asks for a row of the log and an evaluation after the last one."""

    def __init__(self, trainer: GradeTrainer) -> None:
        self.trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: D102
        self.trainer.step_ended()
        self.trainer.adjust_beta()
        last = state.global_step >= state.max_steps
        control.should_evaluate = control.should_evaluate or (last and args.eval_on_end)
        # An evaluation without the step's own row would have no samples and seconds beside it.
        control.should_log = control.should_log or last or control.should_evaluate


class StopOnSignal(TrainerCallback):
    """SIGTERM or SIGINT: finish the step, write a checkpoint, stop. A second SIGINT stops at once.

    Attributes:
        received: The signal, or None.
    """

    def __init__(self, trainer: GradeTrainer) -> None:
        self.trainer, self.received = trainer, None
        self._before: dict[int, Any] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: D102
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no handlers
            self._before = {number: signal.signal(number, self._on) for number in (signal.SIGTERM, signal.SIGINT)}

    def _on(self, number: int, frame: Any) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: D102
        # Processes hear of it at different times; all must stop after the same step.
        if self.trainer.together.any(self.received is not None):
            self.received = self.received or signal.SIGTERM
            control.should_training_stop = True
            control.should_save = args.save_strategy != "no"

    def restore(self) -> None:
        """Put the handlers back that were there before training."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Lines(TrainerCallback):
    """One line for every row of the log, where there is no progress bar.

    Args:
        write: Receives the lines.
        line: Makes one from the Trainer's state and the row; empty for none.
    """

    def __init__(self, write: Callable[[str], None], line: Callable[[Any, dict[str, Any]], str]) -> None:
        self.write, self.line = write, line

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:  # noqa: D102
        if state.is_world_process_zero and (line := self.line(state, logs or {})):
            self.write(line)
