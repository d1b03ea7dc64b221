"""A process's connection to the in-memory log, which behaves like a network.

A request arrives on a later turn of the event loop, and its answer takes another turn. Messages of
one lane (a partition that is written to, a sole writer, a consumer group) keep their order; lanes
overtake each other. If a process is killed, some of its requests have arrived, some arrive later
and others never do. A frozen process is silent.
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
from tests.memory.memory_faults import Faults
from tests.memory.memory_group import Member, MemoryGroup
from tests.memory.memory_state import State

DELIVERY_S = 30.0
"""How long a client waits for an answer."""

R = TypeVar("R")


@dataclass(eq=False, slots=True)
class _WireMessage:
    """A request or an answer on its way. If `sent`, it arrives even if its sender ends."""

    arrive: Callable[[], None]
    sent: bool = False


_Line = deque[_WireMessage]


class MemoryProcess:
    """One process's connection to the cluster."""

    def __init__(
        self, name: str, session_s: float, state: State, faults: Faults, context: Context
    ) -> None:
        """The cluster's side of each request runs in `context`, not in the process's own."""
        self.name = name
        self.faults = faults
        self._session_s = session_s
        self._state = state
        self._context = context
        self._gone = ""
        """Why the process has ended; empty while it runs."""
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
        """Runs `effect` in the cluster, and returns its answer.

        The request may arrive although the caller is cancelled. A lane of None is one that no
        other request has. Raises DependencyError once the process has ended.
        """
        self._check()
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting[future] = None
        future.add_done_callback(self._waiting.pop)
        lane = object() if lane is None else lane

        def arrive() -> None:
            try:
                answer = partial(_resolve, future, effect())
            except HeadraceError as error:
                answer = partial(_fail, future, error)
            self._dispatch(self._answers, lane, answer)

        self._dispatch(self._requests, lane, arrive)
        return await future

    async def send(self, effect: Callable[[], R], lane: Hashable) -> R:
        """Sends one record as `call` does. It may be reported as failed, written or not."""
        faults = self.faults
        lost, unanswered = faults.hit(faults.lost_sends), faults.hit(faults.lost_answers)
        if not lost and not unanswered:
            return await self.call(effect, lane)
        if not lost:
            await self.call(effect, lane)
        await asyncio.sleep(faults.fail_s)
        self._check()
        raise DependencyError(f"{self.name}: the log did not answer; the record may be written")

    async def turn(self) -> None:
        """Waits for a turn of the loop, and while the process is frozen or the log is down."""
        await asyncio.sleep(self.faults.delay())
        await self._running.wait()
        while down_s := self._state.down_s():
            await asyncio.sleep(down_s)
            await self._running.wait()
        self._check()

    def spawn(self, work: Coroutine[Any, Any, R]) -> asyncio.Task[R]:
        """Runs background work of the client library. Cancels it when the process ends."""
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        task.add_done_callback(retrieve_exception)
        return task

    def keep_session(self, group: MemoryGroup, member: Member) -> None:
        """Sends heartbeats for a member from now on."""
        self._members[member] = group
        if self._gone or not self._running.is_set():  # Its request to join was in flight.
            self._expel_in(self._session_s, group, member)

    def end_session(self, member: Member) -> None:
        """Sends no more heartbeats for a member."""
        self._members.pop(member, None)

    def lose_sessions(self, blind_s: float) -> None:
        """Its groups expel its members now. They learn that after `blind_s`."""
        loop = asyncio.get_running_loop()
        for member, group in self._members.items():
            group.leave(member)
            loop.call_later(blind_s, group.expel, member, context=self._context)

    def watch(self, wake: asyncio.Event) -> None:
        """Sets the event when the process ends, so that its waiters notice."""
        self._wakes[wake] = None

    def freeze(self) -> None:
        """Stops the process, as SIGSTOP does: it sends and receives nothing."""
        if self._running.is_set() and not self._gone:
            self._running.clear()
            self._stop_sending()

    def thaw(self) -> None:
        """Continues a frozen process, even if its sessions have expired."""
        if self._gone:  # Its sessions still expire.
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
        """Ends the process. Requests in flight may still arrive."""
        self.end(f"the process {self.name} was killed")

    def end(self, reason: str) -> None:
        """Ends the process: fails all requests that wait for an answer, and all later ones."""
        if self._gone:
            return
        if self._running.is_set():
            self._stop_sending()
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
        """Fails all requests that wait for an answer, as after the delivery time-out."""
        if self._gone or not self._running.is_set():
            return
        self._mark_sent()
        self._drop_unsent()
        self._fail_waiting(f"{self.name}: the log did not answer within {DELIVERY_S:g} s")

    @property
    def gone(self) -> bool:
        """Whether the process has ended."""
        return bool(self._gone)

    async def flush(self, limit_s: float) -> None:
        """Waits, bounded, for the answers to all requests."""
        if self._waiting:
            await asyncio.wait(list(self._waiting), timeout=limit_s)

    def _check(self) -> None:
        if self._gone:
            raise DependencyError(f"{self._gone} and can't reach the log any more")

    def _dispatch(
        self, lines: dict[Hashable, _Line], lane: Hashable, arrive: Callable[[], None]
    ) -> None:
        """Sends a message. It arrives later, and overtakes none of its lane."""
        lines.setdefault(lane, deque()).append(_WireMessage(arrive))
        self._travel(lines, lane)

    def _travel(self, lines: dict[Hashable, _Line], lane: Hashable) -> None:
        loop = asyncio.get_running_loop()
        delay = self.faults.delay()
        if delay:
            loop.call_later(delay, self._next, lines, lane, context=self._context)
        else:
            loop.call_soon(self._next, lines, lane, context=self._context)

    def _next(self, lines: dict[Hashable, _Line], lane: Hashable) -> None:
        """Delivers the first message of a lane, if it can arrive now."""
        line = lines.get(lane)
        if line is None or not (self._running.is_set() or line[0].sent):
            return
        if lines is self._requests and (down_s := self._state.down_s()):
            loop = asyncio.get_running_loop()
            loop.call_later(down_s, self._next, lines, lane, context=self._context)
            return
        message = line.popleft()
        if not line:
            del lines[lane]
        message.arrive()

    def _stop_sending(self) -> None:
        self._mark_sent()
        for member, group in self._members.items():
            self._expel_in(self._session_s, group, member)

    def _expel_in(self, seconds: float, group: MemoryGroup, member: Member) -> None:
        """Expels a member later. If the log is down then, a session later than it is back."""

        def expel() -> None:
            if down_s := self._state.down_s():
                self._expel_in(down_s + self._session_s, group, member)
            else:
                group.expel(member)

        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, expel, context=self._context)
        self._expulsions.append(timer)

    def _mark_sent(self) -> None:
        """Decides at random how many of each lane's requests have left the process."""
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


def retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Keeps asyncio from logging the error of a task that no caller waits for any more."""
    if not task.cancelled():
        task.exception()


def _resolve(future: asyncio.Future[R], result: R) -> None:
    if not future.done():  # Otherwise its caller was cancelled.
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: HeadraceError) -> None:
    if not future.done():
        future.set_exception(error)
