"""Signed requests: whatever else is written, they count by keys alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.schemas.codec import Codec
from headrace.schemas.events import Event, LimitSet, QuotaSet, TaskCancelled, TaskSubmitted
from headrace.schemas.topics import DEAD_LETTERS, QUOTAS, TASKS, Topic, Topics
from headrace.schemas.untrusted.trusted_keys import TrustedKeys
from headrace.services.kafka.broker import Headers, Outgoing
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.log_reader import WHOLE, read_events, read_records
from headrace.services.log.request_signatures import (
    REQUEST_HEADER,
    REQUEST_KEY,
    RequestSigner,
)
from headrace.services.log.signatures import public_text, write_private_key
from tests.memory.memory_broker import MemoryBroker
from tests.memory.memory_registry import MemoryRegistry
from tests.unit.scheduler.test_core import task

TEAM, OTHER, OPERATOR, STRANGER = (
    Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(4)
)
TRUSTED = TrustedKeys(
    {"team": (public_text(TEAM),), "other": (public_text(OTHER),)}, (public_text(OPERATOR),)
)


class Scene:
    """A namespace with keys, and those who write to it."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.registry = MemoryRegistry()

    def log(
        self, key: Ed25519PrivateKey | None = None, name: str = "test", trusted: bool = True
    ) -> EventLog:
        """What somebody with this key opens. Without `trusted` it is a forger's, that signs all."""
        topics = Topics(name, ("default",), 1, trusted=TRUSTED if trusted else None)
        codec = Codec()
        self.registry.prepare(codec, topics)
        signer = RequestSigner(key)
        return EventLog(self.broker, topics, codec, self.registry, "someone", signer=signer)

    async def apply(self) -> None:
        await self.broker.create_topics({one.name: (1, {}) for one in self.log().topics})

    async def read(self, topic: Topic[Any]) -> list[Delivery[Event]]:
        log = self.log()
        whole = {log.topics.partition(topic): WHOLE}
        async with aclosing(read_events(log, whole)) as found:
            return [one async for one in found]


def mine(number: int) -> TaskSubmitted:
    return task(number, tenant="team")


def unsigned(scene: Scene, event: Event) -> Outgoing:
    return scene.log(trusted=False).outgoing(event)


def by_other_tenant(scene: Scene, event: Event) -> Outgoing:
    return scene.log(OTHER, trusted=False).outgoing(event)


def by_stranger(scene: Scene, event: Event) -> Outgoing:
    return scene.log(STRANGER, trusted=False).outgoing(event)


def of_other_namespace(scene: Scene, event: Event) -> Outgoing:
    signed = scene.log(TEAM, "another").outgoing(event)
    return replace(signed, topic=scene.log().topics.route(event).name)


def of_other_task(scene: Scene, event: Event) -> Outgoing:
    signed = scene.log(TEAM).outgoing(mine(10**6))
    return replace(unsigned(scene, event), headers=signed.headers)


def of_other_topic(scene: Scene, event: Event) -> Outgoing:
    value = unsigned(scene, event).value
    signer = RequestSigner(TEAM)
    cancelled = signer.sign(Outgoing("test.cancellations.v1", event.key, value, []))
    return replace(cancelled, topic=scene.log().topics.route(event).name)


def with_their_key_named(scene: Scene, event: Event) -> Outgoing:
    """A stranger's signature below the name of the tenant's key."""
    record = by_stranger(scene, event)
    ours, theirs = (public_text(one).encode() for one in (TEAM, STRANGER))
    return replace(
        record, headers=[(name, one.replace(theirs, ours)) for name, one in headers_of(record)]
    )


def with_two_headers(scene: Scene, event: Event) -> Outgoing:
    record = scene.log(TEAM).outgoing(event)
    more = [one for one in by_stranger(scene, event).headers if one[0] == REQUEST_HEADER]
    return replace(record, headers=[*more, *record.headers])


def with_odd_header(scene: Scene, event: Event) -> Outgoing:
    record = unsigned(scene, event)
    odd = public_text(TEAM).encode() + b":" + b"A" * 10**6
    return replace(record, headers=[*record.headers, (REQUEST_HEADER, odd)])


def headers_of(record: Outgoing) -> Headers:
    return record.headers


FORGERIES: tuple[Callable[[Scene, Event], Outgoing], ...] = (
    unsigned,
    by_other_tenant,
    by_stranger,
    of_other_namespace,
    of_other_task,
    of_other_topic,
    with_their_key_named,
    with_two_headers,
    with_odd_header,
)


@pytest.mark.slow
@given(st.lists(st.sampled_from([None, *FORGERIES]), max_size=12))
def test_a_key_is_proved_for_exactly_what_it_has_signed(
    history: list[Callable[[Scene, Event], Outgoing] | None],
) -> None:
    async def main() -> None:
        scene = Scene()
        await scene.apply()
        for number, forge in enumerate(history):
            event = mine(number)
            record = forge(scene, event) if forge else scene.log(TEAM).outgoing(event)
            await scene.broker.send(record)
        refused = [
            bool(TRUSTED.refusal("team", one.signed_by(TRUSTED.keys)))
            for one in await scene.read(TASKS)
        ]
        assert refused == [forge is not None for forge in history]

    asyncio.run(main())


def test_an_operator_may_act_for_every_tenant() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.apply()
        await scene.log(OPERATOR).send(mine(1))
        (found,) = await scene.read(TASKS)
        assert found.signed_by(TRUSTED.keys) == public_text(OPERATOR)
        assert found.signed_by([public_text(TEAM)]) == ""

    asyncio.run(main())


def test_a_record_that_is_redriven_or_copied_whole_keeps_its_signature() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.apply()
        record = scene.log(TEAM).outgoing(mine(1))
        await scene.broker.send(replace(record, headers=[*record.headers, ("more", b"1")]))
        (found,) = await scene.read(TASKS)
        assert found.signed_by(TRUSTED.keys) == public_text(TEAM)

    asyncio.run(main())


@pytest.mark.parametrize("key", [None, TEAM, STRANGER])
@pytest.mark.parametrize(
    "event",
    [
        task(1, tenant="other"),
        QuotaSet(tenant="team", set_at=1),
        LimitSet(limit="l", set_at=1, units=1),
    ],
)
def test_who_lacks_the_key_is_told_before_anything_is_written(
    key: Ed25519PrivateKey | None, event: Event
) -> None:
    async def main() -> None:
        scene = Scene()
        await scene.apply()
        with pytest.raises(UsageError, match=REQUEST_KEY) as error:
            await scene.log(key).send(event)
        assert key is None or public_text(key) in str(error.value)
        assert await scene.read(TASKS) == await scene.read(QUOTAS) == []

    asyncio.run(main())


def test_tenants_without_keys_need_none_unless_the_recipe_requires_them() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.apply()
        await scene.log().send(task(1, tenant="open"))
        await scene.log().send(TaskCancelled(source="test", task_id="1"))
        assert len(await scene.read(TASKS)) == 1

    asyncio.run(main())
    required = replace(TRUSTED, required=True)
    assert "require_keys" in required.refusal("open", "")
    assert required.refusal("open", public_text(TEAM))
    assert required.refusal("open", public_text(OPERATOR)) == ""


@pytest.mark.slow
@given(st.permutations(range(5)), st.data())
def test_only_operators_change_limits_and_no_older_change_comes_back(
    times: list[int], data: st.DataObject
) -> None:
    async def main() -> None:
        scene = Scene()
        await scene.apply()
        newest, expected = -1, []
        for time in times:
            key = data.draw(st.sampled_from([OPERATOR, OPERATOR, TEAM, STRANGER, None]))
            quota = QuotaSet(tenant="team", set_at=time, live_episodes=time)
            await scene.broker.send(scene.log(key, trusted=False).outgoing(quota))
            if key is OPERATOR and time > newest:
                newest = time
                expected.append(quota)
        assert [one.event for one in await scene.read(QUOTAS)] == expected

    asyncio.run(main())


def test_a_change_by_somebody_else_is_a_dead_letter() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.apply()
        log = scene.log()
        await scene.broker.send(
            scene.log(TEAM, trusted=False).outgoing(QuotaSet(tenant="team", set_at=1))
        )
        (record,) = [
            one async for one in read_records(scene.broker, {log.topics.partition(QUOTAS): WHOLE})
        ]
        assert await log.decode_or_dead_letter(record) is None
        letters = {log.topics.partition(DEAD_LETTERS): WHOLE}
        (letter,) = [one async for one in read_records(scene.broker, letters)]
        why = dict(letter.headers)["__connect.errors.exception.message"].decode()
        assert "scheduler.operators" in why

    asyncio.run(main())


def test_the_key_is_read_from_the_file_that_the_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = write_private_key(tmp_path / "key.pem")
    monkeypatch.delenv(REQUEST_KEY, raising=False)
    assert RequestSigner.of_environment().public_key == ""
    monkeypatch.setenv(REQUEST_KEY, str(tmp_path / "key.pem"))
    assert RequestSigner.of_environment().public_key == public_text(key)
    late = RequestSigner.of_environment(tmp_path / "absent.pem")  # It is read when it is needed.
    with pytest.raises(UsageError, match=r"absent\.pem"):
        _ = late.public_key
