"""The agent `client`: an episode waits until a client from outside takes it and plays it.

A client that has the gateway's key takes the episode that has waited longest. It gets the task, and
an API key for that attempt. Then it plays the episode through OpenAI's API, and reports the end.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from headrace.errors import UsageError
from headrace.services.agent.episode import Episode
from headrace.services.agent.gateway.chat_session import (
    ChatSession,
    describe,
    make_dialect,
    read_payload_keys,
)
from headrace.services.base.tool_calls import Format

if TYPE_CHECKING:
    from headrace.services.agent.gateway.server import Keys


class ClientFailed(Exception):
    """The client is gone or reported a failure. The attempt fails; the policy is not blamed."""


@dataclass(eq=False)
class PendingEpisode:
    """An attempt that waits for a client or has one."""

    session: ChatSession
    keys: Keys
    task: Mapping[str, Any]
    taken: asyncio.Event = field(default_factory=asyncio.Event)


class EpisodeQueue:
    """The attempts of a worker that wait for clients, in order."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[PendingEpisode, None] = OrderedDict()
        self._came = asyncio.Event()

    @contextmanager
    def waiting(self, pending: PendingEpisode) -> Iterator[None]:
        """Keeps an attempt in the queue within the `with` block, until it is taken."""
        self._waiting[pending] = None
        self._came.set()
        try:
            yield
        finally:
            self._waiting.pop(pending, None)

    async def take(self, wait_s: float) -> PendingEpisode | None:
        """Takes the attempt that has waited longest. Returns None if none comes within `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                while not self._waiting:
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            return None
        pending, _ = self._waiting.popitem(last=False)
        pending.taken.set()
        return pending

    def give_back(self, pending: PendingEpisode) -> None:
        """Returns an attempt to the head of the queue: the client that took it disconnected."""
        pending.taken.clear()
        self._waiting[pending] = None
        self._waiting.move_to_end(pending, last=False)
        self._came.set()


class Entrance(Protocol):
    """The server that clients connect to."""

    queue: EpisodeQueue

    def admitting(self, session: ChatSession) -> AbstractContextManager[Keys]:
        """Admits a client to a session; gives the client's keys until the context ends."""


class ClientAgent:
    """An agent that runs outside, in a client."""

    replayable = False

    def __init__(
        self,
        idle_s: float = 60.0,
        tool_calls: Format = "hermes",
        models: Mapping[str, str] | None = None,
        payload: Sequence[str] | None = None,
    ) -> None:
        """A client that makes no request for `idle_s` seconds, and waits for none, counts as gone.

        `tool_calls` says how the model spells calls. `models` maps further names of models to
        roles. `payload` names the keys of the task's payload that the client gets; by default it
        gets all. Raises UsageError if an option is wrong.
        """
        if not idle_s > 0:
            raise UsageError(f"idle_s must be above 0, not {idle_s}")
        self.entrance: Entrance | None = None
        """Set by the gateway."""
        self._idle_s = idle_s
        self._dialect = make_dialect(tool_calls, models)
        self._payload = read_payload_keys(payload)

    async def __call__(self, episode: Episode) -> None:
        """Waits for a client, and until it has finished."""
        assert self.entrance is not None, "only a gateway runs clients' episodes"
        session = ChatSession(episode, self._dialect)
        try:
            with self.entrance.admitting(session) as keys:
                pending = PendingEpisode(session, keys, describe(episode, self._payload))
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
            left_s = self._idle_s - session.silent_s
            if not pending.taken.is_set():
                await pending.taken.wait()
                session.heard()
            elif left_s > 0:
                first: set[asyncio.Future[Any]] = {session.ended, session.failed}
                await asyncio.wait(first, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            else:
                raise ClientFailed(f"the client made no request for {self._idle_s:g} s")
        if (error := session.ended.result()) is not None:
            raise ClientFailed(f"the client reported a failure: {error}")
