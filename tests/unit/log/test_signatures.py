"""Signed publications: whatever else is in `policies`, readers see those of the trainer alone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from headrace.errors import UsageError
from headrace.schemas.codec import Codec
from headrace.schemas.events import Blob, PolicyPublished
from headrace.schemas.recipe.policy import Policy
from headrace.schemas.topics import DEAD_LETTERS, POLICIES, Topics
from headrace.schemas.untrusted.public_keys import key_bytes
from headrace.services.kafka.broker import Outgoing, Record
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import (
    WHOLE,
    CaughtUp,
    Tail,
    follow_events,
    read_events,
    read_records,
)
from headrace.services.log.signatures import (
    HEADER,
    KEY_VARIABLE,
    NumberOrder,
    PublicationSigner,
    find_signer,
    public_text,
    read_private_key,
    signers_of,
    write_private_key,
)
from tests.memory.memory_broker import MemoryBroker
from tests.memory.memory_registry import MemoryRegistry

OLD, NEW, STRANGER = (Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32) for n in range(3))
TRUSTED = (public_text(OLD), public_text(NEW))


def published(version: int, weights: int) -> PolicyPublished:
    return PolicyPublished(
        policy="default",
        version=version,
        status="trained",
        digest=bytes([weights]) * 32,
        full=Blob(sha256=bytes([weights]) * 32, size=1),
        full_version=version,
    )


class Scene:
    """A namespace whose versions are signed, its trainer, and an attacker who may write to it."""

    def __init__(self, signers: Sequence[str] = TRUSTED) -> None:
        self.broker = MemoryBroker()
        self.registry = MemoryRegistry()
        self.topics = Topics("test", ("default",), 1, signers={"default": signers})
        self.partition = self.topics.partition(POLICIES)
        self.log = self.reader()
        self.signer = PublicationSigner(OLD, 0)

    def reader(self, namespace: str = "test") -> EventLog:
        codec = Codec()
        topics = Topics(namespace, ("default",), 1, signers=self.topics.signers)
        self.registry.prepare(codec, topics)
        return EventLog(self.broker, topics, codec, self.registry, "reader")

    async def apply(self) -> None:
        await self.broker.create_topics({one.name: (1, {}) for one in self.topics})

    def signed(self, event: PolicyPublished, namespace: str = "test") -> Outgoing:
        return self.signer.sign(self.reader(namespace).outgoing(event))

    async def send(self, record: Outgoing) -> None:
        await self.broker.send(replace(record, topic=self.partition.topic))

    async def records(self) -> list[Record]:
        return [one async for one in read_records(self.broker, {self.partition: WHOLE})]

    async def seen(self, log: EventLog | None = None) -> list[PolicyPublished]:
        async with aclosing(read_events(log or self.reader(), {self.partition: WHOLE})) as found:
            return [one.event async for one in found if isinstance(one.event, PolicyPublished)]


def unsigned(scene: Scene, event: PolicyPublished, past: Sequence[Record]) -> Outgoing:
    return scene.log.outgoing(event)


def by_stranger(scene: Scene, event: PolicyPublished, past: Sequence[Record]) -> Outgoing:
    return PublicationSigner(STRANGER, 2**62).sign(scene.log.outgoing(event))


def of_other_namespace(scene: Scene, event: PolicyPublished, past: Sequence[Record]) -> Outgoing:
    return scene.signed(event, "other")


def with_other_value(scene: Scene, event: PolicyPublished, past: Sequence[Record]) -> Outgoing:
    own = scene.signed(published(0, 0))
    return replace(own, value=scene.log.outgoing(event).value)


def with_other_number(scene: Scene, event: PolicyPublished, past: Sequence[Record]) -> Outgoing:
    headers = [
        (name, value.replace(b"ed25519:", b"ed25519:9") if name == HEADER else value)
        for name, value in (past[-1].headers if past else scene.signed(event).headers)
    ]
    return Outgoing("", b"default", past[-1].value or b"" if past else b"", headers)


def again(scene: Scene, event: PolicyPublished, past: Sequence[Record]) -> Outgoing:
    if not past:
        return unsigned(scene, event, past)
    chosen = past[event.version % len(past)]
    return Outgoing("", chosen.key or b"", chosen.value or b"", chosen.headers)


def with_two_headers(scene: Scene, event: PolicyPublished, past: Sequence[Record]) -> Outgoing:
    record = by_stranger(scene, event, past)
    own = [one for one in scene.signed(published(1, 1)).headers if one[0] == HEADER]
    return replace(record, headers=[*own, *record.headers])


def with_odd_header(scene: Scene, event: PolicyPublished, past: Sequence[Record]) -> Outgoing:
    record = scene.log.outgoing(event)
    odd = b"ed25519:" + (b"9" * 10**6 if event.version % 2 else b"1:" + b"A" * 86 + b"==")
    return replace(record, headers=[(HEADER, odd)])


FORGERIES = (
    unsigned,
    by_stranger,
    of_other_namespace,
    with_other_value,
    with_other_number,
    again,
    with_two_headers,
    with_odd_header,
)
Forge = Callable[[Scene, PolicyPublished, Sequence[Record]], Outgoing]
FORGED = st.tuples(st.sampled_from(FORGERIES), st.integers(0, 9), st.integers(100, 255))


@given(st.lists(FORGED | st.none(), max_size=12))
@pytest.mark.slow
def test_forged_records_neither_count_nor_hide_the_signed_ones(
    steps: list[tuple[Forge, int, int] | None],
) -> None:
    async def main() -> None:
        scene = Scene()
        await scene.apply()
        genuine: list[PolicyPublished] = []
        followed: list[PolicyPublished] = []
        own: list[Record] = []
        for step in steps:
            if step is None:
                event = published(len(genuine) // 2, len(genuine))
                scene.signer = PublicationSigner((OLD, NEW)[len(genuine) % 2], scene.signer.newest)
                await scene.send(scene.signed(event))
                genuine.append(event)
                own.append((await scene.records())[-1])
            else:
                forge, version, weights = step
                await scene.send(forge(scene, published(version, weights), own))
            followed = await scene.seen(scene.log)  # One that reads on and on.
            assert followed == genuine
        assert await scene.seen() == genuine

    asyncio.run(main())


@given(st.lists(st.integers(1, 9), max_size=9), st.randoms(use_true_random=False))
def test_numbers_count_as_they_ascend_in_whatever_order_they_are_read(
    numbers: list[int], random: object
) -> None:
    counts = [number > max(numbers[:at], default=0) for at, number in enumerate(numbers)]
    order = NumberOrder()
    assert [not order.repeats(at, number) for at, number in enumerate(numbers)] == counts
    mixed = NumberOrder()
    shuffled = list(enumerate(numbers))
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    for at, number in shuffled:
        mixed.repeats(at, number)
    assert [not mixed.repeats(at, number) for at, number in enumerate(numbers)] == counts


def test_a_refused_record_is_a_dead_letter_and_counted() -> None:
    name, labels = "headrace_publications_refused_total", {"policy": "default"}
    before = REGISTRY.get_sample_value(name, labels) or 0

    async def main() -> list[Record]:
        scene = Scene()
        await scene.apply()
        await scene.send(unsigned(scene, published(7, 7), []))
        assert await scene.seen() == []
        letters = scene.topics.partition(DEAD_LETTERS)
        return [one async for one in read_records(scene.broker, {letters: WHOLE})]

    (letter,) = asyncio.run(main())
    reason = dict(letter.headers)["__connect.errors.exception.message"].decode()
    assert "version 7 of policy 'default' does not count: it is not signed" in reason
    assert REGISTRY.get_sample_value(name, labels) == before + 1


def test_a_reader_of_the_tail_finds_the_signed_version_before_many_forged_ones() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.apply()
        await scene.send(scene.signed(published(3, 3)))
        for version in range(200):
            await scene.send(unsigned(scene, published(version, 1), []))
        found = []
        async with aclosing(follow_events(scene.reader(), {scene.partition: Tail()})) as items:
            async for item in items:
                if isinstance(item, CaughtUp):
                    break
                found.append(item.event)
        assert found == [published(3, 3)]

    asyncio.run(main())


def test_a_signed_record_has_exactly_one_signature() -> None:
    async def main() -> None:
        scene = Scene()
        await scene.apply()
        signed = scene.signed(published(1, 1))
        for extra in (b"ed25519:1:x", dict(signed.headers)[HEADER]):
            await scene.send(replace(signed, headers=[*signed.headers, (HEADER, extra)]))
        assert await scene.seen() == []

    asyncio.run(main())


def test_policies_without_signers_need_no_signature() -> None:
    async def main() -> None:
        scene = Scene(signers=())
        await scene.apply()
        await scene.send(unsigned(scene, published(1, 1), []))
        await scene.send(by_stranger(scene, published(2, 2), []))
        assert await scene.seen() == [published(1, 1), published(2, 2)]

    asyncio.run(main())


def test_a_successor_signs_above_what_was_signed_and_never_committed() -> None:
    async def main() -> None:
        scene = Scene()
        record = scene.log.outgoing(published(1, 1))
        first = PublicationSigner(OLD, 0)
        first.sign(record)
        await asyncio.sleep(0.002)
        second = PublicationSigner(OLD, 0)
        second.sign(record)
        assert second.newest > first.newest > 0

    asyncio.run(main())


def test_a_private_key_is_made_for_this_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "key.pem"
    key = write_private_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert public_text(read_private_key(path)) == public_text(key)
    with pytest.raises(UsageError, match="exists already"):
        write_private_key(path)

    topics = Topics("test", ("default",), 1, signers={"default": (public_text(key),)})
    assert find_signer(Topics("test", ("default",), 1), "default") is None
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(UsageError, match=f"set {KEY_VARIABLE}"):
        find_signer(topics, "default")
    monkeypatch.setenv(KEY_VARIABLE, str(path))
    assert find_signer(topics, "default") is not None
    with pytest.raises(UsageError, match="does not name"):
        find_signer(Scene().topics, "default")


@pytest.mark.parametrize(
    ("mode", "content", "message"),
    [
        (0o640, None, "others may read or change it"),
        (0o604, None, "others may read or change it"),
        (0o620, None, "others may read or change it"),
        (0o600, b"garbage", "not a PEM file"),
        (0o600, b"", "not a PEM file"),
    ],
)
def test_an_unsafe_or_wrong_key_file_is_refused(
    tmp_path: Path, mode: int, content: bytes | None, message: str
) -> None:
    path = tmp_path / "key.pem"
    write_private_key(path)
    if content is not None:
        path.write_bytes(content)
    os.chmod(path, mode)
    with pytest.raises(UsageError, match=message):
        read_private_key(path)


def test_a_missing_key_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_private_key(tmp_path / "absent.pem")
    with pytest.raises(UsageError, match="can't read"):
        read_private_key(tmp_path)


def test_a_recipe_takes_only_public_keys() -> None:
    assert Policy(model="tiny-llama", signers=TRUSTED).signers == TRUSTED
    assert len(key_bytes(TRUSTED[0])) == 32
    for wrong in ("", TRUSTED[0][8:], TRUSTED[0][:-4], "ed25519:" + "é" * 44, "rsa:" + "A" * 44):
        with pytest.raises(ValueError, match="is not a public key"):
            Policy(model="tiny-llama", signers=(wrong,))


@pytest.mark.parametrize("tree", [{}, {"policies": []}, {"policies": {"a": 1, "b": {}}}])
def test_a_recorded_recipe_may_name_no_signers(tree: dict[str, object]) -> None:
    assert signers_of(tree) == {}


def test_the_signers_of_a_recorded_recipe_are_found() -> None:
    tree = {"policies": {"a": {"signers": [TRUSTED[0]]}, "b": {"signers": []}}}
    assert signers_of(tree) == {"a": (TRUSTED[0],)}
