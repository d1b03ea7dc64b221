"""The gateway: an agent worker that clients from outside can reach."""

from __future__ import annotations

import os

from headrace.errors import UsageError
from headrace.services.agent import service
from headrace.services.agent.gateway.clients import EpisodeQueue
from headrace.services.agent.gateway.server import GatewayServer
from headrace.services.worker.service_context import ServiceContext

KEY = "HEADRACE_GATEWAY_KEY"
"""The variable that holds the key of those who may take episodes."""
KEY_CHARACTERS = 16
"""Fewest characters of it: who guesses it plays episodes."""


async def run(context: ServiceContext, listen: str) -> None:
    """Runs episodes until `context.stopping` is set, and serves clients at `listen`.

    `listen` is HOST:PORT; port 0 takes a free one.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise UsageError(f"--listen {listen!r}: HOST:PORT is needed, as 127.0.0.1:8100")
    key = os.environ.get(KEY, "")
    if len(key) < KEY_CHARACTERS:
        raise UsageError(
            f"{KEY}: set it to a secret of at least {KEY_CHARACTERS} characters; who has it may "
            "take episodes"
        )
    server = GatewayServer(EpisodeQueue(), key)
    await server.start(host.strip("[]"), int(port))
    try:
        await service.run(context, entrance=server)
    finally:
        await server.aclose()
