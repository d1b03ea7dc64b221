"""Runs episodes that may have killed their workers apart, and finds those that do.

An agent's code can end its whole process: a fault in a native library, `os._exit`, memory. The
next owner of the partition would run the same code and die as well, for ever. So after DEATHS
owners all that was open is suspect, and runs in a child process: from the same recorded answers,
with this worker as its way to the log. Where a child dies, each half of what it left unfinished
runs in a child of its own, until one alone has killed its child: that one is ended as `poison`,
and all the others have gone on meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from schemas.errors import TooLarge
from schemas.events import (
    ActionRequested,
    EpisodeStarted,
    Event,
    Failure,
    GenerationRequested,
    Ref,
)
from services.agent.frames import Frame
from services.agent.records import AgentSetup, outcome_of
from services.agent.requests import Answer, close_after
from services.clock import now
from services.shard import ShardContext

logger = logging.getLogger(__name__)

DEATHS = 3
"""So many owners died with an episode open: then it is run apart."""
CHILDREN = 8
"""Child processes of one worker at a time."""
HANG_S = 10.0
"""Seconds after the last deadline of a child's episodes: it hangs then, and is killed."""


class Child(Protocol):
    """A process of its own for suspects."""

    async def run(self, suspects: Sequence[Suspect]) -> str | None:
        """Runs them until all have ended; says how the process died where it did before."""

    def tell(self, suspect: Suspect, frame: Frame) -> None:
        """Tells the process what happens to one of them from outside."""

    async def aclose(self) -> None:
        """Ends the process, whatever it does."""


MakeChild = Callable[[], Awaitable[Child]]
"""Starts a child. HeadraceError where none comes up."""


class Suspect:
    """One episode that is run apart, as its shard and its child see it."""

    def __init__(
        self,
        context: ShardContext,
        started: EpisodeStarted,
        recorded_at: float,
        setup: AgentSetup,
        answers: dict[int, dict[str, Answer]],
    ) -> None:
        self.started = started
        self.recorded_at = recorded_at
        self.attempt = max(started.attempt, *answers, 0)
        self.cancelled: str | None = None
        """Why it is cancelled, where it is."""
        self.host: Child | None = None
        """The child that it runs in at the moment."""
        self.ended = False
        self._context = context
        self._setup = setup
        self._answers = answers
        self._action: ActionRequested | None = None

    def on_answer(self, answer: Answer) -> None:
        """Takes an answer of this episode: the first of its id counts."""
        known = self._answers.setdefault(answer.attempt, {})
        if answer.call not in known:
            known[answer.call] = answer
            self.attempt = max(self.attempt, answer.attempt)
            self._tell(Frame("answer", event=answer))

    def cancel(self, reason: str) -> None:
        """Ends the episode as cancelled."""
        self.cancelled = self.cancelled or reason
        self._tell(Frame("cancel", text=self.cancelled))

    def stop(self) -> None:
        """Ends the run without a word: the episode's outcome is in the log."""
        self.ended = True
        self._tell(Frame("stop"))

    def relay(self, event: Event, on_sent: Callable[[Ref | TooLarge], None]) -> None:
        """Sends what the child's episode would send; `on_sent` is told what became of it.

        A request that was answered before is not sent again: the child gets the recorded answer.
        """
        answer: Answer | None = None
        if isinstance(event, GenerationRequested | ActionRequested):
            self.attempt = max(self.attempt, event.attempt)
            answer = self._answers.get(event.attempt, {}).get(event.call)
        if isinstance(event, ActionRequested) and event.kind != "score":
            self._action = None if event.kind == "close" else event
        if answer is None:
            name = f"relay {self.started.task}/{self.started.sample}"
            self._context.spawn(self._send(event, on_sent), name)
        elif self.host is not None:
            on_sent(_NOWHERE)
            self._tell(Frame("answer", event=answer))

    async def end_as_poison(self, death: str) -> None:
        """Ends the episode in its code's stead."""
        where = f"task {self.started.task}, sample {self.started.sample}"
        message = f"the agent's code killed {DEATHS} workers, then a process of its own ({death})"
        logger.error("poison: %s: %s", where, message)
        if self._action is not None:
            await self._context.send(close_after(self._action, None))
        outcome = outcome_of(
            self.started,
            self._setup,
            None,
            "failed",
            Failure(origin="operator", code="poison", message=message),
            None,
            attempt=self.attempt,
            seconds=max(0.0, now() - self.recorded_at),
        )
        await self._context.send(outcome)

    def _tell(self, frame: Frame) -> None:
        if self.host is not None:
            self.host.tell(self, frame)

    async def _send(self, event: Event, on_sent: Callable[[Ref | TooLarge], None]) -> None:
        try:
            on_sent(await self._context.send(event))
        except TooLarge as error:
            on_sent(error)


_NOWHERE = Ref(topic="", partition=0, offset=0, digest=bytes(16))
"""Of a request that was not sent: nobody refers to one."""


class Isolation:
    """Finds the episodes that kill, by halves."""

    def __init__(self, make_child: MakeChild) -> None:
        self._make_child = make_child
        self._room = asyncio.Semaphore(CHILDREN)

    async def run(self, context: ShardContext, suspects: Sequence[Suspect]) -> None:
        """Runs suspects of one shard apart, until the child has ended; its halves go on alone."""
        async with self._room:
            child = await self._make_child()
            try:
                death = await child.run(suspects)
            finally:
                for suspect in suspects:
                    suspect.host = None
                await child.aclose()
        left = [suspect for suspect in suspects if not suspect.ended]
        if death is None or not left:
            return
        logger.warning("a child with %d suspects died (%s)", len(suspects), death)
        if len(suspects) == 1:
            await left[0].end_as_poison(death)
            return
        middle = len(left) // 2
        for half in (left[:middle], left[middle:]):
            if half:
                context.spawn(self.run(context, half), "suspects")
