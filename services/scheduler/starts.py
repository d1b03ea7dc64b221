"""Makes the records with which a task starts. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from headrace.schemas.events import EpisodeStarted, Failure, TaskSubmitted
from headrace.services.tasks.admission import refused, size_of

MAX_NAME = 1_000
"""A task that is not run keeps at most so many characters of each name."""
UNPROVED = "unproved_tenant"
"""The code of the verdict on a task whose tenant's key has not signed it."""
NO_TENANT = "(unproved)"
"""The tenant of such a task, so that it counts against nobody's limits."""
LOST = TaskSubmitted(
    source="unknown",
    task_id="unknown",
    item_id="unknown",
    agent="unknown",
    roles={},
    max_turns=1,
    max_tokens=1,
    deadline_s=1,
)
"""Stands for a task that the log no longer holds."""


@dataclass(frozen=True, slots=True)
class ChosenTask:
    """A task that starts now."""

    number: int
    verdict: Failure | None
    """Why it is not run. Then it starts as a single episode that ends at once."""


def unproved(why: str) -> Failure:
    """Returns the verdict on a task whose tenant's key has not signed it."""
    return refused(UNPROVED, why)


def cancelled(reason: str) -> Failure:
    """Returns the verdict on a task that is cancelled before it starts."""
    return refused("cancelled", reason[:MAX_NAME])


def lost() -> Failure:
    """Returns the verdict on a task that waited until its record was deleted."""
    return refused(
        "lost", "the task waited for longer than the log keeps it. Submit it again under a new id"
    )


def start_of_refused(
    number: int, submitted: TaskSubmitted | None, verdict: Failure, now_s: float
) -> EpisodeStarted:
    """Returns the start of the only episode of a task that is not run. None: the task is lost."""
    if submitted is None:
        submitted = LOST.model_copy(update={"task_id": str(number)})
    reduced = _without_bulk(submitted)
    if verdict.code == UNPROVED:
        reduced = reduced.model_copy(update={"tenant": NO_TENANT})
    return start(number, 0, reduced, now_s, verdict)


def _without_bulk(submitted: TaskSubmitted) -> TaskSubmitted:
    """A task that is not run, reduced to one sample and its names."""
    names = ("source", "task_id", "tenant", "item_id", "agent")
    changes: dict[str, object] = {name: getattr(submitted, name)[:MAX_NAME] for name in names}
    changes |= {"samples": 1, "payload": "{}", "options": "{}", "environment": None}
    changes |= {"roles": {}, "artifacts": (), "labels": {}}
    return submitted.model_copy(update=changes)


def start(
    number: int,
    sample: int,
    submitted: TaskSubmitted,
    now_s: float,
    verdict: Failure | None,
    versions: Mapping[str, int] = MappingProxyType({}),
) -> EpisodeStarted:
    """Returns the start of a sample. `versions` has the newest version of each policy."""
    return EpisodeStarted(
        task=number,
        sample=sample,
        submitted=submitted,
        seed=_seed(submitted.seed, number, sample),
        deadline=int(now_s * 1000) + max(1, submitted.deadline_s) * 1000,
        verdict=verdict,
        versions=dict(versions),
    )


def in_transactions(
    starts: Iterable[Sequence[EpisodeStarted]], most: int
) -> Iterator[list[EpisodeStarted]]:
    """Yields the starts of tasks in parts of at most `most` bytes. Those of a task stay together.

    A task with more bytes is a part of its own.
    """
    part: list[EpisodeStarted] = []
    size = 0
    for of_task in starts:
        more = size_of(of_task[0].submitted) * len(of_task)
        if part and size + more > most:
            yield part
            part, size = [], 0
        part += of_task
        size += more
    if part:
        yield part


def _seed(*parts: int) -> int:
    """A 63-bit seed that follows from its parts and differs for each sample."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


def pinned(submitted: TaskSubmitted, published: Mapping[str, int]) -> TaskSubmitted:
    """Returns an evaluation task with a version for every role, and any other task as it is."""
    if submitted.purpose != "evaluate":
        return submitted
    roles = {
        role: use
        if use.version is not None
        else use.model_copy(update={"version": published[use.policy]})
        for role, use in submitted.roles.items()
    }
    return submitted.model_copy(update={"roles": roles})
