"""The gateway's HTTP server, and the episodes that wait for its clients.

A session's token gives access to its episode, and to no other.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import DependencyError, UsageError
from headrace.services.agent.gateway import chat_answers as answers
from headrace.services.agent.gateway.chat_requests import read_object, read_request
from headrace.services.agent.gateway.chat_session import ChatSession, read_report
from headrace.services.agent.gateway.refusals import ApiError, bad_request

BODY_BYTES = 16 << 20
"""Largest body of a request."""
TAKE = "/v1/episodes/take"
"""The path at which clients take episodes."""
TAKE_S = 30.0
"""Seconds that a request for an episode waits for one."""
CLOSE_S = 0.5
"""Seconds that open connections have to end."""


@dataclass(eq=False)
class PendingEpisode:
    """An attempt that waits for a client or has one."""

    session: ChatSession
    token: str
    task: Mapping[str, Any]
    taken: asyncio.Event = field(default_factory=asyncio.Event)


class EpisodeQueue:
    """The attempts of a worker that wait for clients, in order."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[PendingEpisode, None] = OrderedDict()
        self._came = asyncio.Event()

    @contextmanager
    def waiting(self, pending: PendingEpisode) -> Iterator[None]:
        """Keeps an attempt in the queue within the `with` block, until it is taken."""
        self._waiting[pending] = None
        self._came.set()
        try:
            yield
        finally:
            self._waiting.pop(pending, None)

    async def take(self, wait_s: float) -> PendingEpisode | None:
        """Takes the attempt that has waited longest. Returns None if none comes within `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                while not self._waiting:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            return None
        pending, _ = self._waiting.popitem(last=False)
        pending.taken.set()
        return pending

    def give_back(self, pending: PendingEpisode) -> None:
        """Returns an attempt to the head of the queue: the client that took it disconnected."""
        pending.taken.clear()
        self._waiting[pending] = None
        self._waiting.move_to_end(pending, last=False)
        self._came.set()


class GatewayServer:
    """Serves the clients of sessions at one address."""

    def __init__(self, key: str = "") -> None:
        """With a `key`, clients that have it take the episodes that wait in `queue`."""
        self.queue = EpisodeQueue()
        self._key = key
        self._sessions: dict[str, ChatSession] = {}
        self._started = int(time.time())
        self._runner: Any = None

    async def start(self, host: str, port: int) -> str:
        """Listens, and returns the base URL. Port 0 takes a free port.

        Raises DependencyError if it can't listen.
        """
        await self._listen(lambda runner: _web().TCPSite(runner, host, port), f"{host}:{port}")
        return f"http://{host}:{self._runner.addresses[0][1]}/v1"

    async def start_at(self, socket: Path) -> None:
        """Listens on a Unix socket. Raises DependencyError if it can't."""
        await self._listen(lambda runner: _web().UnixSite(runner, str(socket)), str(socket))

    async def _listen(self, make_site: Callable[[Any], Any], address: str) -> None:
        web = _web()
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[self._guard()])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._complete),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._model),
                web.post("/v1/episode/reward", self._report),
            ]
        )
        if self._key:
            app.add_routes([web.post(TAKE, self._take), web.post("/v1/episode/end", self._end)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_S)
        await self._runner.setup()
        try:
            await make_site(self._runner).start()
        except OSError as error:
            await self.aclose()
            raise DependencyError(f"can't listen on {address}: {error.strerror}") from error

    async def aclose(self) -> None:
        """Stops listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @contextmanager
    def admitting(self, session: ChatSession) -> Iterator[str]:
        """Yields a token for a session, which is valid within the `with` block."""
        token = secrets.token_urlsafe(32)
        self._sessions[token] = session
        try:
            yield token
        finally:
            del self._sessions[token]

    def _guard(self) -> Any:
        web = _web()

        @web.middleware  # type: ignore[untyped-decorator, unused-ignore]
        async def guard(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
            try:
                self._authenticate(request)
                return await handler(request)
            except ApiError as error:
                refused = error
            except web.HTTPRequestEntityTooLarge:
                refused = ApiError(413, f"the body is larger than {BODY_BYTES} bytes")
            except web.HTTPException as error:
                refused = ApiError(error.status, f"{request.method} {request.path}: {error.reason}")
            return web.json_response(refused.body, status=refused.status, headers=refused.headers)

        return guard

    def _authenticate(self, request: Any) -> None:
        """Raises ApiError 401 if a request has no valid key or token."""
        if request.path != TAKE:
            self._session_of(request).heard()
        elif not self._key or not secrets.compare_digest(
            _bearer(request).encode(), self._key.encode()
        ):
            raise ApiError(401, "this is not the gateway's key", "invalid_api_key")

    def _session_of(self, request: Any) -> ChatSession:
        """Returns the session of a request's token. Raises ApiError 401 if there is none."""
        session = self._sessions.get(_bearer(request))
        if session is None:
            raise ApiError(
                401, "no episode has this API key: it is wrong, or its attempt has ended",
                "invalid_api_key",
            )  # fmt: skip
        return session

    async def _complete(self, http: Any) -> Any:
        session = self._session_of(http)
        with session.serving():
            return await self._answer(session, http)

    async def _answer(self, session: ChatSession, http: Any) -> Any:
        request = read_request(await http.read())
        choices = await session.complete(request)
        headers = {"x-headrace-overridden": ", ".join(request.overridden)}
        if request.stream:
            response = await self._stream(http, answers.events(request, choices), headers)
        else:
            response = _web().json_response(answers.completion(request, choices), headers=headers)
        if http.transport is None or http.transport.is_closing():
            for choice in choices:
                session.undelivered(choice)
        return response

    @staticmethod
    async def _stream(http: Any, events: Iterator[bytes], headers: dict[str, str]) -> Any:
        response = _web().StreamResponse(headers={**headers, "Cache-Control": "no-cache"})
        response.content_type = "text/event-stream"
        with suppress(ConnectionResetError):  # the client is gone
            await response.prepare(http)
            for event in events:
                await response.write(event)
            await response.write_eof()
        return response

    async def _models(self, http: Any) -> Any:
        names = self._session_of(http).models
        return _web().json_response(answers.models(names, self._started))

    async def _model(self, http: Any) -> Any:
        name = http.match_info["name"]
        if name not in self._session_of(http).models:
            raise ApiError(404, f"no model {name!r}", "model_not_found")
        return _web().json_response(answers.model(name, self._started))

    async def _report(self, http: Any) -> Any:
        session = self._session_of(http)
        _take_report(session, read_object(await http.read()))
        return _web().json_response({})

    async def _end(self, http: Any) -> Any:
        session = self._session_of(http)
        tree = read_object(await http.read())
        _take_report(session, tree)
        if not session.ended.done():
            error = tree.get("error")
            session.ended.set_result(None if error is None else str(error))
        return _web().json_response({})

    async def _take(self, http: Any) -> Any:
        pending = await self.queue.take(TAKE_S)
        if pending is None:
            raise ApiError(503, f"no episode was waiting within {TAKE_S:g} s: ask again")
        if http.transport is None or http.transport.is_closing():
            self.queue.give_back(pending)
        tree = {"base_url": f"{http.url.origin()}/v1", "api_key": pending.token}
        return _web().json_response(
            {**tree, "model": pending.session.models[0], "task": pending.task}
        )


def _take_report(session: ChatSession, tree: dict[str, Any]) -> None:
    try:
        session.report(read_report(tree))
    except ValueError as error:
        raise bad_request(str(error)) from error


def _bearer(request: Any) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _web() -> Any:
    try:
        from aiohttp import web
    except ImportError as error:
        raise UsageError("aiohttp is not installed: pip install 'headrace[gateway]'") from error
    return web
