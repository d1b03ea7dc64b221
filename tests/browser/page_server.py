"""The page's files and the recorded answers over HTTP, with the headers of the dashboard."""

from __future__ import annotations

import base64
import json
import mimetypes
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from tests.browser import recorded_episode as episode
from tests.browser import recorded_lists as lists
from tests.browser import recorded_records as records
from tests.browser import recorded_run as run
from tests.browser.recorded_run import Answer

PAGE = Path(__file__).parents[2] / "services/operate/dashboard/page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
Asked = dict[str, str]
Route = tuple[str, Callable[[re.Match[str], Asked], Answer | None]]

ROUTES: tuple[Route, ...] = (
    ("session", lambda _, __: run.session()),
    ("run", lambda _, __: run.run()),
    ("series", lambda _, __: run.series()),
    ("times", lambda _, __: run.times()),
    ("versions", lambda _, __: run.page([run.version_row(one) for one in range(60, 10, -1)])),
    (r"versions/default/(\d+)", lambda found, _: run.version(int(found[1]))),
    (r"groups/(\d+)", lambda found, _: episode.group(int(found[1]))),
    (r"episodes/(\d+)/(\d+)", lambda found, _: episode.episode(int(found[1]), int(found[2]))),
    (
        r"episodes/(\d+)/(\d+)/tokens",
        lambda found, asked: episode.tokens(int(found[1]), int(found[2]), asked),
    ),
    ("episodes", lambda _, asked: lists.episodes(asked)),
    ("text", lambda _, __: {"text": run.observation(), "length": run.LONG_TEXT}),
    ("tools", lambda _, __: lists.tools()),
    ("discarded", lambda _, asked: lists.discarded(asked)),
    ("workers", lambda _, __: lists.workers()),
    ("waits", lambda _, __: lists.waits()),
    ("topics", lambda _, __: records.topics()),
    ("records", lambda _, asked: records.records(asked["topic"])),
    ("record", lambda _, asked: records.record(asked["at"])),
    ("dead-letters", lambda _, __: records.dead_letters()),
    (r"dead-letters/(\d+)", lambda found, _: records.dead_letter(int(found[1]))),
    ("runs", lambda _, __: run.page([])),
    (
        "compare",
        lambda _, asked: (
            lists.compare_runs(asked["run"])
            if "run" in asked
            else lists.compare(int(asked["first"]), int(asked["second"]))
        ),
    ),
    ("jobs", lambda _, __: run.page([])),
)


def answer(path: str, asked: Asked) -> Answer | None:
    """The recorded answer to a path below `/api/`, None if there is no such thing."""
    for pattern, make in ROUTES:
        found = re.fullmatch(pattern, path)
        if found:
            return make(found, asked)
    return None


@dataclass
class Recorded:
    """A server of recorded answers."""

    url: str
    replaced: dict[str, tuple[int, object]] = field(default_factory=dict)
    """Path below `/api/` to the status and the body that are answered instead."""
    posted: list[tuple[str, str, object]] = field(default_factory=list)
    """Path, token and body of each action."""
    asked: list[tuple[str, str | None, str | None]] = field(default_factory=list)
    """Path with query, `Authorization` and `Cookie` of each request."""
    most_items: int = 500
    """Items of each list. A checker of all elements takes long for long tables."""


class _Handler(BaseHTTPRequestHandler):
    recorded: Recorded
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Keeps quiet."""

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        named = (self.headers.get("Authorization"), self.headers.get("Cookie"))
        self.recorded.asked.append((self.path, *named))
        if url.path.startswith("/api/artifacts/"):
            self._send(200, "image/png", PIXEL)
        elif url.path.startswith("/api/"):
            self._answer(url.path.removeprefix("/api/"), dict(parse_qsl(url.query)))
        else:
            name = url.path.removeprefix("/page/") if url.path != "/" else "index.html"
            path = (PAGE / name).resolve()
            if path.is_relative_to(PAGE) and path.is_file():
                self._send(200, mimetypes.guess_type(name)[0] or "text/plain", path.read_bytes())
            else:
                self._send(404, "text/plain", b"no such file")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        token = self.headers.get("X-Headrace-Token", "")
        self.recorded.posted.append((self.path, token, body))
        self._json(200, {"ok": True, "message": "done as asked"})

    def _answer(self, path: str, asked: Asked) -> None:
        if path in self.recorded.replaced:
            self._json(*self.recorded.replaced[path])
            return
        found = answer(path, asked)
        if found is None:
            self._json(404, {"error": f"The run has no {path}."})
        else:
            if "items" in found:
                found["items"] = found["items"][: self.recorded.most_items]
            self._json(200, found)

    def _json(self, status: int, body: object) -> None:
        self._send(status, "application/json", json.dumps(body).encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def recorded_server(port: int = 0) -> Iterator[Recorded]:
    """A running server on loopback."""

    class Handler(_Handler):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    Handler.recorded = Recorded(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield Handler.recorded
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
