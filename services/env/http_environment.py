"""An environment that is an HTTP server in any language; docs/environments.md has the protocol.

The server keeps each episode under its name, with the index of its last action and the answer to
it. It answers a repeated action again without repeating it. So the worker may ask again for an
answer that was lost, another worker can go on with the episode, and no action is done twice.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from random import uniform
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from headrace.errors import EnvironmentFailed, InfrastructureError, UsageError
from headrace.schemas.problems import problems_of
from headrace.services.base.redactor import REDACTOR
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.environment import AskingAgain
from headrace.services.env.optional_imports import importing

logger = logging.getLogger(__name__)

T = TypeVar("T")

PROTOCOL = 1
"""Version of the protocol, sent with each reset."""
PAUSES_S = (0.1, 0.5)
"""Seconds before the second and the third try of a call whose connection was lost."""
LOST = (409, 410)
"""Statuses of an episode that isn't open, or isn't at the action before this one."""
BUSY = (408, 425, 429, 502, 503, 504)
"""Statuses of a server that is overloaded or restarts: it is asked again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 8.0
"""Seconds until a busy server is asked again. They double from the first to the longest."""


class Busy(InfrastructureError):
    """The server has no room now, or is not there."""

    def __init__(self, message: str, after_s: float = 0.0, code: str = "server_busy") -> None:
        """`after_s` is how many seconds it wants to be left alone."""
        super().__init__(code, message)
        self.after_s = after_s


class Room:
    """Asks a server until it has room."""

    def __init__(self, timeout_s: float) -> None:
        """A busy server is asked for so many seconds."""
        self._timeout_s = timeout_s
        self.busy: Busy | None = None
        """Why it was asked again, if it was, and has not answered since."""

    async def until_free(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call until the server has room. Raises the last Busy if it has none in time."""
        loop = asyncio.get_running_loop()
        until, pause_s, self.busy = loop.time() + self._timeout_s, FIRST_PAUSE_S, None
        while True:
            try:
                answer = await call()
            except Busy as busy:
                self.busy, after_s, left_s = busy, busy.after_s, until - loop.time()
                if left_s < FIRST_PAUSE_S:
                    raise
            else:
                self.busy = None
                return answer
            # Not all episodes ask at the same time, and each asks once more at the end.
            wait_s = max(pause_s * uniform(0.5, 1.0), after_s * uniform(1.0, 1.5))
            await asyncio.sleep(min(wait_s, left_s))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class Answer(BaseModel):
    """What a server answers to a reset or a step. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    text: str
    data: dict[str, JsonValue] = {}
    reward: float | None = None
    rewards: dict[str, float] = {}
    terminated: bool = False
    truncated: bool = False


class HttpEnvironment(AskingAgain):
    """An episode that an HTTP server keeps under its name. It is Resumable."""

    replayable = False
    recipe_only = frozenset({"url", "timeout_s", "answer_kb", "idle_s", "token"})

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        answer_kb: int = 1024,
        idle_s: int = 3600,
        token: str | None = None,
    ) -> None:
        """Raises UsageError if the URL is not http(s).

        Options:
            url: The server's address, such as `http://127.0.0.1:8000`.
            options: The server gets them with each reset.
            timeout_s: Seconds in which a call must be answered, and for which a server that is busy
                or not there is asked again.
            answer_kb: Maximum size of an answer.
            idle_s: Seconds without a call after which the server may forget an episode.
            token: A bearer token that is sent with each call, as a reference to a secret. Absent:
                none is sent.
        """
        self._aiohttp = import_aiohttp("http")
        self._url = url.rstrip("/")
        if not self._url.startswith(("http://", "https://")):
            raise UsageError(f"url {url!r}: give the server's address, as http://127.0.0.1:8000")
        self._options = dict(options or {})
        self._timeout_s = timeout_s
        self._room = Room(timeout_s)
        self._most_bytes = answer_kb * 1024
        self._idle_s = idle_s
        self._headers = {"Accept-Encoding": "identity", **authorization(token)}
        self._name = ""
        self._open: str | None = None
        """Name of the episode that the server keeps for this environment, as far as we know."""
        self._index = 0
        self._session: Any = None

    @property
    def busy(self) -> InfrastructureError | None:
        """Why the last call did not get an answer, if it was asked again."""
        return self._room.busy

    def set_name(self, name: str) -> None:
        """Take the attempt's name, which names the episode at the server."""
        self._name = name

    async def reset(self, task: TaskView) -> Observation:
        """Start the episode. The server drops what it has under that name."""
        if self._open not in (None, self._name):
            await self._end()
        self._open, self._index = self._name, 0
        about = {"number": task.number, "sample": task.sample, "seed": task.seed}
        given = {"payload": dict(task.payload), "options": self._options}
        content = {"protocol": PROTOCOL, "idle_s": self._idle_s, "task": {**about, **given}}
        return await self._call("reset", content)

    async def resume(self, task: TaskView, done: int) -> None:
        """Go on after action `done`. The next step shows whether the server has the episode."""
        self._open, self._index = self._name, done

    async def step(self, action: str) -> Observation:
        """Send the action. The server carries it out once, however often it is sent."""
        self._index += 1
        return await self._call("step", {"action": action})

    async def release(self) -> None:
        """Close the connection; the server keeps the episode."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def aclose(self) -> None:
        """Close the episode at the server, then the connection."""
        try:
            if self._open is not None:
                await self._end()
        finally:
            await self.release()

    async def _end(self) -> None:
        """Close the episode at the server. If that fails, the server forgets it after `idle_s`."""
        name, self._open = self._open, None
        try:
            await self._post("close", {"episode": name})
        except (EnvironmentFailed, InfrastructureError, UsageError) as error:
            logger.warning("episode %s was not closed; it ends after idle_s: %s", name, error)

    async def _call(self, verb: str, content: Mapping[str, Any]) -> Observation:
        body = {"episode": self._open, "index": self._index, **content}
        answer = await self._post(verb, body)
        try:
            return Observation(**Answer.model_validate_json(answer).model_dump())
        except ValidationError as error:
            raise bad_answer(error, f"{self._url}/{verb}") from error

    async def _post(self, verb: str, body: Mapping[str, Any]) -> bytes:
        """Return the bytes of an answer. If the server is busy, or it is lost, ask again."""
        url = f"{self._url}/{verb}"

        async def asked() -> bytes:
            async with answering_within(self._timeout_s, url):
                return await retried(url, lambda: self._try(url, body))

        return await self._room.until_free(asked)

    async def _try(self, url: str, body: Mapping[str, Any]) -> bytes:
        if self._session is None:
            # An episode sends one request at a time. A compressed answer could exceed any limit.
            self._session = self._aiohttp.ClientSession(
                connector=self._aiohttp.TCPConnector(limit=1),
                headers=self._headers,
                timeout=self._aiohttp.ClientTimeout(total=None),  # its own limit is 300 s
                auto_decompress=False,
            )
        async with self._session.post(url, json=body, allow_redirects=False) as response:
            chunks, size = [], 0
            async for chunk in response.content.iter_any():
                chunks.append(chunk)
                size += len(chunk)
                if size > self._most_bytes:
                    message = f"{url} answered with more than {self._most_bytes // 1024} KiB"
                    raise EnvironmentFailed("answer_too_large", f"{message}; raise answer_kb")
            content = b"".join(chunks)
            if response.status != 200:
                raise refusal(response.status, response.headers, content, url)
            return content


def bad_answer(error: ValidationError, url: str) -> EnvironmentFailed:
    """Make the exception that names the first problem of a server's answer."""
    problem = problems_of(error, "the body")[0]
    return EnvironmentFailed("bad_answer", f"the answer of {url} is not an observation: {problem}")


def refusal(status: int, headers: Mapping[str, str] | None, content: bytes, url: str) -> Exception:
    """Make the exception for a server's answer with a status other than 200."""
    # A server may repeat the token, and half a token would not be recognized as a secret.
    text = REDACTOR.text(content.decode(errors="replace").strip(), 500)
    message = f"{url} answered {status}: {text}"
    if status in LOST:
        return InfrastructureError("sandbox_lost", message)
    if status in BUSY:
        after = (headers or {}).get("Retry-After", "")  # it may also be a date
        return Busy(message, float(after) if after.isascii() and after.isdecimal() else 0.0)
    if status >= 500:
        return EnvironmentFailed("server_error", message)
    return UsageError(f"{message}. Check the environment's url and options in the recipe")


@asynccontextmanager
async def answering_within(timeout_s: float, server: str) -> AsyncIterator[None]:
    """Raise InfrastructureError `server_silent` if the code inside takes longer than this."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        message = f"{server} did not answer within {timeout_s:g} s"
        raise InfrastructureError("server_silent", message) from error


async def retried(url: str, call: Callable[[], Awaitable[T]]) -> T:
    """Call until the connection holds, three times at most.

    Raises Busy if nothing listens there, InfrastructureError `server_unreachable` if the connection
    is lost each time, or UsageError if `url` is not a URL.
    """
    aiohttp = import_aiohttp("http")
    for pause_s in (*PAUSES_S, None):
        try:
            return await call()
        except aiohttp.InvalidURL as error:
            raise UsageError(f"{url!r} is not a URL; correct the environment's `url`") from error
        except (aiohttp.ClientError, OSError) as error:
            message = f"{url}: {type(error).__name__}: {error}"
            if isinstance(error, aiohttp.ClientConnectorError):  # maybe it restarts
                raise Busy(message, code="server_unreachable") from error
            if pause_s is None:
                raise InfrastructureError("server_unreachable", message) from error
        await asyncio.sleep(pause_s)
    raise AssertionError("the last try returns or raises")


def authorization(token: str | None) -> dict[str, str]:
    """Return the header with a bearer token, or none without a token."""
    return {} if token is None else {"Authorization": f"Bearer {token}"}


def import_aiohttp(extra: str) -> Any:
    """Import aiohttp. Raises UsageError if it isn't installed; `extra` installs it."""
    with importing(extra):
        import aiohttp
    return aiohttp
