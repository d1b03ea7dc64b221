"""The requests to a server with OpenAI's API: completions, its models, and new weights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from random import uniform
from typing import Any
from urllib.parse import urlsplit

from headrace.errors import InfrastructureError, UsageError
from headrace.schemas.recipe.resources.engine_settings import OpenaiOptions

PAUSE_S = 0.5
"""Most seconds before the second try. Each further pause is twice as long, up to LAST_PAUSE_S."""
LAST_PAUSE_S = 8.0
BUSY = (408, 425, 429, 500, 502, 503, 504)
"""Statuses of a server that is overloaded, failed or restarts: it is asked again."""
FORBIDDEN = (401, 403)
MOST_BYTES = 64 * 1024 * 1024
"""Size of the largest answer."""
SHOWN = 300
"""Characters of a server's message that are shown."""


class ServerBusy(InfrastructureError):
    """The server is overloaded, failed or restarts."""

    def __init__(self, message: str, after: str) -> None:
        """`after` is its header `Retry-After`. A date counts as if it were absent."""
        super().__init__("engine_failed", message)
        self.after_s = float(after) if after.isascii() and after.isdecimal() else 0.0


class CompletionClient:
    """Asks one server. The number of open connections is bounded by its caller."""

    def __init__(self, options: OpenaiOptions) -> None:
        """Raises UsageError if aiohttp is not installed."""
        try:
            import aiohttp
        except ImportError as error:
            raise UsageError(
                "the engine `openai` needs aiohttp: install headrace with the extra `http`"
            ) from error
        self._aiohttp = aiohttp
        self._options = options
        self._url = options.url.rstrip("/")
        self._session: Any = None

    async def models(self) -> list[dict[str, Any]]:
        """Returns the models that the server lists."""
        found = await self._ask("GET", f"{self._url}/models", None, self._options.timeout_s)
        data = found.get("data")
        return [one for one in data if isinstance(one, dict)] if isinstance(data, list) else []

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to a completion request. If it is cancelled, the request is closed.

        Raises InfrastructureError if the server can't be reached or refuses it.
        """
        return await self._ask("POST", f"{self._url}/completions", body, self._options.timeout_s)

    async def announce(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Posts a new version to `weights_url`. Returns the answer, which comes when it is served.

        Raises InfrastructureError if the version is not served.
        """
        assert self._options.weights_url is not None
        limit_s = self._options.weights_s
        return await self._ask("POST", self._options.weights_url, body, limit_s)

    async def close(self) -> None:
        """Closes all connections."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _ask(
        self, method: str, url: str, body: Mapping[str, Any] | None, limit_s: float
    ) -> dict[str, Any]:
        """Asks until an answer comes, for at most `tries` times and `limit_s` seconds in all.

        If the server wants to be left alone for longer than that, its answer counts at once.
        """
        pause_s, loop = PAUSE_S, asyncio.get_running_loop()
        until = loop.time() + limit_s
        try:
            async with asyncio.timeout(limit_s):
                for left in reversed(range(self._options.tries)):
                    try:
                        return await self._once(method, url, body)
                    except InfrastructureError as error:
                        after_s = error.after_s if isinstance(error, ServerBusy) else 0.0
                        # Not all prompts ask again at the same time.
                        wait_s = max(pause_s * uniform(0.5, 1.0), after_s * uniform(1.0, 1.5))
                        if not left or not error.retryable or loop.time() + wait_s >= until:
                            raise
                    await asyncio.sleep(wait_s)
                    pause_s = min(2 * pause_s, LAST_PAUSE_S)
        except TimeoutError:
            raise InfrastructureError(
                "engine_timeout", f"{url} did not answer within {limit_s:g} s"
            ) from None
        raise AssertionError("there is at least one try")

    def _headers_for(self, url: str) -> dict[str, str]:
        """Returns the token for the server itself: `weights_url` may be somebody else's."""
        same = urlsplit(url)[:2] == urlsplit(self._url)[:2]
        token = self._options.token
        return {"Authorization": f"Bearer {token}"} if token is not None and same else {}

    async def _once(self, method: str, url: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        if self._session is None:
            self._session = self._aiohttp.ClientSession(
                connector=self._aiohttp.TCPConnector(limit=0),
                timeout=self._aiohttp.ClientTimeout(total=None),
            )
        try:
            async with self._session.request(
                method, url, json=body, allow_redirects=False, headers=self._headers_for(url)
            ) as response:
                data = await _read(response, url)
                status, after = response.status, response.headers.get("Retry-After", "")
        except (self._aiohttp.ClientError, OSError) as error:
            raise InfrastructureError(
                "engine_unreachable", f"{url}: {type(error).__name__}: {error}"
            ) from error
        return _parsed(url, status, data, after)


async def _read(response: Any, url: str) -> bytes:
    data = bytearray()
    async for chunk in response.content.iter_chunked(64 * 1024):
        data += chunk
        if len(data) > MOST_BYTES:
            raise InfrastructureError(
                "engine_failed", f"{url} sent more than {MOST_BYTES} bytes", retryable=False
            )
    return bytes(data)


def _parsed(url: str, status: int, data: bytes, after: str) -> dict[str, Any]:
    """Returns the JSON object of an answer. Raises InfrastructureError if it is none."""
    said = data[:SHOWN].decode(errors="replace")
    if status in FORBIDDEN:
        raise InfrastructureError(
            "engine_refused",
            f"{url} answered {status}: check engine.options.token: {said}",
            retryable=False,
        )
    if status in BUSY:
        raise ServerBusy(f"{url} answered {status}: {said}", after)
    if not 200 <= status < 300:
        raise InfrastructureError(
            "engine_failed", f"{url} answered {status}: {said}", retryable=False
        )
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise InfrastructureError(
            "engine_failed", f"{url} did not answer a JSON object: {said}", retryable=False
        )
    return found
