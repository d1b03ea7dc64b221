"""Finds the episodes that crash their worker, by running the open episodes in child processes.

An agent's code can end its whole process: by a fault in a native library, by `os._exit`, or by
using too much memory. The next owner of the partition would run the same code and die, too. So
after DEATHS owners have died, all open episodes of the partition run in a child process, with the
recorded answers, and write to the log through this worker. If the child dies, each half of its
unfinished episodes runs in a child of its own, and so on. An episode that was alone in a child that
died ends as `poison`. All the others go on meanwhile. An episode that is cancelled or overdue while
it waits for a child ends without one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Protocol

from headrace.schemas.events import (
    ActionRequested,
    Ending,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    Failure,
    GenerationRequested,
    Ref,
)
from headrace.services.agent.attempt import Send
from headrace.services.agent.crash_isolation.frames import Frame
from headrace.services.agent.episode_run import MESSAGE
from headrace.services.agent.memory.unread_answers import KeptAnswer, UnreadAnswer, last_observed
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
TRIAL_S = 60.0
"""A child that has run this long, or longer if the one before it died late, is harmless."""
CHECK_S = 1.0
"""Seconds between two looks at what waits for a child."""


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
    answers: dict[int, dict[str, KeptAnswer]]
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
        self._closed = -1
        """The attempt whose environment was closed last."""

    def on_answer(self, answer: Answer, kept: KeptAnswer | None = None) -> None:
        """Takes an answer to this episode. If two have the same id, the first one counts.

        `kept` is what is kept of it for the next child, if that is not the answer itself.
        """
        known = self.answers.setdefault(answer.attempt, {})
        if answer.call not in known:
            known[answer.call] = kept or answer
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
        answer: KeptAnswer | None = None
        if isinstance(event, GenerationRequested | ActionRequested):
            self.attempt = max(self.attempt, event.attempt)
            answer = self.answers.get(event.attempt, {}).get(event.call)
        if isinstance(event, ActionRequested) and event.kind != "score":
            self._action = None if event.kind == "close" else event
            self._closed = event.attempt if event.kind == "close" else self._closed
        if isinstance(event, EpisodeEnded):
            await self._close()
        if answer is None:
            return await self.send(event)
        if isinstance(answer, UnreadAnswer):
            answer = await answer.read()
        self._tell(Frame("answer", event=answer))
        return _NOT_SENT

    async def end_as_poison(self, death: str) -> None:
        """Writes the end of an episode whose code killed its child, too."""
        where = f"task {self.started.task}, sample {self.started.sample}"
        message = f"the agent's code killed {DEATHS} workers, then a process of its own ({death})"
        logger.error("poison: %s: %s", where, message)
        if self._action is not None:
            await self.send(close_after(self._action, None))
        await self._end("failed", refused("poison", message))

    def failure_while_waiting(self) -> Failure | None:
        """Returns why it must end now, although it has no child. None: it may wait."""
        if self.cancelled is not None:
            return refused("cancelled", self.cancelled[:MESSAGE])
        if now() < self.started.deadline / 1000 + HANG_S:
            return None
        limit_s = self.started.submitted.deadline_s
        message = f"the episode did not end within {limit_s} s: it waited for a process of its own"
        return Failure(origin="infrastructure", code="deadline", message=message)

    async def end_without_child(self, failure: Failure) -> None:
        """Writes the end of an episode that is cancelled or overdue, and runs no code of it."""
        await self._close()
        ending: Ending = "cancelled" if self.cancelled is not None else "deadline"
        await self._end(ending, failure)

    async def _close(self) -> None:
        """Ends the environment, unless the child did. One that is cancelled before it asked for an
        action knows of none: the recorded answers are here."""
        answers = self.answers.get(self.attempt, {}).values()
        last = self._action or last_observed(answers)
        if last is not None and self._closed != self.attempt:
            await self.send(close_after(last, self.started.submitted.environment))

    async def _end(self, ending: Ending, failure: Failure) -> None:
        seconds = max(0.0, now() - self.recorded_at)
        attempt = self.attempt
        await self.send(outcome_of(self.started, ending, failure, attempt=attempt, seconds=seconds))

    def _tell(self, frame: Frame) -> None:
        if self.tell is not None:
            self.tell(frame)


_NOT_SENT = Ref(topic="", partition=0, offset=0, digest=bytes(16))
"""The reference of a request that was not sent. Nothing uses it."""


@dataclass(eq=False)
class _Group:
    """Episodes that run in one child, or wait for one."""

    episodes: Sequence[IsolatedEpisode]
    trial_s: float
    """Seconds after which its child counts as harmless."""
    began_s: float = inf
    """When its child began to run them, by the loop's clock."""
    retired: bool = False
    """Whether its child has to end, to make room."""

    def left(self) -> list[IsolatedEpisode]:
        """Returns the episodes that have not ended."""
        return [episode for episode in self.episodes if not episode.ended]


class Isolation:
    """Runs the isolated episodes of all shards of a worker in children, and bisects them.

    Episodes of all shards that wait share one child. If it dies, each half gets a child of its own.
    If all children are in use, those that are harmless end, and their episodes go on together in
    one child. A child is harmless after TRIAL_S and twice the time that the child lived in which
    its episodes ran before. So nothing waits for the end of other episodes.
    """

    def __init__(self, make_child: MakeChild) -> None:
        self._make_child = make_child
        self._waiting: list[IsolatedEpisode] = []
        self._halves: list[_Group] = []
        """They wait, too, each for a child of its own."""
        self._running: dict[asyncio.Task[str | None], _Group] = {}
        self._news = asyncio.Event()

    def add(self, episodes: Sequence[IsolatedEpisode]) -> None:
        """Runs episodes in children from now on, until each has ended."""
        self._waiting += episodes
        self._news.set()

    async def run(self) -> None:
        """Works until it is cancelled. Raises HeadraceError if a child does not come up."""
        try:
            while True:
                with suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_S if self._waits() else None):
                        await self._news.wait()
                self._news.clear()
                for task in [task for task in self._running if task.done()]:
                    self._on_done(self._running.pop(task), task)
                self._end_what_waits()
                self._start_children()
        finally:
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def _waits(self) -> bool:
        return bool(self._waiting or self._halves)

    def _on_done(self, group: _Group, task: asyncio.Task[str | None]) -> None:
        left = group.left()
        if task.cancelled():
            self._waiting += left
            return
        death = task.result()
        if death is None or not left:
            return
        count = len(group.episodes)
        logger.warning("a child process with %d isolated episodes died (%s)", count, death)
        if count == 1:
            left[0].context.spawn(left[0].end_as_poison(death), "poison")
            return
        trial_s = TRIAL_S + 2 * max(0.0, asyncio.get_running_loop().time() - group.began_s)
        middle = len(left) // 2
        self._halves += [_Group(half, trial_s) for half in (left[:middle], left[middle:]) if half]

    def _end_what_waits(self) -> None:
        """Ends waiting episodes that are cancelled or overdue. Forgets those that have ended."""
        for episode in [*self._waiting, *(one for half in self._halves for one in half.episodes)]:
            if not episode.ended and (failure := episode.failure_while_waiting()) is not None:
                episode.ended = True
                episode.context.spawn(episode.end_without_child(failure), "end isolated episode")
        self._waiting = [episode for episode in self._waiting if not episode.ended]
        self._halves = [half for half in self._halves if half.left()]

    def _start_children(self) -> None:
        while self._waits() and len(self._running) < CHILDREN:
            group = self._halves.pop(0) if self._halves else _Group(self._waiting, TRIAL_S)
            if group.episodes is self._waiting:
                self._waiting = []
            task = asyncio.create_task(self._in_child(group), name="isolated episodes")
            self._running[task] = group
            task.add_done_callback(lambda _: self._news.set())
        if self._waits():
            self._retire_harmless()

    def _retire_harmless(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for task, group in self._running.items():
            if not group.retired and now_s - group.began_s >= group.trial_s:
                group.retired = True
                task.cancel()

    async def _in_child(self, group: _Group) -> str | None:
        """Runs episodes in a child until they have ended. Returns how it died, if it did."""
        child = await self._make_child()
        group.began_s = asyncio.get_running_loop().time()
        try:
            return await child.run(group.episodes)
        finally:
            for episode in group.episodes:
                episode.tell = None
            await child.aclose()
