"""An environment that is a server of any language, spoken to by three POSTs of JSON.

The server keeps an episode by its name and the index of its last action, and answers that action
again where it is repeated. So an answer that was lost on its way is asked for again, a worker that
died is followed by another which goes on where it stood, and no action is done twice. docs/
environments.md describes the protocol.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from headrace.errors import EnvironmentFailed, InfrastructureError, UsageError
from headrace.services.base.types import Observation, TaskView

logger = logging.getLogger(__name__)

PROTOCOL = 1
"""Of the messages; told in each reset."""
PAUSES_S = (0.1, 0.5)
"""Before the second and the third try of a call whose connection was lost."""
LOST = (409, 410)
"""Statuses of an episode that isn't open, or not at the action before."""
BUSY = (408, 425, 429, 502, 503, 504)
"""Statuses that are nobody's fault: the episode is tried again."""


class Answer(BaseModel):
    """What a server answers to a reset and a step. Keys it doesn't know are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    text: str
    data: dict[str, JsonValue] = {}
    reward: float | None = None
    rewards: dict[str, float] = {}
    terminated: bool = False
    truncated: bool = False


class HttpEnvironment:
    """An episode that a server keeps. Another worker finds it again by its name."""

    replayable = False
    recipe_only = frozenset({"url", "timeout_s", "answer_kb", "idle_s", "token_variable"})

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        answer_kb: int = 1024,
        idle_s: int = 3600,
        token_variable: str | None = None,
    ) -> None:
        """`options` go to the server with each reset.

        A call has `timeout_s` in all, and its answer at most `answer_kb` KiB. The server may forget
        an episode that it has heard nothing of for `idle_s`. `token_variable` names a variable of
        the worker's environment, whose value is sent as a bearer token.
        """
        self._aiohttp = import_aiohttp("http")
        self._url = url.rstrip("/")
        if not self._url.startswith(("http://", "https://")):
            raise UsageError(f"url {url!r}: give the server's address, as http://127.0.0.1:8000")
        self._options = dict(options or {})
        self._timeout_s = timeout_s
        self._most_bytes = answer_kb * 1024
        self._idle_s = idle_s
        self._headers = {"Accept-Encoding": "identity", **authorization(token_variable)}
        self._name = ""
        self._open: str | None = None
        """The episode that the server keeps for this one, as far as is known here."""
        self._index = 0
        self._session: Any = None

    def set_name(self, name: str) -> None:
        """As Named has it."""
        self._name = name

    async def reset(self, task: TaskView) -> Observation:
        """Has the server begin the episode, whatever it had under that name."""
        if self._open not in (None, self._name):
            await self._end()
        self._open, self._index = self._name, 0
        about = {"number": task.number, "sample": task.sample, "seed": task.seed}
        told = {"payload": dict(task.payload), "options": self._options}
        content = {"protocol": PROTOCOL, "idle_s": self._idle_s, "task": {**about, **told}}
        return await self._call("reset", content)

    async def resume(self, task: TaskView, done: int) -> None:
        """As Lasting has it: the next step tells whether the server still keeps the episode."""
        self._open, self._index = self._name, done

    async def step(self, action: str) -> Observation:
        """Has the server act, once."""
        self._index += 1
        return await self._call("step", {"action": action})

    async def release(self) -> None:
        """Ends the connection; the server keeps the episode."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def aclose(self) -> None:
        """Has the server forget the episode, and ends the connection."""
        try:
            if self._open is not None:
                await self._end()
        finally:
            await self.release()

    async def _end(self) -> None:
        """Has the server forget the episode; where it can't be told, it does so by `idle_s`."""
        name, self._open = self._open, None
        try:
            await self._post("close", {"episode": name})
        except (EnvironmentFailed, InfrastructureError, UsageError) as error:
            logger.warning("episode %s was not closed, and must end by itself: %s", name, error)

    async def _call(self, verb: str, content: Mapping[str, Any]) -> Observation:
        body = {"episode": self._open, "index": self._index, **content}
        answer = read_answer(await self._post(verb, body), f"{self._url}/{verb}")
        return Observation(**answer.model_dump())

    async def _post(self, verb: str, body: Mapping[str, Any]) -> bytes:
        """The bytes of a call's answer, tried again where the connection is lost."""
        aiohttp = self._aiohttp
        url = f"{self._url}/{verb}"
        try:
            async with asyncio.timeout(self._timeout_s):
                for pause_s in (*PAUSES_S, None):
                    try:
                        return await self._try(url, body)
                    except aiohttp.InvalidURL as error:
                        raise UsageError(f"url {self._url!r} is no address") from error
                    except (aiohttp.ClientError, OSError) as error:
                        if pause_s is None:
                            said = f"{url}: {type(error).__name__}: {error}"
                            raise InfrastructureError("server_unreachable", said) from error
                    await asyncio.sleep(pause_s)
        except TimeoutError as error:
            said = f"{url} did not answer in {self._timeout_s:g} s"
            raise InfrastructureError("server_silent", said) from error
        raise AssertionError("the last try returns or raises")

    async def _try(self, url: str, body: Mapping[str, Any]) -> bytes:
        if self._session is None:
            # An episode asks one thing at a time. Compressed, an answer could pass any limit.
            self._session = self._aiohttp.ClientSession(
                connector=self._aiohttp.TCPConnector(limit=1),
                headers=self._headers,
                auto_decompress=False,
            )
        async with self._session.post(url, json=body, allow_redirects=False) as response:
            chunks, size = [], 0
            async for chunk in response.content.iter_any():
                chunks.append(chunk)
                size += len(chunk)
                if size > self._most_bytes:
                    said = f"{url} answers with more than {self._most_bytes // 1024} KiB"
                    raise EnvironmentFailed("answer_too_large", said)
            content = b"".join(chunks)
            if response.status != 200:
                raise refusal(response.status, content, url)
            return content


def read_answer(content: bytes, where: str) -> Answer:
    """A server's answer. EnvironmentFailed `bad_answer` where it is none."""
    try:
        return Answer.model_validate_json(content)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"])) or "the body"
        said = f"{where} answers what is no observation: {place}: {problem['msg']}"
        raise EnvironmentFailed("bad_answer", said) from error


def refusal(status: int, content: bytes, where: str) -> Exception:
    """Whose doing it is that a server answers with a status other than 200."""
    said = f"{where} answers {status}: {content[:500].decode(errors='replace').strip()}"
    if status in LOST:
        return InfrastructureError("sandbox_lost", said)
    if status in BUSY:
        return InfrastructureError("server_busy", said)
    if status >= 500:
        return EnvironmentFailed("server_error", said)
    return UsageError(f"{said}. Look at the environment's url and options")


def authorization(variable: str | None) -> dict[str, str]:
    """The header of a bearer token. UsageError where the variable that holds it is not set."""
    if variable is None:
        return {}
    try:
        return {"Authorization": f"Bearer {os.environ[variable]}"}
    except KeyError:
        raise UsageError(f"token_variable: the variable {variable} is not set here") from None


def import_aiohttp(extra: str) -> Any:
    """aiohttp. UsageError where it isn't installed: which extra brings it."""
    try:
        import aiohttp
    except ImportError:
        raise UsageError(f"aiohttp is not installed: pip install 'headrace[{extra}]'") from None
    return aiohttp
