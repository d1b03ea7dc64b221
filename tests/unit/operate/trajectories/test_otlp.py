"""Spans are sent in requests that a collector takes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from headrace.schemas.events import GenerationCompleted
from headrace.services.operate.trajectories.otlp import OtlpWriter
from headrace.services.operate.trajectories.recorded_episodes import RecordedEpisode, TimedAnswer
from tests.unit.operate.trajectories.test_atif import an_episode

MOST_BYTES = 5 << 20
"""What this collector takes at most in one request."""


@contextmanager
def collector(sizes: list[int]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            size = int(self.headers["Content-Length"])
            self.rfile.read(size)
            sizes.append(size)
            self.send_response(200 if size <= MOST_BYTES else 413)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def long_episode(characters: int) -> RecordedEpisode:
    """An episode whose generations have long texts."""
    episode = an_episode()
    turns = tuple(replace(one, context_text="x" * characters) for one in episode.turns)
    answers = tuple(
        TimedAnswer(
            GenerationCompleted(
                task=17, sample=3, attempt=0, call=one.turn.call, policy="default",
                tokens=one.turn.tokens, text=one.text, finish="stop", worker="w", prompt_tokens=3,
                run_ms=1, digest=bytes(16),
            ),
            2.0,
        )
        for one in turns
    )  # fmt: skip
    return replace(episode, turns=turns, answers=answers)


def test_long_contexts_are_sent_in_several_requests() -> None:
    sizes: list[int] = []
    with collector(sizes) as url:
        writer = OtlpWriter(url, "exp", content=True)
        for _ in range(20):
            writer.write(long_episode(128_000))
        writer.close()
    assert sum(sizes) > 20 * 3 * 128_000
    assert len(sizes) > 1


def test_short_spans_are_sent_together() -> None:
    sizes: list[int] = []
    with collector(sizes) as url:
        writer = OtlpWriter(url, "exp", content=True)
        for _ in range(100):
            writer.write(long_episode(10))
        writer.close()
    assert len(sizes) == 1
