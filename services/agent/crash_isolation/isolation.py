"""Finds the episodes that crash their worker, by running the open episodes in child processes.

An agent's code can end its whole process: by a fault in a native library, by `os._exit`, or by
using too much memory. The next owner of the partition would run the same code and die, too. So
after DEATHS owners have died, all open episodes of the partition run in a child process, with the
recorded answers, and write to the log through this worker. If the child dies, each half of its
unfinished episodes runs in a child of its own, and so on. An episode that was alone in a child that
died ends as `poison`. All the others go on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.schemas.events import (
    ActionRequested,
    EpisodeStarted,
    Event,
    GenerationRequested,
    Ref,
)
from headrace.services.agent.attempt import Send
from headrace.services.agent.crash_isolation.frames import Frame
from headrace.services.agent.records import outcome_of
from headrace.services.agent.requests import Answer, close_after
from headrace.services.base.clock import now
from headrace.services.tasks.admission import refused
from headrace.services.worker.shard import ShardContext

logger = logging.getLogger(__name__)

DEATHS = 3
"""After this number of owners died with an episode open, it runs in isolation."""
CHILDREN = 8
"""Largest number of child processes of one worker at a time."""
HANG_S = 10.0
"""Seconds after the last deadline of its episodes at which a child counts as hanging."""


class Child(Protocol):
    """A child process for isolated episodes."""

    async def run(self, episodes: Sequence[IsolatedEpisode]) -> str | None:
        """Runs them until all have ended. If the process dies before that, returns how it died.

        It sets their `tell`, sends their events by their `relay`, and sets their `ended`.
        """

    async def aclose(self) -> None:
        """Ends the process, whatever it is doing."""


MakeChild = Callable[[], Awaitable[Child]]
"""Starts a child. Raises HeadraceError if it does not come up."""


@dataclass(eq=False)
class IsolatedEpisode:
    """An episode that runs in a child process. `answers` are as in EpisodeRun."""

    context: ShardContext
    started: EpisodeStarted
    recorded_at: float
    answers: dict[int, dict[str, Answer]]
    send: Send
    """Writes an event, an action to the partition of its environment."""
    cancelled: str | None = None
    """Why it is cancelled; None if it is not."""
    tell: Callable[[Frame], None] | None = None
    """Tells the child in which it runs what happens to it; None while there is no child."""
    ended: bool = False

    def __post_init__(self) -> None:
        self.attempt = max(self.started.attempt, *self.answers, 0)
        self._action: ActionRequested | None = None

    def on_answer(self, answer: Answer) -> None:
        """Takes an answer to this episode. If two have the same id, the first one counts."""
        known = self.answers.setdefault(answer.attempt, {})
        if answer.call not in known:
            known[answer.call] = answer
            self.attempt = max(self.attempt, answer.attempt)
            self._tell(Frame("answer", event=answer))

    def cancel(self, reason: str) -> None:
        """Ends the episode as cancelled."""
        self.cancelled = self.cancelled or reason
        self._tell(Frame("cancel", text=self.cancelled))

    def stop(self) -> None:
        """Ends the run and writes nothing: the episode's outcome is in the log."""
        self.ended = True
        self._tell(Frame("stop"))

    async def relay(self, event: Event) -> Ref:
        """Sends an event of the child to the log. Raises TooLarge if no record can hold it.

        If a request was answered before, it is not sent again: the child gets the recorded answer.
        """
        answer: Answer | None = None
        if isinstance(event, GenerationRequested | ActionRequested):
            self.attempt = max(self.attempt, event.attempt)
            answer = self.answers.get(event.attempt, {}).get(event.call)
        if isinstance(event, ActionRequested) and event.kind != "score":
            self._action = None if event.kind == "close" else event
        if answer is None:
            return await self.send(event)
        self._tell(Frame("answer", event=answer))
        return _NOT_SENT

    async def end_as_poison(self, death: str) -> None:
        """Writes the end of an episode whose code killed its child, too."""
        where = f"task {self.started.task}, sample {self.started.sample}"
        message = f"the agent's code killed {DEATHS} workers, then a process of its own ({death})"
        logger.error("poison: %s: %s", where, message)
        if self._action is not None:
            await self.send(close_after(self._action, None))
        outcome = outcome_of(
            self.started,
            "failed",
            refused("poison", message),
            attempt=self.attempt,
            seconds=max(0.0, now() - self.recorded_at),
        )
        await self.send(outcome)

    def _tell(self, frame: Frame) -> None:
        if self.tell is not None:
            self.tell(frame)


_NOT_SENT = Ref(topic="", partition=0, offset=0, digest=bytes(16))
"""The reference of a request that was not sent. Nothing uses it."""


class Isolation:
    """Runs episodes in children, and bisects them to find those that crash."""

    def __init__(self, make_child: MakeChild) -> None:
        self._make_child = make_child
        self._room = asyncio.Semaphore(CHILDREN)

    async def run(self, context: ShardContext, episodes: Sequence[IsolatedEpisode]) -> None:
        """Runs episodes of one shard in a child until it has ended. If it dies, splits them."""
        async with self._room:
            child = await self._make_child()
            try:
                death = await child.run(episodes)
            finally:
                for episode in episodes:
                    episode.tell = None
                await child.aclose()
        left = [episode for episode in episodes if not episode.ended]
        if death is None or not left:
            return
        logger.warning("a child process with %d isolated episodes died (%s)", len(episodes), death)
        if len(episodes) == 1:
            await left[0].end_as_poison(death)
            return
        middle = len(left) // 2
        for half in (left[:middle], left[middle:]):
            if half:
                context.spawn(self.run(context, half), "isolated episodes")
