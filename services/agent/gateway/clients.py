"""The agent `client`: an episode waits until a client from outside takes it and plays it.

A client that has the gateway's key takes the episode that has waited longest. It gets the task, and
an API key for that attempt. Then it plays the episode through OpenAI's API, and reports the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import UsageError
from headrace.services.agent.episode import Episode
from headrace.services.agent.gateway.chat_session import (
    ChatSession,
    Dialect,
    check_payload_keys,
    describe,
)
from headrace.services.agent.gateway.episode_queue import PendingEpisode
from headrace.services.agent.gateway.server import GatewayServer
from headrace.services.base.tool_calls import Format


class ClientFailed(Exception):
    """The client is gone or reported a failure. The attempt fails; the policy is not blamed."""


@dataclass(eq=False)
class ClientAgent:
    """An agent that runs outside, in a client. Raises UsageError if an option is wrong."""

    replayable = False

    idle_s: float = 60.0
    """A client that makes no request for so many seconds, and waits for none, counts as gone."""
    tool_calls: Format = "hermes"
    """As for `command`."""
    models: Mapping[str, str] = field(default_factory=dict)
    """Maps further names of models to roles."""
    payload: Sequence[str] | None = None
    """The keys of the task's payload that the client gets. By default it gets all."""

    def __post_init__(self) -> None:
        if not self.idle_s > 0:
            raise UsageError(f"idle_s must be above 0, not {self.idle_s}")
        check_payload_keys(self.payload)
        self.entrance: GatewayServer | None = None
        """Set by the gateway."""
        self._dialect = Dialect(self.tool_calls, self.models)

    async def __call__(self, episode: Episode) -> None:
        """Waits for a client, and until it has finished."""
        assert self.entrance is not None, "only a gateway runs clients' episodes"
        session = ChatSession(episode, self._dialect)
        try:
            with self.entrance.admitting(session) as keys:
                pending = PendingEpisode(session, keys, describe(episode, self.payload))
                with self.entrance.queue.waiting(pending):
                    await self._play(pending)
                await session.drain()
                session.raise_failure()
        finally:
            session.close()

    async def _play(self, pending: PendingEpisode) -> None:
        session = pending.session
        while not session.ended.done():
            session.raise_failure()
            left_s = self.idle_s - session.silent_s
            if not pending.taken.is_set():
                await pending.taken.wait()
                session.heard()
            elif left_s > 0:
                first: set[asyncio.Future[Any]] = {session.ended, session.failed}
                await asyncio.wait(first, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            else:
                raise ClientFailed(f"the client made no request for {self.idle_s:g} s")
        if (error := session.ended.result()) is not None:
            raise ClientFailed(f"the client reported a failure: {error}")
