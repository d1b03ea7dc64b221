"""A process's line to the in-memory log, as if over a wire.

A request lands on a later turn of the event loop, and its answer takes another. Those of one lane
(a partition that is written to, a sole writer, a consumer group) keep their order; lanes overtake
each other. So a process that is killed may leave requests behind that have landed, others that
land later, and others that never will; one that is frozen falls silent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Hashable
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from headrace.errors import DependencyError, HeadraceError
from headrace.services.kafka.memory.memory_faults import Faults
from headrace.services.kafka.memory.memory_group import Member, MemoryGroup
from headrace.services.kafka.memory.memory_state import State

DELIVERY_S = 30.0
"""Seconds without an answer after which a client gives up."""

R = TypeVar("R")


@dataclass(eq=False, slots=True)
class _WireMessage:
    """A request, or an answer, on its way. `sent`: it arrives whatever becomes of its sender."""

    arrive: Callable[[], None]
    sent: bool = False


_Line = deque[_WireMessage]


class MemoryProcess:
    """One process's line to the cluster."""

    def __init__(
        self, name: str, session_s: float, state: State, faults: Faults, surroundings: Context
    ) -> None:
        """What reaches the cluster runs in `surroundings`: it is no part of the process."""
        self.name = name
        self.faults = faults
        self._session_s = session_s
        self._state = state
        self._surroundings = surroundings
        self._gone = ""
        """Why nothing reaches the cluster any more."""
        self._running = asyncio.Event()
        self._running.set()
        self._requests: dict[Hashable, _Line] = {}
        self._answers: dict[Hashable, _Line] = {}
        self._waiting: dict[asyncio.Future[Any], None] = {}
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._members: dict[Member, MemoryGroup] = {}
        self._expulsions: list[asyncio.TimerHandle] = []
        self._wakes: dict[asyncio.Event, None] = {}

    async def call(self, effect: Callable[[], R], lane: Hashable = None) -> R:
        """Has the cluster do something, and returns its answer. It may land though the caller is
        cancelled. None is a lane of its own. DependencyError once the process is gone."""
        self._check()
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        future.add_done_callback(self._waiting.pop)
        lane = object() if lane is None else lane

        def land() -> None:
            try:
                answer = partial(_resolve, future, effect())
            except HeadraceError as error:
                answer = partial(_fail, future, error)
            self._dispatch(self._answers, lane, answer)

        self._dispatch(self._requests, lane, land)
        return await future

    async def send(self, effect: Callable[[], R], lane: Hashable) -> R:
        """As `call`, for one record: it may be reported as failed, written or not."""
        faults = self.faults
        lost, unheard = faults.hit(faults.lost_sends), faults.hit(faults.lost_answers)
        if not lost and not unheard:
            return await self.call(effect, lane)
        if not lost:
            await self.call(effect, lane)
        await asyncio.sleep(faults.fail_s)
        self._check()
        raise DependencyError(f"{self.name}: the log did not answer: was the record written?")

    async def turn(self) -> None:
        """Passes a turn of the loop, and the time while the process is frozen or the log away."""
        await asyncio.sleep(self.faults.delay())
        await self._running.wait()
        while away_s := self._state.away_s():
            await asyncio.sleep(away_s)
            await self._running.wait()
        self._check()

    def spawn(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Runs what the client library does by itself. Cancelled when the process ends."""
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        task.add_done_callback(heard)
        return task

    def keep_session(self, group: MemoryGroup, member: Member) -> None:
        """Sends heartbeats for a member from now on."""
        self._members[member] = group
        if self._gone or not self._running.is_set():  # It joins late: its request was on its way.
            self._expel_in(self._session_s, group, member)

    def end_session(self, member: Member) -> None:
        """Sends no more heartbeats for it."""
        self._members.pop(member, None)

    def lose_sessions(self, blind_s: float) -> None:
        """Its groups expel its members now; it hears of that after `blind_s`, and reads on."""
        loop = asyncio.get_running_loop()
        for member, group in self._members.items():
            group.leave(member)
            loop.call_later(blind_s, group.expel, member, context=self._surroundings)

    def watch(self, wake: asyncio.Event) -> None:
        """Sets the event when the process is gone: what waits for it must hear of that."""
        self._wakes[wake] = None

    def freeze(self) -> None:
        """Stops the process, as SIGSTOP does: nothing is sent, nothing is heard."""
        if self._running.is_set() and not self._gone:
            self._running.clear()
            self._fall_silent()

    def thaw(self) -> None:
        """Lets a frozen process run on, whatever has become of its sessions."""
        if self._gone:  # its sessions run out
            return
        self._running.set()
        for timer in self._expulsions:
            timer.cancel()
        self._expulsions.clear()
        for lines in (self._requests, self._answers):
            for lane, line in lines.items():
                for _ in range(len(line)):
                    self._travel(lines, lane)

    def kill(self) -> None:
        """Ends the process without a word. What has left it may still land."""
        self.end(f"the process {self.name} was killed")

    def end(self, reason: str) -> None:
        """Fails all that still waits for the cluster, and all that comes after."""
        if self._gone:
            return
        if self._running.is_set():
            self._fall_silent()
        self._gone = reason
        self._running.set()
        self._drop_unsent()
        self._answers.clear()
        self._fail_waiting(reason)
        for task in list(self._tasks):
            task.cancel()
        for wake in self._wakes:
            wake.set()

    def give_up(self) -> None:
        """Reports all that waits for the cluster as failed: it was silent for too long."""
        if self._gone or not self._running.is_set():
            return
        self._commit_to_the_wire()
        self._drop_unsent()
        self._fail_waiting(f"{self.name}: the log did not answer within {DELIVERY_S:g} s")

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        return bool(self._gone)

    async def flush(self, limit_s: float) -> None:
        """Waits, bounded, for what is under way."""
        if self._waiting:
            await asyncio.wait(list(self._waiting), timeout=limit_s)

    def _check(self) -> None:
        if self._gone:
            raise DependencyError(f"{self._gone}: nothing reaches the log any more")

    def _dispatch(
        self, lines: dict[Hashable, _Line], lane: Hashable, arrive: Callable[[], None]
    ) -> None:
        """Sends a message off: it arrives later, and overtakes none of its lane."""
        lines.setdefault(lane, deque()).append(_WireMessage(arrive))
        self._travel(lines, lane)

    def _travel(self, lines: dict[Hashable, _Line], lane: Hashable) -> None:
        loop = asyncio.get_running_loop()
        delay = self.faults.delay()
        if delay:
            loop.call_later(delay, self._next, lines, lane, context=self._surroundings)
        else:
            loop.call_soon(self._next, lines, lane, context=self._surroundings)

    def _next(self, lines: dict[Hashable, _Line], lane: Hashable) -> None:
        """The head of a lane arrives, if it can."""
        line = lines.get(lane)
        if line is None or not (self._running.is_set() or line[0].sent):
            return
        if lines is self._requests and (away_s := self._state.away_s()):
            loop = asyncio.get_running_loop()
            loop.call_later(away_s, self._next, lines, lane, context=self._surroundings)
            return
        message = line.popleft()
        if not line:
            del lines[lane]
        message.arrive()

    def _fall_silent(self) -> None:
        self._commit_to_the_wire()
        for member, group in self._members.items():
            self._expel_in(self._session_s, group, member)

    def _expel_in(self, seconds: float, group: MemoryGroup, member: Member) -> None:
        """Lets a session run out; a log that is away counts it anew once it is back."""

        def expel() -> None:
            if away_s := self._state.away_s():
                self._expel_in(away_s + self._session_s, group, member)
            else:
                group.expel(member)

        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, expel, context=self._surroundings)
        self._expulsions.append(timer)

    def _commit_to_the_wire(self) -> None:
        """Of each lane's requests, the first few have left the process: by chance."""
        for line in self._requests.values():
            for message in line:
                if not message.sent and not self.faults.hit(self.faults.late):
                    break
                message.sent = True

    def _drop_unsent(self) -> None:
        for lane, line in list(self._requests.items()):
            kept = deque(message for message in line if message.sent)
            if kept:
                self._requests[lane] = kept
            else:
                del self._requests[lane]

    def _fail_waiting(self, reason: str) -> None:
        for future in list(self._waiting):
            _fail(future, DependencyError(reason))


def heard(task: asyncio.Task[Any]) -> None:
    """For a task that may fail though nobody waits for it any more: asyncio need not complain."""
    if not task.cancelled():
        task.exception()


def _resolve(future: asyncio.Future[R], result: R) -> None:
    if not future.done():  # Else its caller was cancelled.
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: HeadraceError) -> None:
    if not future.done():
        future.set_exception(error)
