"""What is written for tenants with keys in a whole run, and whether it counted as it should."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any, Literal

from headrace.schemas.events import (
    EpisodeEnded,
    EpisodeStarted,
    Event,
    TaskCancelled,
    TaskEnded,
    TaskSubmitted,
)
from headrace.services.kafka.broker import Broker, Outgoing
from headrace.services.log.event_log import Delivery
from headrace.services.log.request_signatures import RequestSigner
from headrace.services.operate.verify.invariants.log_facts import Facts
from headrace.services.scheduler import refused_tasks
from headrace.services.scheduler.starts import UNPROVED
from headrace.services.tasks.task_maker import Item, TaskMaker
from tests.simulation.forgeries import KEYS, PUBLIC
from tests.simulation.processes import Run
from tests.simulation.tenant_keys import SOURCE, Request

BURST = 20
"""So many forged tasks come at once, now and then."""
Forged = Literal["", "namespace", "value", "key"]
"""What is wrong with a signature."""
FORGED: tuple[Forged, ...] = ("", "", "", "namespace", "value", "key")


class Requests:
    """Writes requests, and knows who wrote each of them."""

    def __init__(self, run: Run, broker: Broker, chance: Random) -> None:
        self._run = run
        self._chance = chance
        self._log = run.forger(broker)
        self._tasks = TaskMaker(run.recipe, SOURCE)
        self._number = 0

    def write_some(self) -> None:
        """Writes some tasks and cancellations, by those who may and by others."""
        count = BURST if self._chance.random() < 0.2 else self._chance.randint(1, 4)
        for _ in range(count):
            tenant = self._chance.choice(["team", "team", "other"])
            task_id = str(self._number)
            if self._chance.random() < 0.8:  # Else the same id again: mostly a forged one before.
                self._number += 1
            task = self._tasks.make(Item("item"), task_id).model_copy(update={"tenant": tenant})
            who = self._chance.choice([tenant, "operator", *KEYS, ""])
            self._write(task, "stranger" if count == BURST else who)
            if self._chance.random() < 0.4:
                self._cancel(str(self._chance.randint(0, self._number)), forged=True)
            if self._chance.random() < 0.2:
                self._cancel(str(self._chance.randint(0, self._number)), forged=False)

    def cancel_what_waits(self) -> None:
        """Its own key cancels each task of the tenant that has no live episodes."""
        waiting = {
            one.event.task_id
            for one in self._run.requests
            if isinstance(one.event, TaskSubmitted) and one.event.tenant == "other"
        }
        for task_id in sorted(waiting, key=int):
            event = TaskCancelled(source=SOURCE, task_id=task_id, reason="healed", tenant="other")
            self._write(event, "other", "")

    def _cancel(self, task_id: str, *, forged: bool) -> None:
        tenant = self._chance.choice(["team", "other", None])
        who = "stranger" if forged else self._chance.choice([tenant or "team", "operator"])
        event = TaskCancelled(source=SOURCE, task_id=task_id, reason="asked", tenant=tenant)
        self._write(event, "" if forged and self._chance.random() < 0.5 else who)

    def _write(
        self, event: TaskSubmitted | TaskCancelled, who: str, drawn: Forged | None = None
    ) -> None:
        """Writes a request by somebody. If `drawn` is None, it is drawn what is wrong with it."""
        by_chance = self._chance.choice(FORGED) if drawn is None and who else ""
        forged: Forged = by_chance if drawn is None else drawn
        record = self.signed(event, who, forged)
        offset = self._run.cluster.state.append(record).offset
        # A stranger's signature that claims the team's key is false, and the team's own is true.
        true = not forged or (forged == "key" and who == "team")
        who = who if true and who != "stranger" else ""
        self._run.requests.append(Request(event, who, offset))

    def signed(self, event: Event, who: str, forged: Forged = "") -> Outgoing:
        """The record of an event, signed by somebody; with a signature that is wrong somehow."""
        record = self._log.outgoing(event)
        if not who:
            return record
        signed = record
        if forged == "namespace":
            signed = replace(record, topic=f"there.{record.topic}")
        elif forged == "value":
            signed = replace(record, value=record.value + b"x")
        headers = RequestSigner(KEYS[who]).sign(signed).headers
        if forged == "key":
            claimed = PUBLIC["team"].encode()
            headers = [
                (name, text.replace(PUBLIC[who].encode(), claimed)) for name, text in headers
            ]
        return replace(record, headers=headers)


def unlawful(run: Run, facts: Facts) -> Iterator[str]:
    """Forged requests that had an effect, and signed ones that had none."""
    tasks = [one for one in run.requests if isinstance(one.event, TaskSubmitted)]
    asked = [one for one in run.requests if isinstance(one.event, TaskCancelled)]
    starts: dict[int, list[EpisodeStarted]] = {}
    for start in facts.events(EpisodeStarted):
        starts.setdefault(start.task, []).append(start)
    ended = {one.task: one for one in facts.events(TaskEnded)}
    for one in tasks:
        tenant = _tenant(one)
        name = f"task {one.offset} of {tenant} by {one.who or 'nobody'}"
        if one.offset not in starts or one.offset not in ended:
            yield f"I1: {name} is lost"
            continue
        codes = {start.verdict.code if start.verdict else "" for start in starts[one.offset]}
        forged = not one.acts_for(tenant)
        if forged != (codes == {UNPROVED}):
            yield f"I1: {name} starts as {sorted(codes)}"
        how = {outcome.ending for outcome in ended[one.offset].outcomes}
        if forged or "cancelled" not in how:
            if forged and how != {"failed"}:
                yield f"I1: {name} is forged and ends as {sorted(how)}"
            continue
        if not any(_cancels(other, one) for other in asked) and not run.ending.is_set():
            yield f"I1: {name} is cancelled, and nobody who may has asked for it"
    yield from _crowds(facts)


def _cancels(asked: Request, task: Request) -> bool:
    event, submitted = asked.event, task.event
    same = (event.source, event.task_id) == (submitted.source, submitted.task_id)
    named = event.tenant in (None, submitted.tenant)
    return same and named and asked.acts_for(_tenant(task))


def _tenant(task: Request) -> str:
    return task.event.tenant or ""


def _crowds(facts: Facts) -> Iterator[str]:
    """More tasks that are not run are open than the scheduler may open."""
    open_now: dict[bool, set[int]] = {True: set(), False: set()}
    """By whether no key has signed them."""
    most = {True: refused_tasks.UNPROVED_LIVE, False: refused_tasks.REFUSED_LIVE}
    records: list[Delivery[Any]] = [*facts.all(EpisodeStarted), *facts.all(EpisodeEnded)]
    # Of what is recorded at the same moment, a start may know all the rest.
    for one in sorted(records, key=lambda o: (o.recorded_at, isinstance(o.event, EpisodeStarted))):
        event = one.event
        if isinstance(event, EpisodeEnded):
            for some in open_now.values():
                some.discard(event.task)
        elif event.verdict is not None:
            forged = event.verdict.code == UNPROVED
            open_now[forged].add(event.task)
            if len(open_now[forged]) > most[forged]:
                what = "forged" if forged else "refused"
                yield f"I8: task {event.task} is {what} task {len(open_now[forged])} that is open"
