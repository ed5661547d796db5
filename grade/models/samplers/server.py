"""A server that speaks the OpenAI completions protocol with token ids, as vLLM's does.

Prompts go out as token ids and tokens come back as ids, each with its log-probability (``return_token_ids``,
``logprobs``). Before the samples of a step the adapter is saved to a folder that the server can read, loaded there
under a new name (``/v1/load_lora_adapter``), and the one before it is unloaded. Start vLLM so that it allows this:

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve <base> --enable-lora --max-lora-rank <r> \
        --logprobs-mode processed_logprobs --generation-config vllm

By default vLLM reports log-probabilities before temperature and minimum length, which are another distribution's.

Every sampling parameter is sent, since a server may have other defaults. ``ignore_eos`` with the policy's own
``stop_token_ids`` makes the ends ours. A server gives all prompts of one request the same seed, and the n completions
of a prompt seeds that it counts up; so a request has one prompt.

Left out: streaming, and whole weights instead of an adapter.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from grade.errors import InputError
from grade.models.samplers.http import Client, address_of
from grade.models.samplers.interface import Row, Sampler, Samples, check_lengths, samples_of, seed_of, token_rows

if TYPE_CHECKING:
    from grade.models.backbone import Backbone
    from grade.models.prompts import PromptBatch

COMPLETIONS = 128
"""Most completions of a prompt in one request."""
CONNECTIONS = 64
"""Requests under way at the same time; the server makes its batches of them."""
NEUTRAL = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "ignore_eos": True, "logprobs": 1, "return_token_ids": True,
    "return_tokens_as_token_ids": True, "skip_special_tokens": False, "add_special_tokens": False, "stream": False,
}  # fmt: skip
"""Parameters of every request: the policy itself, unchanged, and tokens instead of text."""


class CompletionsServer(Sampler):
    """A server's completions.

    Args:
        address: ``http://host:port``.
        timeout: Seconds to wait for an answer.
        folder: Folder for adapters that the server can read under the same path; None: a temporary one.

    Raises:
        InputError: If the address is none.
    """

    def __init__(self, address: str, timeout: float = 600.0, folder: str | Path | None = None) -> None:
        self.name = address_of(address)
        self.client = Client(self.name, timeout)
        self.folder = None if folder is None else Path(folder).absolute()
        self.model: str | None = None
        self._loaded: tuple[str, Path] | None = None

    def publish(self, backbone: Backbone) -> str:
        """Save the adapter, have it loaded under a new name, and unload the one before.

        Args:
            backbone: The policy.

        Returns:
            The name.

        Raises:
            InputError: If the folder cannot be written, or the server does not load the adapter.
        """
        # A name of its own each time: a server may keep what it has loaded under a name, or an earlier run its own.
        name, before = f"grade-{secrets.token_hex(8)}", self._loaded
        try:
            if self.folder is not None:
                self.folder.mkdir(parents=True, exist_ok=True)
            place = Path(tempfile.mkdtemp(prefix="grade-adapter-", dir=self.folder))
            place.chmod(0o755)  # the server may be another user's
            backbone.save_adapter(place)
        except OSError as error:
            raise InputError("sampler_folder", str(self.folder), f"a folder to write to ({error.strerror})") from None
        self._loaded = (name, place)
        try:
            self.client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(place)})
        except InputError as error:
            self._loaded = before
            shutil.rmtree(place, ignore_errors=True)
            needs = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora, and sampler_folder that it can read"
            raise InputError(error.field, error.value, f"{error.allowed}: vLLM needs {needs}") from None
        if before is not None:
            self._unload(*before)
        self.use(name)
        return name

    def use(self, published: str) -> None:  # noqa: D102
        self.model = published

    def close(self) -> None:
        """Unload the adapter and remove its folder; a server that is gone is no error."""
        if self._loaded is not None:
            self._unload(*self._loaded)
            self._loaded = None

    def _unload(self, name: str, place: Path) -> None:
        shutil.rmtree(place, ignore_errors=True)
        with suppress(InputError):  # of a server that was started again meanwhile, or has gone: nothing is left to do
            self.client.post("/v1/unload_lora_adapter", {"lora_name": name})

    def sample(  # noqa: D102
        self, backbone: Backbone, prompts: PromptBatch, max_new_tokens: int, generator: torch.Generator,
        min_new_tokens: int = 0,
    ) -> Samples:  # fmt: skip
        check_lengths(backbone, prompts, max_new_tokens, min_new_tokens)
        settings = NEUTRAL | {
            "max_tokens": max_new_tokens, "min_tokens": min_new_tokens, "temperature": backbone.head.temperature,
            "stop_token_ids": list(backbone.eos_token_ids),
        }  # fmt: skip
        if self.model is not None:
            settings["model"] = self.model
        requests = [
            {"prompt": prompt, "n": n, "seed": seed_of(generator)} | settings
            for prompt, n in _runs(token_rows(prompts))
        ]
        pool = ThreadPoolExecutor(min(len(requests), CONNECTIONS))
        try:
            answers = list(pool.map(self._completions, requests))
        finally:
            pool.shutdown(cancel_futures=True)
        rows = [row for answer in answers for row in answer]
        return samples_of(self.name, rows, backbone, max_new_tokens, min_new_tokens)

    def _completions(self, request: dict[str, Any]) -> list[Row]:
        refuse = partial(InputError, f"sampler {self.name}")
        text = self.client.post("/v1/completions", request)
        try:
            answer = json.loads(text)
        except ValueError:
            raise refuse(text[:100], "an answer in JSON") from None
        choices = answer.get("choices") if isinstance(answer, dict) else None
        n = request["n"]
        if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
            raise refuse(text[:100], f"an object with {n} choices")
        if sorted((choice.get("index") for choice in choices), key=str) != sorted(range(n), key=str):
            raise refuse(f"{len(choices)} choices", f"{n} choices with indices 0 to {n - 1}")
        rows = []
        for choice in sorted(choices, key=lambda choice: choice["index"]):
            if choice.get("prompt_token_ids", request["prompt"]) not in (None, request["prompt"]):
                raise refuse(f"prompt_token_ids {choice['prompt_token_ids']}", "the prompt's tokens as they were sent")
            scores = choice.get("logprobs")
            scores = scores if isinstance(scores, dict) else {}
            ids, logps = _ids(choice.get("token_ids"), scores.get("tokens")), scores.get("token_logprobs")
            if ids is None:
                raise refuse("text without token ids", "a server with return_token_ids, as vLLM >= 0.10.2 has")
            if not isinstance(logps, list):
                raise refuse("no log-probabilities", "a server that gives token_logprobs")
            rows.append((ids, logps))
        return rows


def _runs(rows: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    """Equal prompts in a row as one, with their number, at most `COMPLETIONS`."""
    runs = []
    for prompt, equal in groupby(rows):
        left = len(list(equal))
        while left:
            runs.append((prompt, min(left, COMPLETIONS)))
            left -= runs[-1][1]
    return runs


def _ids(token_ids: Any, tokens: Any) -> list[Any] | None:
    """Token ids of a completion: as such, or written ``token_id:5`` beside the log-probabilities; None without them."""
    if isinstance(token_ids, list):
        return token_ids
    if not isinstance(tokens, list):
        return None
    written = [re.fullmatch(r"token_id:(\d+)", str(token)) for token in tokens]
    return [int(number[1]) for number in written] if all(written) else None
