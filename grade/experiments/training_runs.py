"""Many training runs side by side: what the experiments that train by the dozen share.

Every run is `grade.training.run.run_training` with the same prompts and evaluation. A seed decides the adapter, the
order of the prompts and the noise.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from grade.data.reviews import load_reviews, prompt_text

if TYPE_CHECKING:
    from grade.rewards.gold import GoldJudge
    from grade.training.run import RunResult

FIXED: dict[str, Any] = {
    "lr_scheduler_type": "constant", "eval_strategy": "steps", "truncation": "right", "raw_prompts": True,
    "use_cpu": True,
}  # fmt: skip
"""Settings of all runs: prompts are beginnings of reviews, cut to their length; one process of the CPU."""

SETTINGS: dict[str, dict[str, Any]] = {
    "ste": {"hops": 1, "tau_start": 2.0, "tau_end": 2.0},
    "gumbel": {"hops": 0, "tau_start": 0.5, "tau_end": 0.5},
    "gumbel_rao": {"hops": 1, "tau_start": 2.0, "tau_end": 2.0},
    "reinmax": {"hops": 1, "tau_start": 2.0, "tau_end": 2.0},
    "rloo": {"num_generations": 4},
    "grpo": {"num_generations": 4, "scale_rewards": "group"},
    "distilled": {"num_generations": 4},
}
"""Settings of a method beside the shared ones: tau and hops as in Experiment 6, groups of 4, grpo as published."""

SEARCH_PROMPTS = 512
"""Training prompts that no run trains on; the learning rates are chosen on them."""

Job, Item, Result = TypeVar("Job"), TypeVar("Item"), TypeVar("Result")


def review_prompts(reviews_dir: str, on_search_prompts: bool = False) -> tuple[list[str], list[str]]:
    """Prompts of training and of evaluation.

    Args:
        reviews_dir: Folder of the review splits.
        on_search_prompts: Evaluate on training prompts that are held out for it, instead of the validation split.
    """
    train, validation = ([prompt_text(r.text) for r in load_reviews(reviews_dir, s)] for s in ("policy", "validation"))
    train, search = hold_out(train)
    return train, search if on_search_prompts else validation


def hold_out(prompts: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Prompts to train on, and the last `SEARCH_PROMPTS` (half, if there are few) to choose learning rates on."""
    held_out = min(SEARCH_PROMPTS, len(prompts) // 2)
    return list(prompts[:-held_out]), list(prompts[-held_out:])


def judged_by(judge: GoldJudge) -> Callable[..., list[float]]:
    """The gold judge as a function of text with TRL's signature: P(positive) of prompt and completion."""

    def gold(prompts: Sequence[str], completions: Sequence[str], **_: Any) -> list[float]:
        return judge.score([p + c for p, c in zip(prompts, completions, strict=True)]).tolist()

    return gold


def evaluations(result: RunResult, length: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The evaluations along a run.

    Args:
        result: The run's results.
        length: T, the length of every completion.

    Yields:
        Step, samples, seconds (of training alone), reward, gold (NaN without a judge) and KL (in nats a completion);
        and the row of the history that they are of.
    """
    for row in result.history:
        if row.get("val/reward_mean") is not None:
            figures = {key: row[key] for key in ("step", "samples", "seconds")}
            figures |= {"reward": row["val/reward_mean"], "gold": row.get("val/gold_mean", math.nan)}
            yield figures | {"kl": row["val/kl"] * length}, row


_work: Callable[[Any], Any] | None = None


def _start_worker(work: Callable[[Any], Any]) -> None:
    global _work
    torch.set_num_threads(1)
    _work = work


def _do(item: Any) -> Any:
    return _work(item)


def in_workers(
    work: Callable[[Job, Item], Result], shared: Job, items: Sequence[Item], processes: int
) -> Iterator[tuple[int, Result]]:
    """Do something with every item in worker processes of one thread each, which get what they share once.

    Args:
        work: A function of a module, of what is shared and an item.
        shared: Sent to each process once.
        items: What to go through.
        processes: Worker processes; 1: this process, with its threads.

    Yields:
        Number of the item and its result, as they are finished. What is not begun when the caller stops is dropped.
    """
    if processes == 1:
        yield from ((number, work(shared, item)) for number, item in enumerate(items))
        return
    # Not a fork: torch's threads do not survive one.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _start_worker, (partial(work, shared),))
    try:
        numbers = {pool.submit(_do, item): number for number, item in enumerate(items)}
        for future in as_completed(numbers):
            yield numbers[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)
