"""A server with OpenAI's completions and vLLM's token ids, on an engine of this process.

It has the standard library's HTTP server alone. It can fail as servers do.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from headrace.services.inference.engine import Engine, EnginePrompt, EngineSetup, Weights
from headrace.services.inference.engines.torch_engine import TorchEngine

MODEL = "tiny"


class Fleet:
    """One server's state, and the faults that a test asks for."""

    def __init__(self, model: Path, context: int) -> None:
        self.engine: Engine = TorchEngine(EngineSetup(model, 4))
        self.context = context
        self.token = ""
        self.failing: list[int] = []
        """Statuses of the next answers."""
        self.retry_after = ""
        """The header of these answers."""
        self.without: set[str] = set()
        """Fields that answers lack."""
        self.raw = False
        """Whether logprobs are those from before masks, as without `--logprobs-mode`."""
        self.delay_s = 0.0
        self.asked: list[dict[str, Any]] = []
        self.announced: list[dict[str, Any]] = []
        self.closed_early = 0
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.loop = asyncio.new_event_loop()

    def call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(60)

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        stops = tuple(body.get("stop_token_ids", ()))
        answer = self.call(
            self.engine.generate(
                EnginePrompt(
                    "default", body["prompt"], body["max_tokens"], body["temperature"],
                    body["top_p"], body["top_k"], body["min_p"], stops,
                    tuple(body.get("allowed_token_ids", ())), body.get("seed"),
                )
            )
        )  # fmt: skip
        logprobs = [one - 1 for one in answer.logprobs] if self.raw else answer.logprobs
        choice = {
            "token_ids": answer.tokens,
            "logprobs": {"token_logprobs": logprobs},
            "finish_reason": answer.finish,
        }
        return {"choices": [{k: v for k, v in choice.items() if k not in self.without}]}

    def announce(self, body: dict[str, Any]) -> dict[str, Any]:
        self.announced.append(body)
        self.call(self.engine.load(Weights("default", body["version"], Path(body["path"]))))
        return {"version": body["version"]}


def _handler(fleet: Fleet) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._send(200, {"data": [{"id": MODEL, "max_model_len": fleet.context}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            fleet.asked.append(body)
            with fleet.lock:
                fleet.at_once += 1
                fleet.most_at_once = max(fleet.most_at_once, fleet.at_once)
            try:
                self._answer(body)
            finally:
                with fleet.lock:
                    fleet.at_once -= 1

        def _answer(self, body: dict[str, Any]) -> None:
            if fleet.token and self.headers.get("Authorization") != f"Bearer {fleet.token}":
                return self._send(401, {"error": "no key"})
            if fleet.failing:
                return self._send(fleet.failing.pop(0), {"error": "busy"})
            ends = time.monotonic() + fleet.delay_s
            self.connection.setblocking(False)
            while time.monotonic() < ends:
                time.sleep(0.01)
                try:
                    if self.connection.recv(1) == b"":
                        fleet.closed_early += 1
                        self.close_connection = True
                        return None
                except BlockingIOError:
                    pass
            self.connection.setblocking(True)
            work = fleet.announce if self.path == "/weights" else fleet.complete
            return self._send(200, work(body))

        def _send(self, status: int, answer: dict[str, Any]) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if fleet.retry_after:
                self.send_header("Retry-After", fleet.retry_after)
            with suppress(ConnectionError):  # the client may have given up
                self.end_headers()
                self.wfile.write(data)

    return Handler


@contextmanager
def serving(model: Path, context: int) -> Iterator[tuple[Fleet, str]]:
    """Runs the server. Yields its state and its address."""
    fleet = Fleet(model, context)
    running = threading.Thread(target=fleet.loop.run_forever, daemon=True)
    running.start()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(fleet))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield fleet, f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        fleet.call(fleet.engine.close(0))
        fleet.loop.call_soon_threadsafe(fleet.loop.stop)
        running.join(10)
        fleet.loop.close()
