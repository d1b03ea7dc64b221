"""The env worker's state of one partition: its open environments.

The shard holds a reset until its environment ends, so that the worker that is assigned the
partition next reads every action of each open episode again. Closes are never delayed: only the
environments themselves wait for slots.

The shard does not read observations. An action says by `after` which answer to the action before it
the agent saw. So the worker that is assigned the partition next knows the answers to all actions
but the newest one, and does that one again: if it was answered, the first answer counts, and the
next action shows it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from prometheus_client import Counter, Gauge

from headrace.errors import InfrastructureError
from headrace.schemas.events import ActionRequested, Failure
from headrace.services.base.clock import now
from headrace.services.env.answers import deliver, failed, infrastructure
from headrace.services.env.environment import Claim
from headrace.services.env.handle import Handle, History, score
from headrace.services.env.setup import Setup, Sweeping
from headrace.services.log.event_log import Delivery
from headrace.services.worker.shard import ShardContext

logger = logging.getLogger(__name__)

OPEN = Gauge("headrace_environments_open", "Environments that are open or wait for a slot.")
ACTIONS = Counter("headrace_actions_total", "Actions answered.", ["kind"])

SWEEP_S = 10.0
"""Seconds between two sweeps for sandboxes that no open episode needs."""
Key = tuple[int, int]
"""Task number, sample."""


@dataclass(eq=False)
class _Recorded:
    """What phase 1 read of one attempt."""

    reset: Delivery[ActionRequested]
    attempt: int
    release: Callable[[], None]
    actions: dict[str, ActionRequested] = field(default_factory=dict)


class EnvShard:
    """Reads the actions of one partition and answers them with observations."""

    def __init__(
        self,
        context: ShardContext,
        setups: Mapping[str, Setup],
        worker_id: str,
        external: Collection[str] = (),
        step_s: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """`setups` are keyed as in the recipe. Other teams run the `external` environments.

        `step_s` has the most seconds of a reset or a step, for the environments that have a limit.
        """
        self._context = context
        self._setups = setups
        self._worker_id = worker_id
        self._external = external
        self._step_s = step_s
        self._handles: dict[Key, Handle] = {}
        self._recorded: dict[Key, _Recorded] = {}
        self._strays: list[tuple[Delivery[ActionRequested], Callable[[], None]]] = []
        """Actions read in phase 1 that belong to no open environment."""
        self._read_to = context.begins_at - 1
        """Offset of the newest action read. All earlier actions are read or done."""

    async def on_event(self, delivery: Delivery[Any]) -> None:
        """Handle an action."""
        if delivery.event.environment.use in self._external:
            pass
        elif self._context.caught_up:
            self._on_action(delivery)
        else:
            self._note(delivery)
        self._read_to = delivery.offset

    async def on_caught_up(self) -> None:
        """Open each recorded environment, and rebuild it to do its newest action again."""
        for recorded in self._recorded.values():
            actions = sorted(recorded.actions.values(), key=lambda action: action.index)
            seen = _seen(actions)
            newest = actions[-1].index
            handle = self._open(recorded.reset, recorded.release, seen, newest)
            for action in actions[len(seen) :]:
                handle.put(action)
        for delivery, release in self._strays:
            if delivery.event.expires_at / 1000 > now():
                self._on_action(delivery)
            release()
        self._recorded.clear()
        self._strays.clear()
        for key, setup in self._setups.items():
            if isinstance(setup, Sweeping):
                self._context.spawn(self._sweep(setup), f"sweep {key}")

    async def aclose(self) -> None:
        """Note when the handles had to end. The shard's tasks are cancelled after this."""
        for handle in self._handles.values():
            handle.leave()

    def _note(self, delivery: Delivery[ActionRequested]) -> None:
        """Phase 1: keep the actions of each episode's highest attempt while it is open."""
        action = delivery.event
        key = action.task, action.sample
        recorded = self._recorded.get(key)
        if recorded is not None and action.attempt < recorded.attempt:
            return
        if action.kind == "reset":
            if recorded is not None and action.attempt > recorded.attempt:
                self._recorded.pop(key).release()
                recorded = None
            known = action.environment.use in self._setups
            if recorded is None and known and action.expires_at / 1000 > now():
                hold = self._context.hold(delivery, long=True)
                recorded = _Recorded(delivery, action.attempt, hold)
                self._recorded[key] = recorded
        current = recorded is not None and action.attempt == recorded.attempt
        if action.kind == "close":
            if current:
                self._recorded.pop(key).release()
        elif recorded is not None and current and action.kind != "score":
            recorded.actions.setdefault(action.call, action)
        elif delivery.offset >= self._context.done_below:
            self._strays.append((delivery, self._context.hold(delivery)))

    def _on_action(self, delivery: Delivery[ActionRequested]) -> None:
        action = delivery.event
        handle = self._handles.get((action.task, action.sample))
        if handle is not None and action.attempt < handle.attempt:
            return
        ACTIONS.labels(action.kind).inc()
        current = handle is not None and action.attempt == handle.attempt
        if action.kind == "close":
            if handle is not None:
                handle.end()
        elif action.environment.use not in self._setups:
            self._fail(delivery, _unknown(action.environment.use))
        elif action.kind == "score":
            self._context.spawn(self._score(delivery, self._context.hold(delivery)), "score")
        elif current:
            assert handle is not None
            handle.put(action)
        elif action.kind == "reset":
            if handle is not None:
                handle.end()
            self._open(delivery, self._context.hold(delivery, long=True)).put(action)
        else:  # the agent makes a new attempt
            self._fail(delivery, infrastructure("sandbox_lost", "its environment is not open"))

    def _open(
        self,
        delivery: Delivery[ActionRequested],
        release: Callable[[], None],
        history: History = (),
        unsure: int = -1,
    ) -> Handle:
        reset = delivery.event
        claim = replace(self._claim(delivery), repeated=unsure >= 0)
        setup = self._setups[reset.environment.use]
        step_s = self._step_s.get(reset.environment.use)
        send = self._context.send
        handle = Handle(setup, reset, send, self._worker_id, claim, history, step_s, unsure)
        key = reset.task, reset.sample
        self._handles[key] = handle
        OPEN.inc()
        handle.task = self._context.spawn(handle.run(), f"environment {reset.task}/{reset.sample}")

        def on_done(task: asyncio.Task[None]) -> None:
            OPEN.dec()
            # If the task failed, its reset stays held: the next worker must read all of it again.
            if task.cancelled() or task.exception() is None:
                release()
            if self._handles.get(key) is handle:
                del self._handles[key]

        handle.task.add_done_callback(on_done)
        return handle

    def _fail(self, delivery: Delivery[ActionRequested], failure: Failure) -> None:
        """Answer an action that no open environment can answer; hold it until that is durable."""
        release = self._context.hold(delivery)

        async def send() -> None:
            await self._context.send(failed(delivery.event, self._worker_id, failure))
            release()

        self._context.spawn(send(), "answer")

    def _claim(self, delivery: Delivery[ActionRequested]) -> Claim:
        action, partition = delivery.event, self._context.partition.number
        attempt = action.task, action.sample, action.attempt
        return Claim(*attempt, partition, delivery.offset, action.expires_at / 1000)

    async def _sweep(self, setup: Sweeping) -> None:
        """Remove sandboxes that no open episode needs, now and every SWEEP_S seconds."""

        def open_attempt(task: int, sample: int) -> int | None:
            handle = self._handles.get((task, sample))
            return None if handle is None else handle.attempt

        while True:
            try:
                await setup.sweep(self._context.partition.number, self._read_to, open_attempt)
            except InfrastructureError as error:
                logger.warning("unused sandboxes were not removed; the next sweep will: %s", error)
            await asyncio.sleep(SWEEP_S)

    async def _score(
        self, delivery: Delivery[ActionRequested], release: Callable[[], None]
    ) -> None:
        action = delivery.event
        setup = self._setups[action.environment.use]
        answer = await score(setup, action, self._claim(delivery), self._worker_id)
        await deliver(self._context.send, action, answer)
        release()


def _seen(actions: Sequence[ActionRequested]) -> list[tuple[ActionRequested, bytes]]:
    """Returns the first actions of which the agent has the answers, each with its answer's digest.

    `actions` are those of one attempt, by index.
    """
    seen = []
    for action, following in pairwise(actions):
        if following.after is None or following.index != action.index + 1:
            break
        seen.append((action, following.after))
    return seen


def _unknown(use: str) -> Failure:
    message = f"the recipe has no environment {use!r}; add [environments.{use}] or fix the task"
    return Failure(origin="operator", code="unknown_environment", message=message)
