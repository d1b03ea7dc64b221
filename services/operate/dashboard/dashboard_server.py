"""The dashboard's HTTP server: it checks each request, and hands it to the API."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from headrace.errors import (
    BlobError,
    DecodeError,
    DependencyError,
    HeadraceError,
    RecordsLost,
    UsageError,
)
from headrace.services.operate.dashboard.actions import ACTIONS, DashboardActions
from headrace.services.operate.dashboard.dashboard_api import IMAGES, DashboardApi
from headrace.services.operate.dashboard.http_guard import (
    FILE_CSP,
    HEADERS,
    TOKEN_HEADER,
    HttpGuard,
    RefusedRequest,
)
from headrace.services.operate.dashboard.views.cut_texts import Tree

logger = logging.getLogger(__name__)

PAGE = Path(__file__).parent / "page"
MEDIA = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
    ".txt": "text/plain",
    ".md": "text/plain",
    ".woff2": "font/woff2",
}
"""The files of the page that are served, by their ends. All others are not."""
BODY_BYTES = 64 * 1024
AT_ONCE = 8
"""Requests that are answered at the same time. Further ones wait."""
ANSWER_S = 60.0
CLOSE_S = 1.0
READ_ONLY = "this dashboard was started with --read-only, so it changes nothing"

Handler = Callable[[Any], Awaitable[Any]]


class DashboardServer:
    """Serves one run at one address."""

    def __init__(
        self,
        api: DashboardApi,
        actions: DashboardActions | None,
        waits: Callable[[], Awaitable[Tree]],
    ) -> None:
        """Without `actions`, it changes nothing. `waits` returns what the run waits for."""
        self._api = api
        self._actions = actions
        self._waits = waits
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._runner: Any = None
        self.guard = HttpGuard(0)

    async def start(self, host: str, port: int, allowed: tuple[str, ...], local: bool) -> str:
        """Listens, and returns the address with its token. Port 0 takes a free port.

        `allowed` are further names under which the server may be reached, and `local` says whether
        it has the names of this machine's own address. Raises DependencyError if it can't listen.
        """
        web = _web()
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[self._checked()])
        app.add_routes(self._routes(web))
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=CLOSE_S, auto_decompress=False
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise DependencyError(
                f"can't listen on {host}:{port}: {error.strerror or error}. Choose another --port"
            ) from error
        bound = self._runner.addresses[0][1]
        name = f"[{host}]" if ":" in host else host
        names = {name.lower(), *(one.lower() for one in allowed)}
        self.guard = HttpGuard(bound, names | set(HttpGuard(0).hosts) if local else names)
        return f"http://{name}:{bound}/?token={self.guard.token}"

    async def aclose(self) -> None:
        """Stops listening, and ends what is being answered."""
        if self._runner is not None:
            await self._runner.cleanup()

    def _routes(self, web: Any) -> list[Any]:
        api, answer = self._api, self._answer
        number = r"{%s:\d{1,15}}"
        task, episode = number % "task", f"{number % 'task'}/{number % 'sample'}"
        plain: dict[str, Callable[..., Awaitable[Tree]]] = {
            "/api/run": api.run,
            "/api/series": api.series,
            "/api/times": api.times,
            "/api/versions": api.versions,
            "/api/versions/{policy}/" + number % "version": api.version,
            f"/api/groups/{task}": api.group,
            "/api/episodes": api.episodes,
            f"/api/episodes/{episode}": api.episode,
            f"/api/episodes/{episode}/tokens": api.tokens,
            "/api/tools": api.tools,
            "/api/discarded": api.discarded,
            "/api/workers": api.workers,
            "/api/topics": api.topics,
            "/api/record": api.record,
            "/api/records": api.records,
            "/api/dead-letters": api.dead_letters,
            "/api/dead-letters/" + number % "number": api.dead_letter,
            "/api/text": api.text,
            "/api/runs": api.runs,
            "/api/compare": api.compare,
        }
        return [
            web.get("/", self._index),
            web.get("/page/{path:.+}", self._file),
            web.get("/api/session", self._session),
            web.get("/api/waits", self._wait_graph),
            web.get("/api/jobs", self._jobs),
            web.get("/api/artifacts/{sha256:[0-9a-f]{64}}", self._artifact),
            web.post("/api/actions/{action:[a-z]+}", self._act),
            *(web.get(path, answer(work)) for path, work in plain.items()),
        ]

    def _checked(self) -> Any:
        web = _web()

        @web.middleware  # type: ignore[untyped-decorator, unused-ignore]
        async def check(request: Any, handler: Handler) -> Any:
            refused = self._refuse(request)
            if refused is not None:
                response = _json({"error": refused.error}, refused.status)
            else:
                async with self._at_once:
                    response = await self._handled(request, handler)
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return check

    def _refuse(self, request: Any) -> RefusedRequest | None:
        guard, headers = self.guard, request.headers
        refused = guard.refuse_origin(headers.get("Host", ""), headers.get("Origin"))
        if refused is not None:
            return refused
        # The files of the page have no facts of a run, and a browser sends no token for them.
        if request.match_info.handler in (self._index, self._file):
            return None
        refused = guard.refuse_reader(headers.get("Authorization", ""))
        if refused is None and request.method not in ("GET", "HEAD"):
            refused = guard.refuse_action(headers.get(TOKEN_HEADER))
        return refused

    async def _handled(self, request: Any, handler: Handler) -> Any:
        web = _web()
        try:
            async with asyncio.timeout(ANSWER_S):
                return await handler(request)
        except web.HTTPException as error:
            if error.status < 400:
                return error
            return _json(
                {"error": f"{request.method} {request.path}: {error.reason}"}, error.status
            )
        except UsageError as error:
            return _json({"error": str(error)}, 400)
        except RecordsLost as error:
            return _json({"error": str(error)}, 410)
        except BlobError as error:
            return _json({"error": str(error)}, 404)
        except TimeoutError:
            return _json({"error": f"no answer within {ANSWER_S:.0f} s. Try again"}, 503)
        except (HeadraceError, DecodeError) as error:
            return _json({"error": str(error)}, 503)

    def _answer(self, work: Callable[..., Awaitable[Tree]]) -> Handler:
        async def handle(request: Any) -> Any:
            parts = {
                name: int(text) if text.isdecimal() and name != "policy" else text
                for name, text in request.match_info.items()
            }
            return _json(await work(request.query, **parts))

        return handle

    async def _index(self, _: Any) -> Any:
        """Serves the page, which takes the token from its address (`page/lib/api.js`)."""
        return await self._page_file("index.html")

    async def _file(self, request: Any) -> Any:
        return await self._page_file(request.match_info["path"])

    async def _page_file(self, name: str) -> Any:
        web = _web()
        path = (PAGE / name).resolve()
        media = MEDIA.get(path.suffix)
        if media is None or not path.is_relative_to(PAGE.resolve()) or not path.is_file():
            raise web.HTTPNotFound
        body = await asyncio.to_thread(path.read_bytes)
        charset = "utf-8" if media.startswith("text/") else None
        return web.Response(body=body, content_type=media, charset=charset)

    async def _session(self, _: Any) -> Any:
        active = self._actions is not None
        return _json(
            {
                "action_token": self.guard.action_token if active else "",
                "actions": list(ACTIONS) if active else [],
                "actions_off": "" if active else READ_ONLY,
                "version": version("headrace"),
            }
        )

    async def _wait_graph(self, _: Any) -> Any:
        return _json(await self._waits())

    async def _jobs(self, _: Any) -> Any:
        empty = {"items": [], "total": 0, "next": None}
        return _json(empty if self._actions is None else self._actions.jobs_tree())

    async def _act(self, request: Any) -> Any:
        if self._actions is None:
            return _json({"error": READ_ONLY}, 403)
        if request.content_type != "application/json":
            return _json({"error": "an action needs the content type application/json"}, 415)
        try:
            body = json.loads(await request.read() or b"{}")
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            return _json({"error": "an action needs a JSON object"}, 400)
        action = request.match_info["action"]
        logger.info("action %s", action)
        return _json(await self._actions.run(action, body))

    async def _artifact(self, request: Any) -> Any:
        web = _web()
        blob, path = await self._api.artifact(request.query, request.match_info["sha256"])
        image = blob.media in IMAGES
        headers = {
            "Content-Security-Policy": FILE_CSP,
            "Content-Type": blob.media if image else "application/octet-stream",
            "Content-Disposition": "inline" if image else f'attachment; filename="{path.name}"',
        }
        return web.FileResponse(path, headers=headers)


def _json(tree: object, status: int = 200) -> Any:
    web = _web()
    try:
        text = json.dumps(tree, ensure_ascii=False, allow_nan=False)
    except ValueError:  # A record holds NaN or infinity, which JSON does not have.
        text = json.dumps(_finite(tree), ensure_ascii=False, allow_nan=False)
    body = text.encode("utf-8", "replace")
    return web.Response(body=body, status=status, content_type="application/json", charset="utf-8")


def _finite(tree: object) -> object:
    if isinstance(tree, float):
        return tree if math.isfinite(tree) else None
    if isinstance(tree, dict):
        return {name: _finite(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_finite(value) for value in tree]
    return tree


def _web() -> Any:
    try:
        from aiohttp import web
    except ImportError as error:
        raise UsageError("aiohttp is not installed: pip install 'headrace[dashboard]'") from error
    return web
