"""A server of the OpenAI protocol that is asked over HTTP.

One client for samples (`grade.models.samplers`) and for a teacher (`grade.models.served`).
httpx's own retries are for connections only, so a busy server is asked again here.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Annotated, Any, TypeVar

import httpx
from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from grade.errors import InputError
from grade.models.background import wait_for

CONNECTIONS = 64
"""Most requests under way at the same time."""
MOST_BYTES = 2**28
"""Of an answer."""
SINGLE = ("identity", "gzip", "deflate")
"""Codings of an answer, which expand a part a thousand times at most; two on top of each other fill any memory."""
SAID = 400
"""Characters of an error that are shown."""
BUSY = (429, 502, 503, 504)
"""Statuses of a server that may answer later."""
KEY = "VLLM_API_KEY"
"""Environment variable with the key that the server was started with, if it asks for one."""

Logprob = Annotated[FiniteFloat, Field(ge=-1e9, le=1)]
"""A log-probability in nats as a server may write it: rounding may put it above 0."""
Model = TypeVar("Model", bound=BaseModel)
T, R = TypeVar("T"), TypeVar("R")


def address_of(field: str, text: str, others: str = "") -> str:
    """The address of a server without a slash or ``/v1`` at its end; one with a password is refused, as logs show it.

    >>> address_of("sampler", "http://127.0.0.1:8000/v1/")
    'http://127.0.0.1:8000'
    """
    match = re.fullmatch(r"https?://([\w.-]+|\[[\da-fA-F:.]+\])(:(\d{1,5}))?(/[\w./~%-]*)?", text, re.ASCII)
    if not match or not 0 < int(match[3] or 1) < 2**16:
        raise InputError(field, text, f"{others}the address of a server: http://host:port")
    return text.rstrip("/").removesuffix("/v1")


def is_address(name: object) -> bool:
    """Whether a name means a server, well formed or not."""
    return isinstance(name, str) and name.startswith(("http://", "https://"))


class Server:
    """What is asked at an address, up to three times; ``field`` is the setting, ``others`` what else it may be."""

    waits = (0.5, 2.0)
    """Seconds before the second and the third attempt, the last one."""

    def __init__(self, field: str, address: str, timeout: float = 600.0, others: str = "") -> None:
        self.field, self.name, self.timeout = field, address_of(field, address, others), timeout

    @cached_property
    def _client(self) -> httpx.AsyncClient:
        # No proxy of the environment, no connection outlives its answer, and no coding because a package is installed.
        return httpx.AsyncClient(
            verify=ssl.create_default_context(), limits=httpx.Limits(max_keepalive_connections=0), timeout=None,
            trust_env=False, headers={"Accept-Encoding": ", ".join(SINGLE)},
        )  # fmt: skip

    async def _answer(self, path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> tuple[int, str]:
        """Status and content."""
        content, method = bytearray(), "GET" if body is None else "POST"
        async with self._client.stream(method, self.name + path, json=body, headers=headers) as answer:
            coding = answer.headers.get("Content-Encoding", "identity")
            if coding.lower() not in SINGLE:
                raise ValueError(f"Content-Encoding {coding}, not {', '.join(SINGLE)}")
            async for part in answer.aiter_bytes():
                content += part
                if len(content) > MOST_BYTES:
                    raise ValueError(f"more than {MOST_BYTES >> 20} MiB")
        return answer.status_code, content.decode(errors="replace")

    async def ask(
        self, path: str, body: dict[str, Any] | None, needs: str = "an answer with status 200",
        absent: tuple[int, ...] = (),
    ) -> str | None:  # fmt: skip
        """The text of an answer with status 200, None for one that is ``absent``; GET where there is no ``body``.

        The time limit is for all attempts together: httpx's own limits are for each part of an answer. `InputError` has
        the address and the last failure before it, if there was one: its kind, or the status and the beginning of the
        answer. That stands last, where it is not shortened: vLLM's reason comes late in it.
        """
        field, key = f"{self.field}: {'GET' if body is None else 'POST'} {self.name}{path}", os.environ.get(KEY)
        if not re.fullmatch("[!-~]*", key or ""):  # httpx's own error would show it
            raise InputError(KEY, "another character", "ASCII without spaces and line ends")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        failure, allowed = f"no answer for {self.timeout:g} s", "an answer within sampler_timeout"
        with suppress(TimeoutError):
            async with asyncio.timeout(self.timeout):
                for wait in (0.0, *self.waits):
                    await asyncio.sleep(wait)
                    try:
                        status, content = await self._answer(path, body, headers)
                        if status == 200 or status in absent:
                            return content if status == 200 else None
                        failure, allowed = f"status {status}", f"{needs}; the server said: {content[:SAID]}"
                        if status not in BUSY:
                            break
                    except Exception as error:  # httpx alone has three families
                        failure, allowed = f"{type(error).__name__}: {error}".removesuffix(": "), needs
        raise InputError(field, failure, allowed)

    def post(self, *request: Any) -> str | None:
        """What `ask` gives."""
        return wait_for(self.ask(*request))

    def parsed(self, kind: type[Model], content: str, needs: str) -> Model:
        """An answer read as its kind; `InputError` has the first place where it is not one."""
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise InputError(f"{self.field} {self.name}", first["input"], f"{needs} ({reason})") from None

    def require(self, *rules: tuple[bool, object, str]) -> None:
        """Refuse an answer by the first rule that does not hold: whether it does, what was said, what is allowed."""
        for holds, value, allowed in rules:
            if not holds:
                raise InputError(f"{self.field} {self.name}", value, allowed)

    def each(self, ask: Callable[[T], Awaitable[R]], requests: Sequence[T]) -> list[R]:
        """What each request gives, in order; many are under way at the same time, and the first error ends all."""

        async def one(request: T, free: asyncio.Semaphore) -> R:
            async with free:
                return await ask(request)

        async def every() -> list[R]:
            free = asyncio.Semaphore(CONNECTIONS)
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(request, free)) for request in requests]
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            return [task.result() for task in tasks]

        return wait_for(every())
