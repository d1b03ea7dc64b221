"""Cancellation of tasks: which are cancelled, who is notified, and what `headrace cancel` writes.

The scheduler uses `CancelledTasks`, which reads no log. An agent worker has one `Cancellations` for
all its partitions: it reads the topic `cancellations`, which has one partition, once. It does not
matter when it reads a cancellation: an outcome in the log is final, and the owner of an episode
that has no outcome gets the same cancellations before or after the start of the episode.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal

from headrace.errors import UsageError
from headrace.schemas.events import EpisodeStarted, TaskCancelled, TaskEnded, TaskSubmitted
from headrace.schemas.topics import CANCELLATIONS, EPISODES, RESULTS, TASKS
from headrace.schemas.untrusted.trusted_keys import TrustedKeys
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import WHOLE, follow_events, read_events

KEPT = 100_000
"""Maximum number of cancellations that an agent worker keeps. The oldest is dropped first."""
KEPT_BY_SCHEDULER = 2_000_000
"""The same for the scheduler: more than the tasks that wait in its memory."""
IN_FLIGHT = 256
"""Number of cancellations that are written at the same time."""

TaskId = tuple[str, str] | tuple[str, str, str]
"""A task's source, its id there, and its tenant if the recipe names keys of that tenant."""
OnCancelled = Callable[[TaskId, str], None]
"""Takes a task that is cancelled, and the reason."""
State = Literal["queued", "running", "ended", "unknown", "refused", "left"]
"""`refused`: no key of its tenant has signed it. `left`: it needs another key to be cancelled."""


class CancelledTasks:
    """The newest cancellations. If a task is cancelled twice, the first reason stays.

    A cancellation counts for the tasks of those tenants for which its key may act.
    """

    def __init__(self, trusted: TrustedKeys | None = None, kept: int = KEPT) -> None:
        """`kept` is the maximum number of cancellations in memory for each tenant with keys, and
        for all other tenants together."""
        self.trusted = trusted or TrustedKeys()
        self._kept = kept
        self._reasons: dict[str, OrderedDict[TaskId, str]] = {}
        """By scope, so that nobody displaces the cancellations of a tenant with keys."""

    def id_of(self, submitted: TaskSubmitted) -> TaskId:
        """Returns the id of a task."""
        scope = self.trusted.scope(submitted.tenant)
        return _id_in(scope, submitted.source, submitted.task_id)

    def add(self, event: TaskCancelled, key: str = "") -> list[TaskId]:
        """Adds a cancellation that `key` has signed; it is empty if no trusted key has.

        Returns the ids that are cancelled by it, and were not before.
        """
        return [
            task
            for scope in self.trusted.scopes(key, event.tenant)
            if self._add(scope, task := _id_in(scope, event.source, event.task_id), event.reason)
        ]

    def _add(self, scope: str, task: TaskId, reason: str) -> bool:
        reasons = self._reasons.setdefault(scope, OrderedDict())
        if task in reasons:
            return False
        if len(reasons) >= self._kept:
            reasons.popitem(last=False)
        reasons[task] = reason
        return True

    def reason(self, submitted: TaskSubmitted) -> str | None:
        """Returns why a task is cancelled, which may be empty, or None if it is not cancelled."""
        reasons = self._reasons.get(self.trusted.scope(submitted.tenant))
        return None if reasons is None else reasons.get(self.id_of(submitted))


def _id_in(scope: str, source: str, task_id: str) -> TaskId:
    return (source, task_id, scope) if scope else (source, task_id)


class Cancellations(CancelledTasks):
    """Follows `cancellations`, and notifies the shards of an agent worker."""

    def __init__(self, log: EventLog) -> None:
        super().__init__(log.topics.trusted)
        self._log = log
        self._subscribers: dict[OnCancelled, None] = {}

    def subscribe(self, on_cancelled: OnCancelled) -> None:
        """Calls `on_cancelled` for each task that is cancelled from now on."""
        self._subscribers[on_cancelled] = None

    def unsubscribe(self, on_cancelled: OnCancelled) -> None:
        """Ends a subscription, if there is one."""
        self._subscribers.pop(on_cancelled, None)

    async def follow(self) -> None:
        """Reads the topic without end. Raises DependencyError if the broker does not answer."""
        cancellations = self._log.topics.partition(CANCELLATIONS)
        async with aclosing(follow_events(self._log, {cancellations: "first"})) as items:
            async for item in items:
                if not isinstance(item, Delivery) or not isinstance(item.event, TaskCancelled):
                    continue
                for task in self.add(item.event, item.signed_by(self.trusted.keys)):
                    for notify in list(self._subscribers):
                        notify(task, item.event.reason)


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """The status in the log of a task that shall be cancelled."""

    source: str
    task_id: str
    number: int | None
    """None if no such task was submitted yet. A cancellation applies once it is submitted."""
    state: State
    tenant: str | None = None
    """None if no such task was submitted yet."""
    counts_for: str = ""
    """For which tenants the cancellation of a task that was not submitted yet counts. It is empty
    if it counts for all."""


def check_named(tasks: Sequence[str], source: str | None, *, all_queued: bool) -> None:
    """Raises UsageError unless the options of `headrace cancel` name tasks in exactly one way."""
    if all_queued == bool(tasks) or (all_queued and source is not None):
        raise UsageError("name the tasks to cancel, or give --all-queued alone")
    for task in tasks:
        if source is None and not task.isdecimal():
            raise UsageError(
                f"{task!r} is not a task number. To name tasks by the ids that their source gave "
                "them, add --source NAME"
            )


async def find_tasks(
    log: EventLog, tasks: Sequence[str], source: str | None, *, all_queued: bool
) -> list[TaskStatus]:
    """Finds tasks by the ids that their source gave them or, without `source`, by their numbers.

    With `all_queued`, those that need the signature of another key are `left`. Raises UsageError if
    no task has one of the numbers.
    """
    trusted, key = log.topics.trusted, log.signer.public_key
    statuses = await _read_statuses(log)
    if all_queued:
        queued = [status for status in statuses.values() if status.state == "queued"]
        return [replace(one, state="left") if _denied(one, trusted, key) else one for one in queued]
    if source is None:
        numbers = list(dict.fromkeys(map(int, tasks)))
        for number in numbers:
            if number not in statuses:
                raise UsageError(f"no task has the number {number}; nothing was cancelled")
        return [statuses[number] for number in numbers]
    named = dict.fromkeys(tasks)
    return [one for task in named for one in _by_id(statuses.values(), source, task, trusted, key)]


def _by_id(
    statuses: Iterable[TaskStatus], source: str, task_id: str, trusted: TrustedKeys, key: str
) -> list[TaskStatus]:
    """Returns the tasks of a source with an id, one for each scope of ids.

    Those that need another key are left out if there are others. Forged tasks have no id. Of the
    tasks of one scope, it is the first one that has not ended, if there is one.
    """
    by_scope: dict[str, TaskStatus] = {}
    for one in statuses:
        if (one.source, one.task_id) == (source, task_id) and one.state != "refused":
            scope = trusted.scope(str(one.tenant))
            if scope not in by_scope or by_scope[scope].state == "ended":
                by_scope[scope] = one
    found = list(by_scope.values())
    if not found:
        return [TaskStatus(source, task_id, None, "unknown", counts_for=trusted.covered(key))]
    return [one for one in found if not _denied(one, trusted, key)] or found


def _denied(one: TaskStatus, trusted: TrustedKeys, key: str) -> str:
    """Returns why `key` can't cancel a task; an empty text if it can, or no key could."""
    if one.state in ("ended", "refused", "left"):
        return ""
    if one.tenant is not None:
        return trusted.refusal(one.tenant, key)
    return "" if trusted.scopes(key) else "it counts for no tenant without a key of the recipe"


async def _read_statuses(log: EventLog) -> dict[int, TaskStatus]:
    """Reads `tasks`, `episodes` and `results` to their ends. Returns the tasks by number."""
    partitions = [
        partition
        for topic in (TASKS, EPISODES, RESULTS)
        for partition in log.topics.partitions_of(topic)
    ]
    ids: dict[int, tuple[str, str, str]] = {}
    states: dict[int, State] = {}
    refused: set[int] = set()
    async with aclosing(read_events(log, dict.fromkeys(partitions, WHOLE))) as deliveries:
        async for item in deliveries:
            if isinstance(item.event, TaskSubmitted):
                task = item.event
                ids[item.offset] = task.source, task.task_id, task.tenant
                if item.refusal(log.topics.trusted, task.tenant):
                    refused.add(item.offset)
            elif isinstance(item.event, EpisodeStarted):
                states.setdefault(item.event.task, "running")
            elif isinstance(item.event, TaskEnded):
                states[item.event.task] = "ended"
    states.update(dict.fromkeys(refused, "refused"))
    return {
        number: TaskStatus(source, task_id, number, states.get(number, "queued"), tenant)
        for number, (source, task_id, tenant) in ids.items()
    }


async def send_cancellations(log: EventLog, statuses: Sequence[TaskStatus], reason: str) -> None:
    """Writes a cancellation of each task that has not ended, and that is not refused or left.

    Raises UsageError, before it writes any, if one of the tasks needs the signature of another key.
    """
    for one in statuses:
        if why := _denied(one, log.topics.trusted, log.signer.public_key):
            name = f"{one.source}/{one.task_id}" if one.number is None else str(one.number)
            raise UsageError(f"task {name} can't be cancelled: {why}. Nothing was cancelled")
    events = [
        TaskCancelled(source=one.source, task_id=one.task_id, reason=reason, tenant=one.tenant)
        for one in statuses
        if one.state not in ("ended", "refused", "left")
    ]
    for first in range(0, len(events), IN_FLIGHT):
        await asyncio.gather(*map(log.send, events[first : first + IN_FLIGHT]))
