"""What the audit trail lists: who did what, and what of it is proved."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from headrace.errors import DependencyError
from headrace.schemas.events import Event, TaskCancelled
from headrace.schemas.topics import AUDIT, CANCELLATIONS, TASKS, Topic, Topics
from headrace.services.kafka.broker import Outgoing, Position
from headrace.services.log.log_reader import WHOLE, read_records
from headrace.services.log.signatures import public_text
from headrace.services.operate.audit.audit_entries import AuditEntry, AuditList
from headrace.services.operate.audit.audit_trail import MOST_DETAILS, operation
from headrace.services.operate.prune.prune_record import recorded_in
from tests.memory.memory_broker import MemoryBroker
from tests.unit.log.test_request_signatures import (
    OPERATOR,
    STRANGER,
    TEAM,
    TRUSTED,
    Scene,
    mine,
)
from tests.unit.operate.prune.shared_cluster import SharedCluster
from tests.unit.scheduler.test_core import task

Written = tuple[Ed25519PrivateKey | None, Event]


def listed(*written: Written, last: int = 50, only: tuple[str, ...] = ()) -> list[AuditEntry]:
    """What is listed after these records."""

    async def main() -> list[AuditEntry]:
        scene = Scene()
        await scene.apply()
        for key, event in written:
            await scene.broker.send(scene.log(key, trusted=False).outgoing(event))
        found, log = AuditList(TRUSTED, last, only), scene.log()
        for topic in (TASKS, CANCELLATIONS, AUDIT):
            whole = {log.topics.partition(topic): WHOLE}
            async for record in read_records(scene.broker, whole):
                found.add(await log.decode(record), "someone")
        return list(found.entries())

    return asyncio.run(main())


def test_what_is_proved_and_what_is_claimed_are_told_apart() -> None:
    quota = replace_by(operation("quota", "team", "weight 2"))
    entries = listed(
        (TEAM, mine(1)),
        (None, mine(2)),
        (STRANGER, mine(3)),
        (OPERATOR, TaskCancelled(source="test", task_id="1", reason="wrong")),
        (None, quota),
        (OPERATOR, quota),
    )
    shown = {(one.operation, one.holder, one.key, bool(one.refused)) for one in entries}
    assert shown == {
        ("submit", "team", public_text(TEAM), False),
        ("submit", "", "", True),
        ("submit", "", public_text(STRANGER), True),
        ("cancel", "operator", public_text(OPERATOR), False),
        ("quota", "", "", True),
        ("quota", "operator", public_text(OPERATOR), False),
    }
    who = {one.who for one in entries if one.operation == "quota"}
    proved = f"operator (proved, …{public_text(OPERATOR)[-9:]})"
    assert who == {"ada@laptop (claimed)", proved}
    assert [one.details for one in entries if one.operation == "cancel"] == ["wrong"]


def replace_by(event: Event) -> Event:
    return event.model_copy(update={"by": "ada@laptop"})


def test_submissions_in_a_row_are_one_entry_and_the_rest_is_bounded() -> None:
    many: list[Written] = [(TEAM, mine(number)) for number in range(20)]
    (entry,) = listed(*many)
    assert (entry.first, entry.count) == (0, 20)
    assert entry.what == "20 tasks from 0 of test, tenant team"
    mixed = [(None, task(number, source=f"team-{number}", tenant="open")) for number in range(9)]
    entries = listed(*mixed, last=4)
    assert [one.subject for one in entries] == [f"team-{n}, tenant open" for n in range(5, 9)]
    assert listed(*mixed, only=("cancel",)) == []


def test_details_are_bounded_and_name_the_user() -> None:
    recorded = operation("quota", "a", "x" * 10_000)
    assert len(recorded.details) == MOST_DETAILS
    assert "@" in recorded.by


class Refusing(MemoryBroker):
    """A broker that takes no record of `audit`."""

    async def send(self, record: Outgoing) -> Position:
        if record.topic.endswith("audit.v1"):
            raise DependencyError("not authorised")
        return await super().send(record)


async def recorded(cluster: SharedCluster, namespace: str, topic: Topic[Any]) -> list[str]:
    log = cluster.log(namespace)
    whole = {log.topics.partition(topic): WHOLE}
    return [
        getattr((await log.decode(record)).event, "details", "")
        async for record in read_records(cluster.broker, whole)
    ]


def test_prune_is_recorded_in_the_namespaces_that_lose_something(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = SharedCluster(tmp_path, MemoryBroker())
        await cluster.make("losing", b"1", b"2")
        await cluster.make("other", b"3")
        await cluster.make("gone", b"4")
        pruner = cluster.pruner()
        await pruner.carry_out(await pruner.plan(1, False, ()))
        assert await recorded(cluster, "losing", AUDIT) == ["1 blob; 1 bytes"]
        assert await recorded(cluster, "other", AUDIT) == []
        await pruner.carry_out(await pruner.plan(1, False, ["gone"]))
        told = await recorded(cluster, "losing", AUDIT) + await recorded(cluster, "other", AUDIT)
        assert any("forgotten: gone" in one for one in told), told

    asyncio.run(main())


def test_nothing_is_pruned_if_it_can_t_be_recorded(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = SharedCluster(tmp_path, Refusing())
        blobs = await cluster.make("losing", b"1", b"2")
        pruner = cluster.pruner()
        with pytest.raises(DependencyError, match="not authorised"):
            await pruner.carry_out(await pruner.plan(1, False, ()))
        assert cluster.held(blobs) == [True, True]

    asyncio.run(main())


def test_a_namespace_of_an_earlier_version_has_no_record() -> None:
    existing = {one.name: 1 for one in Topics("new", ("default",), 1)}
    existing |= {"old.runs.v1": 1}
    assert recorded_in([], "memory", existing, "new") == ["new"]
    assert recorded_in([], "memory", existing, "old") == []


def test_a_record_of_the_trail_that_is_copied_to_another_namespace_proves_nothing() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.apply()
        signed = scene.log(OPERATOR, "another").outgoing(operation("prune", "another"))
        log = scene.log()
        await scene.broker.send(replace(signed, topic=log.topics.name(AUDIT)))
        (found,) = await scene.read(AUDIT)
        listing = AuditList(TRUSTED, 5)
        listing.add(found, "x")
        assert [one.key for one in listing.entries()] == [""]

    asyncio.run(main())
