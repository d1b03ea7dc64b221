"""The gateway's HTTP server, and the episodes that wait for its clients.

A session has two keys, which give access to its episode and to no other. Whoever has the chat key
can ask the policies; it may get into the hands of code that a policy wrote. Only the report key can
set rewards and end the episode.
"""

from __future__ import annotations

import asyncio
import resource
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from headrace.errors import DependencyError, UsageError
from headrace.services.agent.gateway import chat_answers as answers
from headrace.services.agent.gateway.chat_requests import read_object, read_request
from headrace.services.agent.gateway.chat_session import ChatSession, read_report
from headrace.services.agent.gateway.episode_queue import EpisodeQueue, Keys
from headrace.services.agent.gateway.refusals import ApiError, bad_request

T = TypeVar("T")

BODY_BYTES = 4 << 20
"""Largest body of a request: a context of about 1,000,000 tokens as text."""
LARGE_BYTES = 1 << 20
LARGE_BODIES = 16
"""Bodies above LARGE_BYTES that are read at once, at most one of an episode. Further ones wait."""
BODY_S = 60.0
"""Seconds that a body has to arrive."""
DELIVER_S = 60.0
"""Seconds that a client has to read an answer."""
BACKLOG = 1024
"""Connections that the system holds until they are accepted. Hundreds may come at once."""
CONNECTIONS = 2_000
"""Most connections. Further ones are closed. If the process may have fewer files, half of those."""
EPISODES = "/v1/episodes"
"""The path that says how many episodes wait for clients, and how many are played."""
TAKE = "/v1/episodes/take"
"""The path at which clients take episodes."""
REWARD = "/v1/episode/reward"
END = "/v1/episode/end"
TAKE_S = 30.0
"""Seconds that a request for an episode waits for one."""
CLOSE_S = 0.5
"""Seconds that open connections have to end."""


class GatewayServer:
    """Serves the clients of sessions at one address."""

    def __init__(
        self, key: str = "", *, reports: bool = True, connections: int = CONNECTIONS
    ) -> None:
        """With a `key`, clients that have it take the episodes that wait in `queue`.

        Without `reports`, no client can set a reward, whatever key it has.
        """
        self.queue = EpisodeQueue()
        self._key = key
        self._reports = reports
        self._most = min(connections, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._large = asyncio.Semaphore(LARGE_BODIES)
        self._parsing = asyncio.Lock()
        self._chats: dict[str, ChatSession] = {}
        self._reporters: dict[str, ChatSession] = {}
        self._server: asyncio.Server | None = None
        self._started = int(time.time())
        self._runner: Any = None

    async def start(self, host: str, port: int) -> str:
        """Listens, and returns the base URL. Port 0 takes a free port.

        Raises DependencyError if it can't listen.
        """
        loop = asyncio.get_running_loop()
        server = await self._listen(
            lambda: loop.create_server(self._connection, host, port, backlog=BACKLOG),
            f"{host}:{port}",
        )
        return f"http://{host}:{server.sockets[0].getsockname()[1]}/v1"

    async def start_at(self, socket: Path) -> None:
        """Listens on a Unix socket. Raises DependencyError if it can't."""
        loop = asyncio.get_running_loop()
        await self._listen(lambda: loop.create_unix_server(self._connection, socket), str(socket))

    def _connection(self) -> asyncio.BaseProtocol:
        """Returns what serves a new connection, or closes it if there are too many."""
        server = self._runner.server
        return server() if len(server.connections) < self._most else _Closing()

    async def _listen(
        self, listen: Callable[[], Awaitable[asyncio.Server]], address: str
    ) -> asyncio.Server:
        web = _web()
        app = web.Application(middlewares=[self._guard()])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._complete),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{name:.+}", self._model),
            ]
        )
        if self._reports:
            app.add_routes([web.post(REWARD, self._report)])
        if self._key:
            app.add_routes(
                [
                    web.get(EPISODES, self._episodes),
                    web.post(TAKE, self._take),
                    web.post(END, self._end),
                ]
            )
        # A body that is decompressed before its size is known could have any size.
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=CLOSE_S, auto_decompress=False
        )
        await self._runner.setup()
        try:
            self._server = await listen()
        except OSError as error:
            await self.aclose()
            raise DependencyError(f"can't listen on {address}: {error.strerror}") from error
        return self._server

    async def aclose(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @contextmanager
    def admitting(self, session: ChatSession) -> Iterator[Keys]:
        """Yields the keys of a session, which are valid within the `with` block."""
        keys = Keys(secrets.token_urlsafe(32), secrets.token_urlsafe(32))
        self._chats[keys.chat] = self._reporters[keys.report] = session
        try:
            yield keys
        finally:
            del self._chats[keys.chat], self._reporters[keys.report]

    def _guard(self) -> Any:
        web = _web()

        @web.middleware  # type: ignore[untyped-decorator, unused-ignore]
        async def guard(request: Any, handler: Callable[[Any], Awaitable[Any]]) -> Any:
            # A variable that held the error would keep all frames below, with the body in them,
            # until the garbage collector runs.
            try:
                self._authenticate(request)
                return await handler(request)
            except ApiError as error:
                return _refused(self.queue.closed or error)
            except web.HTTPException as error:
                text = f"{request.method} {request.path}: {error.reason}"
                return _refused(ApiError(error.status, text))

        return guard

    def _authenticate(self, request: Any) -> None:
        """Raises ApiError 401 or 403 if a request has no valid key."""
        if request.path not in (EPISODES, TAKE):
            self._session_of(request).heard()
        elif not self._key or not secrets.compare_digest(
            _bearer(request).encode(), self._key.encode()
        ):
            raise ApiError(401, "this is not the gateway's key", "invalid_api_key")

    def _session_of(self, request: Any) -> ChatSession:
        """Returns the session of a request's key. Raises ApiError 401 or 403 if there is none."""
        key = _bearer(request)
        reports = request.path in (REWARD, END)
        session = (self._reporters if reports else self._chats).get(key)
        if session is None and reports and key in self._chats:
            raise ApiError(
                403, "this key can only ask the policies; a report needs the episode's report key",
                "invalid_api_key",
            )  # fmt: skip
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

    async def _read(self, session: ChatSession, http: Any, parse: Callable[[bytes], T]) -> T:
        """Reads and parses a body. Between two bodies, the event loop does other work."""
        length = http.content_length if http.can_read_body else 0
        async with AsyncExitStack() as stack:
            if length is None or length > LARGE_BYTES:  # one of unknown length may be large
                await stack.enter_async_context(session.uploading)
                await stack.enter_async_context(self._large)
            data = await _body(http)
            await stack.enter_async_context(self._parsing)
            await asyncio.sleep(0)
            return parse(data)

    async def _answer(self, session: ChatSession, http: Any) -> Any:
        asked = await self._read(session, http, read_request)
        request = replace(asked, messages=())
        asking = session.complete(asked)
        del asked  # its messages are not needed while the policy answers, and may be large
        choices = await asking
        headers = {"x-headrace-overridden": ", ".join(request.overridden)}
        if request.stream:
            response, events = _event_stream(headers), answers.events(request, choices)
        else:
            answer = answers.completion(request, choices)
            response, events = _web().json_response(answer, headers=headers), iter(())
        if not await _is_delivered(http, response, events):
            for choice in choices:
                session.undelivered(choice)
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
        _take_report(session, await self._read(session, http, read_object))
        return _web().json_response({})

    async def _end(self, http: Any) -> Any:
        session = self._session_of(http)
        tree = await self._read(session, http, read_object)
        _take_report(session, tree)
        if not session.ended.done():
            error = tree.get("error")
            session.ended.set_result(None if error is None else str(error))
        return _web().json_response({})

    async def _episodes(self, http: Any) -> Any:
        return _web().json_response(self.queue.counts)

    async def _take(self, http: Any) -> Any:
        pending = await self.queue.take(TAKE_S)
        if pending is None:
            raise ApiError(503, f"no episode was waiting within {TAKE_S:g} s: ask again")
        if http.transport is None or http.transport.is_closing():
            self.queue.give_back(pending)
        return _web().json_response(
            {
                "base_url": f"{http.url.origin()}/v1",
                "api_key": pending.keys.chat,
                "report_key": pending.keys.report,
                "model": pending.session.models[0],
                "task": pending.task,
            }
        )


def _event_stream(headers: Mapping[str, str]) -> Any:
    response = _web().StreamResponse(headers={**headers, "Cache-Control": "no-cache"})
    response.content_type = "text/event-stream"
    return response


async def _is_delivered(http: Any, response: Any, events: Iterator[bytes]) -> bool:
    """Sends an answer, and then events. Returns whether the client has taken all in time."""
    try:
        async with asyncio.timeout(DELIVER_S):
            await response.prepare(http)
            for event in events:
                await response.write(event)
            await response.write_eof()
    except TimeoutError:
        if http.transport is not None:
            http.transport.abort()
    except ConnectionResetError:
        pass  # the client is gone
    return http.transport is not None and not http.transport.is_closing()


class _Closing(asyncio.Protocol):
    """Closes a connection at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


async def _body(http: Any) -> bytes:
    """Reads a body. aiohttp's own `read` would keep it for as long as the request is open.

    Raises ApiError 413 if it is too large, 408 if it does not arrive in time, and 400 if the client
    is gone.
    """
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in http.content.iter_any():
                data += chunk
                if len(data) > BODY_BYTES:
                    raise ApiError(413, f"the body is larger than {BODY_BYTES} bytes")
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_S:g} s") from None
    except ConnectionError:
        raise bad_request("the connection was lost before the whole body was there") from None
    return bytes(data)


def _refused(error: ApiError) -> Any:
    return _web().json_response(error.body, status=error.status, headers=error.headers)


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
