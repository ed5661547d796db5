"""transformers' continuous batching: a completion that ends makes room for the next one within the batch.

The manager of `transformers.generation` runs in a thread of this process, on the policy's own weights (with the adapter
folded in, as for our own sampler) and with a paged cache. All requests wait in its queue before it starts, so that the
batches, and with them the samples of a seed, do not depend on timing.

It drops ``min_new_tokens`` without a word. So the first tokens are sampled with end-of-sequence suppressed, which it
can do, and the others by a second request that continues them.

Left out: sharing of cache blocks between equal prompts (completions are short), switching to flash attention (its
kernels would come from the hub; a policy that was loaded with it keeps it), models with other than full or sliding
attention.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from grade.errors import InputError
from grade.models.samplers.interface import Row, Sampler, Samples, check_lengths, samples_of, seed_of, token_rows

if TYPE_CHECKING:
    from transformers.generation.continuous_batching import ContinuousBatchingManager

    from grade.models.backbone import Backbone
    from grade.models.prompts import PromptBatch

PAGE = 16
"""Tokens of a page of the cache: a completion leaves at most one page of each layer partly empty."""
REQUESTS = 64
"""Requests in a batch. Without flash attention each token of a batch is masked against the whole cache, so the mask
grows with the square of this."""
PREFILL = 1024
"""Tokens in a batch, prompts included."""
LOGGER = "ContinuousBatchingLogger"
"""What transformers calls the manager's logger."""


class ContinuousBatching(Sampler):
    """``model.init_continuous_batching`` of transformers, in this process."""

    name = "transformers"

    @torch.no_grad()
    def sample(  # noqa: D102
        self, backbone: Backbone, prompts: PromptBatch, max_new_tokens: int, generator: torch.Generator,
        min_new_tokens: int = 0,
    ) -> Samples:  # fmt: skip
        check_lengths(backbone, prompts, max_new_tokens, min_new_tokens)
        rows: list[Row] = [([], []) for _ in range(len(prompts))]
        asked = token_rows(prompts)
        parts = ((min_new_tokens, True), (max_new_tokens - min_new_tokens, False))
        with backbone.merged(), _own_random_numbers(backbone.device):
            for length, suppress in parts:
                if length:
                    texts = [prompt + list(ids) for prompt, (ids, _) in zip(asked, rows, strict=True)]
                    new = _generated(backbone, texts, length, seed_of(generator), suppress)
                    rows = [([*a, *c], [*b, *d]) for (a, b), (c, d) in zip(rows, new, strict=True)]
        return samples_of(self.name, rows, backbone, max_new_tokens, min_new_tokens)


def _generated(
    backbone: Backbone, texts: Sequence[list[int]], length: int, seed: int, suppress: bool
) -> list[Row]:  # fmt: skip
    """Tokens and log-probabilities that continue each text; with ``suppress`` none is an end-of-sequence."""
    eos = list(backbone.eos_token_ids)
    generation = GenerationConfig(
        do_sample=True, temperature=backbone.head.temperature, top_k=0, top_p=1.0, max_new_tokens=length,
        eos_token_id=eos if eos and not suppress else -1, suppress_tokens=eos if eos and suppress else None,
    )  # fmt: skip
    batch = min(len(texts), REQUESTS)
    pages = -(-(max(map(len, texts)) + length) // PAGE) + 1
    batching = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=batch * pages, max_batch_tokens=PREFILL, max_requests_per_batch=batch, seed=seed,
        return_logprobs=True, allow_block_sharing=False, auto_switch_to_flash=False, use_async_batching=False,
    )  # fmt: skip
    with _quiet(), _cheap_collections():
        try:
            manager = backbone.model.init_continuous_batching(generation, batching)
        except (ValueError, NotImplementedError) as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError("sampler", "transformers", f"a model that it can run ({reason})") from None
        try:
            return _run(manager, texts, length)
        finally:
            manager.stop(hard_stop=True)  # all requests are done, unless there was an error
            manager.destroy()


def _run(manager: ContinuousBatchingManager, texts: Sequence[list[int]], length: int) -> list[Row]:
    names, rows = manager.add_requests(list(texts), max_new_tokens=length), {}
    manager.start()
    while len(rows) < len(names):
        result = manager.get_result(timeout=1.0)
        if result is None:
            if not manager.is_running():
                raise InputError("sampler", "transformers", "a model that it can run (its thread has ended)")
        elif result.error is not None:
            raise InputError("sampler", "transformers", f"a model that it can run ({result.error})")
        elif result.is_finished():
            rows[result.request_id] = (result.generated_tokens, result.logprobs)
    return [rows[name] for name in names]


@contextlib.contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    """The manager seeds the generators of the whole process; afterwards they go on as if it had not."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the manager's warnings: it does not know whether it can suppress tokens, which it can."""
    logger = logging.getLogger(LOGGER)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _cheap_collections() -> Iterator[None]:
    """The manager collects garbage twice when it stops: 0.4 s if all objects of the process were gone through."""
    if gc.get_freeze_count():  # someone else's
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
