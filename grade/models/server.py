"""A server that speaks the OpenAI completions protocol with token ids, as vLLM's does.

Prompts go out as token ids and tokens come back as ids, each with its log-probability (``return_token_ids``,
``logprobs``). An adapter is loaded from a folder that the server can read, under a new name
(``/v1/load_lora_adapter``). Start vLLM so that it allows this:

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve <base> --enable-lora --max-lora-rank <r> \
        --logprobs-mode processed_logprobs --generation-config vllm

By default vLLM reports log-probabilities before temperature and minimum length, which are another distribution's.

Every sampling parameter is sent, since a server may have other defaults. ``ignore_eos`` with the policy's own
``stop_token_ids`` makes the ends ours. A server gives all prompts of one request the same seed, and the n completions
of a prompt seeds that it counts up; so a request has one prompt.

Left out: streaming, and whole weights instead of an adapter. httpx's own retries are for connections only, so a busy
server is asked again here.
"""

from __future__ import annotations

import os
import re
import ssl
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import BaseModel, FiniteFloat, StrictInt, ValidationError

from grade.errors import InputError

BUSY = (429, 502, 503, 504)
"""Statuses of a server that may answer later."""
WAITS = (0.5, 2.0)
"""Seconds before the second and the third attempt, the last one."""
KEY = "VLLM_API_KEY"
"""Environment variable with the key that the server was started with, if it asks for one."""
CONNECTIONS = 64
"""Requests under way at the same time; the server batches them."""
NEUTRAL = {
    "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
    "frequency_penalty": 0.0, "ignore_eos": True, "logprobs": 1, "return_token_ids": True,
    "return_tokens_as_token_ids": True, "skip_special_tokens": False, "add_special_tokens": False, "stream": False,
}  # fmt: skip
"""Parameters of every request: the policy itself, unchanged, and tokens instead of text."""

Row = tuple[list[int], list[float]]
"""A completion's tokens and their log-probabilities."""


class _Logprobs(BaseModel):
    token_logprobs: list[FiniteFloat]
    tokens: list[str] | None = None


class _Choice(BaseModel):
    index: int
    logprobs: _Logprobs
    token_ids: list[StrictInt] | None = None
    prompt_token_ids: list[int] | None = None


class _Answer(BaseModel):
    choices: list[_Choice]


def _address_of(text: str) -> str:
    """The address of a server without a slash or ``/v1`` at its end; one with a password is refused, as logs show it.

    >>> _address_of("http://127.0.0.1:8000/v1/")
    'http://127.0.0.1:8000'
    """
    try:
        url = urlsplit(text)  # stricter than httpx.URL about ports and brackets
        valid = url.scheme in ("http", "https") and url.hostname and url.port != 0 and "@" not in url.netloc
        valid = valid and not (url.query or url.fragment) and text.isascii() and " " not in text and text.isprintable()
    except ValueError:
        valid = False
    if not valid:
        raise InputError("sampler", text, "own, shared, or the address of a server: http://host:port")
    return text.rstrip("?#").rstrip("/").removesuffix("/v1")


class CompletionsServer:
    """Loads adapters into a server at ``http://host:port`` and asks it for completions.

    ``timeout`` is in seconds, for a connection and for each part of an answer; ``waits`` are the seconds before each
    further attempt, where the server is busy or the connection fails.
    """

    def __init__(self, address: str, timeout: float = 600.0, waits: tuple[float, ...] = WAITS) -> None:
        self.address, self.timeout, self.waits = _address_of(address), timeout, waits

    @cached_property
    def _client(self) -> httpx.Client:
        # A transport of its own: no proxy of the environment, and no connection outlives its answer.
        limits = httpx.Limits(max_keepalive_connections=0)
        transport = httpx.HTTPTransport(verify=ssl.create_default_context(), limits=limits)
        return httpx.Client(transport=transport, timeout=self.timeout)

    def post(self, path: str, body: dict[str, Any]) -> str:
        """The text of an answer with status 200. After a time-out, which was all the time there is, nobody asks again.

        Raises:
            InputError: With the address and the last failure: its kind, or the status and the beginning of the answer.
        """
        field, key = f"sampler: POST {self.address}{path}", os.environ.get(KEY)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        for wait in (*self.waits, None):
            try:
                answer = self._client.post(self.address + path, json=body, headers=headers)
                if answer.status_code == 200:
                    return answer.text
                failure, again = f"status {answer.status_code}: {answer.text}", answer.status_code in BUSY
            except httpx.TimeoutException:
                failure, allowed = f"no answer for {self.timeout:g} s", "an answer within sampler_timeout"
                raise InputError(field, failure, allowed) from None
            except httpx.RequestError as error:
                failure, again = f"{type(error).__name__}: {error}", True
            if wait is None or not again:
                break
            time.sleep(wait)
        raise InputError(field, failure[:300], "an answer with status 200")

    def load(self, name: str, folder: str) -> None:
        """Load an adapter under a name."""
        try:
            self.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        except InputError as error:
            needs = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora, and sampler_folder that it can read"
            raise InputError(error.field, error.value, f"{error.allowed}: vLLM needs {needs}") from None

    def unload(self, name: str) -> None:
        """Unload an adapter."""
        self.post("/v1/unload_lora_adapter", {"lora_name": name})

    def complete(self, requests: list[dict[str, Any]]) -> list[Row]:
        """The ``n`` completions of each request in turn: ``prompt``, ``n``, ``seed`` and what is not neutral."""
        pool = ThreadPoolExecutor(min(len(requests), CONNECTIONS))
        try:
            return [row for rows in pool.map(self._complete, requests) for row in rows]
        finally:
            pool.shutdown(cancel_futures=True)

    def _complete(self, request: dict[str, Any]) -> list[Row]:
        text, n, field = self.post("/v1/completions", NEUTRAL | request), request["n"], f"sampler {self.address}"
        try:
            choices = sorted(_Answer.model_validate_json(text).choices, key=lambda choice: choice.index)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            allowed = f"{n} choices, each with token ids (vLLM >= 0.10.2) and log-probabilities ({reason})"
            raise InputError(field, first["input"], allowed) from None
        if [choice.index for choice in choices] != list(range(n)):
            raise InputError(field, f"{len(choices)} choices", f"{n} choices with indices 0 to {n - 1}")
        rows = []
        for choice in choices:
            if choice.prompt_token_ids not in (None, request["prompt"]):
                allowed = "the prompt's tokens as they were sent"
                raise InputError(field, f"prompt_token_ids {choice.prompt_token_ids}", allowed)
            ids = choice.token_ids
            if ids is None:  # written "token_id:5" beside the log-probabilities
                written = [re.fullmatch(r"token_id:(\d+)", token) for token in choice.logprobs.tokens or [""]]
                if not all(written):
                    allowed = "a server with return_token_ids, as vLLM >= 0.10.2 has"
                    raise InputError(field, "text without token ids", allowed)
                ids = [int(number[1]) for number in written]
            rows.append((ids, choice.logprobs.token_logprobs))
        return rows
