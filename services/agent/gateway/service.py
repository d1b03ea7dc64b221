"""The gateway: an agent worker that serves clients from outside."""

from __future__ import annotations

import asyncio
import logging

from headrace.errors import UsageError
from headrace.services.agent import service
from headrace.services.agent.gateway.gateway_key import gateway_key
from headrace.services.agent.gateway.refusals import ApiError
from headrace.services.agent.gateway.server import GatewayServer
from headrace.services.base.concurrency import until_first
from headrace.services.worker.service_context import ServiceContext

logger = logging.getLogger(__name__)

FAREWELL_S = 1.0
"""Seconds that a gateway still answers after its run has ended: clients learn of the end."""


async def run(context: ServiceContext, listen: str) -> None:
    """Runs episodes until `context.stopping` is set, and serves clients at `listen`.

    `listen` is HOST:PORT; port 0 takes a free one.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise UsageError(f"--listen {listen!r} must be HOST:PORT, for example 127.0.0.1:8100")
    server = GatewayServer(gateway_key())
    logger.info("clients can take episodes at %s", await server.start(host.strip("[]"), int(port)))
    try:
        await until_first(service.run(context, entrance=server), _refuse(context, server))
        if context.ending.is_set():
            # A client whose episode was the last to end now asks for another one.
            server.queue.close(_ended())
            await asyncio.sleep(FAREWELL_S)
    finally:
        await server.aclose()


async def _refuse(context: ServiceContext, server: GatewayServer) -> None:
    """Gives clients a clear answer once the run ends, or once this gateway stops."""
    await until_first(context.ending.wait(), context.stopping.wait())
    if not context.ending.is_set():
        server.queue.close(
            ApiError(503, "the run is paused, or its gateway starts again: ask until it is back")
        )
        await context.ending.wait()
    server.queue.close(_ended())
    await asyncio.Event().wait()


def _ended() -> ApiError:
    return ApiError(410, "the run has ended: it has no more episodes", "run_ended")
