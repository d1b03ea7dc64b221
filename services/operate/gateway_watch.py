"""Asks the gateway of a run how many clients it has, and says to people how clients reach it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from urllib.request import ProxyHandler, Request, build_opener

from headrace.services.agent.gateway.gateway_key import KEY, gateway_key
from headrace.services.operate.serve.services import LISTEN, LISTEN_VARIABLE

INTERVAL_S = 2.0
ANSWER_S = 2.0
"""Most seconds for an answer of the gateway."""
ANSWER_BYTES = 4096
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
"""Addresses at which a server listens on all interfaces, and how this host reaches it."""


@dataclass
class GatewayWatch:
    """The gateway of a run on this host."""

    url: str
    """Its base URL."""
    answered: bool = False
    """Whether it has answered. Before that, the numbers mean nothing."""
    clients: int = 0
    """Clients that play an episode or wait for one."""
    playing: int = 0
    """Episodes that a client plays."""
    waiting: int = 0
    """Episodes that wait for a client."""

    async def follow(self, say: Callable[[str], None]) -> None:
        """Asks without end. After the first answer, `say` gets how clients reach the gateway."""
        while True:
            # A gateway that starts, or has much to do, answers a later question.
            with suppress(OSError, ValueError):
                self.clients, self.playing, self.waiting = await asyncio.to_thread(ask, self.url)
                if not self.answered:
                    say(invitation(self.url))
                self.answered = True
            await asyncio.sleep(INTERVAL_S)

    def __str__(self) -> str:
        return f"{self.clients}   {self.playing} play   {self.waiting} episodes wait   {self.url}"


def watch_of_gateway() -> GatewayWatch | None:
    """Returns the gateway that a run on this host starts. None if its port is not known.

    Raises UsageError if clients have no key.
    """
    gateway_key()
    host, _, port = os.environ.get(LISTEN_VARIABLE, LISTEN).rpartition(":")
    if not port.isdecimal() or int(port) == 0:
        return None
    return GatewayWatch(f"http://{EVERYWHERE.get(host, host)}:{port}/v1")


def invitation(url: str) -> str:
    """Returns how a client gets what it needs."""
    return (
        f"waiting for clients at {url}: POST {url}/episodes/take with the key in {KEY} answers "
        "the base_url and the api_key of an episode; give them to an agent as OPENAI_BASE_URL and "
        "OPENAI_API_KEY"
    )


def ask(url: str) -> tuple[int, int, int]:
    """Returns how many clients there are, how many episodes are played, and how many wait.

    Raises OSError if the gateway does not answer, and ValueError for an answer of something else.
    """
    request = Request(f"{url}/episodes", headers={"Authorization": f"Bearer {gateway_key()}"})
    # A proxy does not reach this host.
    with build_opener(ProxyHandler({})).open(request, timeout=ANSWER_S) as answer:
        counts = json.loads(answer.read(ANSWER_BYTES))
    match counts:
        case {"clients": int(clients), "playing": int(playing), "waiting": int(waiting)}:
            return clients, playing, waiting
    raise ValueError(f"{url} did not answer as a gateway")
