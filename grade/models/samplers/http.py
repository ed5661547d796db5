"""A small client for a JSON protocol over HTTP: bounded time, bounded retries, errors in one line.

Only the standard library. ``http.client`` follows no redirects and asks no proxy, so what is sent goes to the address
that was named. Left out: streaming.
"""

from __future__ import annotations

import http.client
import json
import os
import time
from typing import Any
from urllib.parse import urlsplit

from grade.errors import InputError

BUSY = (429, 502, 503, 504)
"""Statuses of a server that may answer later."""
WAITS = (0.5, 2.0)
"""Seconds before the second and the third attempt, the last one."""
KEY = "VLLM_API_KEY"
"""Environment variable with the key that the server was started with, if it asks for one."""
LARGEST = 2**30
"""Bytes of the largest answer that is read."""


def address_of(text: str) -> str:
    """The address of a server without a slash or ``/v1`` at its end.

    Args:
        text: ``http://host:port`` or ``https://host``, with a path or not.

    Returns:
        The address.

    Raises:
        InputError: If it is none, or holds a user's name and password, which logs and model cards would show.

    >>> address_of("http://127.0.0.1:8000/v1/")
    'http://127.0.0.1:8000'
    """
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        good = good and not (parts.query or parts.fragment or parts.username or parts.password)
        good = good and text.isascii() and not any(c.isspace() or ord(c) < 32 for c in text)
    except ValueError:  # of a port, or of brackets
        good = False
    if not good:
        raise InputError("sampler", text, "own, shared, transformers, or the address of a server: http://host:port")
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"


class Client:
    """Posts JSON to a server.

    Args:
        address: From `address_of`.
        timeout: Seconds to wait for the connection, and for each part of an answer.
        waits: Seconds before each further attempt.
    """

    def __init__(self, address: str, timeout: float, waits: tuple[float, ...] = WAITS) -> None:
        self.address, self.timeout, self.waits = address, timeout, waits

    def post(self, path: str, body: dict[str, Any]) -> str:
        """The answer to a request.

        Repeated where no connection came about or was lost, and where the server is busy; not after a time-out, which
        was the whole time that it had.

        Args:
            path: Below the address.
            body: The request.

        Returns:
            The answer's text.

        Raises:
            InputError: With the address and the last failure: its kind, or the status and the beginning of the answer.
        """
        for wait in (*self.waits, None):
            status, text = self._attempt(path, json.dumps(body).encode())
            if status == 200:
                return text
            if wait is None or (status is not None and status not in BUSY):
                failure = text if status is None else f"status {status}: {text}"
                raise InputError(f"sampler: POST {self.address}{path}", failure[:300], "an answer with status 200")
            time.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, path: str, body: bytes) -> tuple[int | None, str]:
        """Status and text of an answer; None and the reason where there was none that another attempt may change."""
        parts = urlsplit(self.address)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=self.timeout)
        headers = {"Content-Type": "application/json"}
        if os.environ.get(KEY):
            headers["Authorization"] = f"Bearer {os.environ[KEY]}"
        try:
            connection.request("POST", parts.path + path, body, headers)
            answer = connection.getresponse()
            content = answer.read(LARGEST + 1)
            if len(content) > LARGEST:
                raise InputError(
                    f"sampler: POST {self.address}{path}", f"more than {LARGEST} bytes", "a shorter answer"
                )
            return answer.status, content.decode("utf-8", "replace")
        except TimeoutError:
            raise InputError(
                f"sampler: POST {self.address}{path}", f"no answer for {self.timeout:g} s",
                "an answer within sampler_timeout",
            ) from None  # fmt: skip
        except (OSError, http.client.HTTPException) as error:
            return None, f"{type(error).__name__}: {error}"
        finally:
            connection.close()
