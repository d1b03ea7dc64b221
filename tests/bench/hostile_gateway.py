"""A gateway with one episode, for `hostile.py`: `python -m tests.bench.hostile_gateway`.

Prints its address and keys as a line of JSON. For each line on stdin it prints the longest stall of
its event loop and the most memory since the last one, and how many files it has open.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time

import psutil

from headrace.services.agent.episode import Episode
from headrace.services.agent.gateway.chat_session import ChatSession, Dialect
from headrace.services.agent.gateway.server import GatewayServer
from headrace.services.operate.serve.process_setup import tune_garbage_collector
from tests.unit.agent.gateway.test_program import Chatting
from tests.unit.agent.test_episode_run import end, task

BOUND_S = 600.0
LOOK_S = 0.005


class Watch:
    """Looks at the loop and the memory every few milliseconds."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._stall_s = 0.0
        self._bytes = 0

    async def run(self) -> None:
        """Never returns."""
        last = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.monotonic()
            self._stall_s = max(self._stall_s, now - last - LOOK_S)
            self._bytes = max(self._bytes, self._process.memory_info().rss)
            last = time.monotonic()

    def take(self) -> str:
        """What was seen since the last call, as JSON."""
        found = {"stall_s": self._stall_s, "bytes": self._bytes, "files": files()}
        self._stall_s, self._bytes = 0.0, 0
        return json.dumps(found)


def files() -> int:
    """How many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


async def serve(session: ChatSession) -> None:
    """Serves one episode until stdin ends."""
    server, watch = GatewayServer("a key for the takers"), Watch()
    url = await server.start("127.0.0.1", 0)
    watching = asyncio.create_task(watch.run())
    with server.admitting(session) as keys:
        print(json.dumps({"url": url, "chat": keys.chat, "report": keys.report}), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(watch.take(), flush=True)
    watching.cancel()
    await server.aclose()


def main() -> None:
    """Plays the episode."""

    async def agent(episode: Episode) -> None:
        await serve(ChatSession(episode, Dialect("hermes", models={})))

    tune_garbage_collector()
    submitted = task(environment=None, max_turns=10_000, max_tokens=1_000_000)
    end(Chatting(), submitted, agent, left_s=BOUND_S, bound_s=BOUND_S)


if __name__ == "__main__":
    main()
