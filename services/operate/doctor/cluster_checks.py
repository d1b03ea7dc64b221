"""Looks at the cluster: permissions, clocks, the schema registry, the blob store and retention."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping
from contextlib import aclosing, suppress
from pathlib import Path

from headrace.errors import HeadraceError
from headrace.schemas.events import Blob
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import INSTANCES, LOADS, RUNS, Topics
from headrace.services.base.clock import now
from headrace.services.kafka.access.visibility import ClusterView
from headrace.services.kafka.registry import Registry
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import CaughtUp, follow_records, read_records
from headrace.services.models.blobs import BlobStore
from headrace.services.namespace.apply import CONSUMERS
from headrace.services.namespace.retention import repairing, shortcomings
from headrace.services.operate.dead_letters.dead_letters import count_open
from headrace.services.operate.doctor.finding import Finding

CLOCKS_S = 2.5
"""How long new records are watched: workers report each second."""
AHEAD_S, BEHIND_S = 0.5, 5.0
"""A record whose time is later than its arrival by the first, or earlier by the second, comes from
another clock, or was long on its way."""
LISTED = 3
"""Topics that a finding names."""


def registry(url: str, properties: Mapping[str, str]) -> Finding:
    """Asks the schema registry for something. Blocks for some seconds at most.

    `properties` are those of its client.
    """
    client = Registry(url, properties=properties)
    try:
        client.lookup("headrace-doctor-value", '"string"')
    except HeadraceError as error:
        return Finding("registry", "problem", str(error), "Start it, or correct --registry-url")
    finally:
        client.close()
    return Finding("registry", "ok", "it answers")


def blobs(store: BlobStore, url: str) -> Finding:
    """Asks the blob store for a blob that does not exist. Blocks."""
    try:
        store.holds(Blob(sha256=bytes(32), size=1))
    except (HeadraceError, OSError) as error:
        return Finding(
            "blobs", "problem", f"{url}: {error}", "See whether it runs, and its address and keys"
        )
    if "://" not in url and not Path(url).is_dir():
        return Finding(
            "blobs", "warning", f"the folder {url} does not exist",
            "It is made by the first worker on this machine. If other hosts have the weights, give "
            "--blobs as they do",
        )  # fmt: skip
    return Finding("blobs", "ok", f"{url} answers")


def permissions(view: ClusterView, topics: Topics) -> Iterator[Finding]:
    """Judges what this principal may do with the topics and consumer groups of a namespace."""
    unreadable = [name for name, may in view.topics.items() if "READ" not in may]
    unwritable = [name for name, may in view.topics.items() if "WRITE" not in may]
    if unreadable:
        yield Finding(
            "permissions", "problem",
            f"this principal may not read {_listed(unreadable)}{_users(topics, unreadable)}",
            _grant("Read", unreadable),
        )  # fmt: skip
    if unwritable and len(unwritable) == len(view.topics):
        yield Finding(
            "permissions", "ok", "this principal may write to no topic: it can watch, and not work"
        )
    elif unwritable:
        yield Finding(
            "permissions", "problem",
            f"this principal may not write to {_listed(unwritable)}{_writers(topics, unwritable)}",
            _grant("Write", unwritable),
        )  # fmt: skip
    groups = [name for name, may in view.groups.items() if "READ" not in may]
    if groups and len(unwritable) < len(view.topics):
        yield Finding(
            "permissions", "problem",
            f"this principal may not join the consumer group {_listed(groups)}",
            f"Allow it: kafka-acls.sh --add --operation Read --group {groups[0]}",
        )  # fmt: skip
    if not unreadable and not unwritable and not groups:
        count = len(view.topics)
        yield Finding("permissions", "ok", f"this principal may read and write all {count} topics")


def _writers(topics: Topics, names: Collection[str]) -> str:
    writers = {topics.by_name(name).topic.writer for name in names}
    return f", which {' and '.join(sorted(writers))} must"


def _users(topics: Topics, names: Collection[str]) -> str:
    readers = [
        service
        for service, topic in CONSUMERS.items()
        if any(topics.by_name(name).topic.name == topic.name for name in names)
    ]
    return f", which {' and '.join(readers)} must" if readers else ""


def _grant(operation: str, names: Collection[str]) -> str:
    name = next(iter(names))
    return (
        "Allow it, for example: kafka-acls.sh --bootstrap-server HOST:PORT --add "
        f"--allow-principal User:NAME --operation {operation} --topic {name}"
    )


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:LISTED])
    return shown + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


async def clocks(log: EventLog) -> Finding:
    """Compares the times of records, which writers set, with when they arrive here."""
    watched = [log.topics.partition(one) for one in (LOADS, INSTANCES)]
    existing = await log.broker.list_topics()
    ends = await log.broker.ends([one for one in watched if one.topic in existing])
    late: dict[str, float] = {}

    async def follow() -> None:
        records = follow_records(log, {at: end for at, (_, end) in ends.items()})
        async with aclosing(records):
            async for item in records:
                if not isinstance(item, CaughtUp):
                    source = dict(item.headers).get("ce_source", b"").decode("utf-8", "replace")
                    lag = now() - item.timestamp
                    late[source] = min(lag, late.get(source, lag))

    if ends:
        with suppress(TimeoutError):
            await asyncio.wait_for(follow(), CLOCKS_S)
    ahead = await _newest_ahead(log)
    worst = min([*(-one for one in late.values()), -ahead], default=0.0, key=lambda one: -one)
    if worst > AHEAD_S:
        return Finding(
            "clocks", "problem", f"a writer's clock is {worst:.1f} s ahead of this machine's",
            "Deadlines and waits are counted by these clocks: synchronise them (NTP)",
        )  # fmt: skip
    slow = {source: lag for source, lag in late.items() if lag > BEHIND_S}
    if slow:
        source, lag = max(slow.items(), key=lambda one: one[1])
        return Finding(
            "clocks", "warning", f"records of {source} come {lag:.1f} s after their time",
            "Its clock is late, or it or the broker is overloaded: synchronise the clocks (NTP)",
        )  # fmt: skip
    if not late:
        return Finding("clocks", "ok", "no record is from the future; no worker reports now")
    lag = max(late.values())
    return Finding("clocks", "ok", f"records of {len(late)} workers come within {lag:.3f} s")


async def _newest_ahead(log: EventLog) -> float:
    """Returns how old the newest record of `runs` is, in seconds; negative: it is of the future."""
    at = log.topics.partition(RUNS)
    youngest = 0.0
    async with aclosing(read_records(log.broker, {at: (0, 2**63 - 1)})) as records:
        async for record in records:
            youngest = min(youngest, now() - record.timestamp)
    return youngest


async def retention(log: EventLog, recipe: Recipe) -> Finding:
    """Compares how long topics keep their records with what the recipe needs."""
    existing = await log.broker.list_topics()
    names = [topic.name for topic in log.topics if topic.name in existing]
    found = shortcomings(log.topics, recipe, await log.broker.topic_settings(names))
    if found:
        return Finding(
            "retention", "problem", "; ".join(map(str, found[:LISTED])),
            "Repair it: " + "; ".join(repairing(found)[:LISTED]),
        )  # fmt: skip
    return Finding("retention", "ok", f"{len(names)} topics keep their records long enough")


async def dead_letters(log: EventLog) -> Finding:
    """Counts the dead letters that are open, and those that were redriven."""
    still_open, redriven = await count_open(log)
    done = f", {redriven:,} redriven" if redriven else ""
    if still_open:
        return Finding(
            "dead letters", "warning", f"{still_open:,} open{done}",
            "See `headrace dead-letters list`",
        )  # fmt: skip
    return Finding("dead letters", "ok", f"none is open{done}")
