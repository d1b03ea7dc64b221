"""Signed versions on a real broker: what an attacker publishes is never served or trained from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from headrace.errors import UsageError
from headrace.schemas import packed
from headrace.schemas.events import (
    GenerationCompleted,
    GenerationRequested,
    PolicyPublished,
    Sampling,
)
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import DEAD_LETTERS, GENERATIONS, POLICIES
from headrace.services.inference import service as inference
from headrace.services.kafka.broker import Outgoing, Record
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.kafka_broker import KafkaBroker
from headrace.services.log.event_log import Delivery
from headrace.services.log.log_reader import WHOLE, follow_events, read_records
from headrace.services.log.signatures import (
    KEY_VARIABLE,
    PublicationSigner,
    public_text,
    write_private_key,
)
from headrace.services.models.weights import weights_digest
from headrace.services.namespace.apply import commit_first_offsets
from headrace.services.operate.find_versions import publications
from headrace.trainer import service as trainer
from tests.integration.test_trainer import BOUND_S, RECIPE, Bench, facts

EVIL = (2).to_bytes(8, "little") + b"{}"
"""The attacker's weights: a safetensors file without tensors."""


def signed_recipe(signer: str) -> Recipe:
    tree = RECIPE.model_dump(mode="json")
    tree["policies"]["learner"] |= {
        "signers": [signer],
        "engine": {"use": "scripted", "slots": 4, "options": {"text": "ab"}},
    }
    return Recipe.model_validate(tree)


class Attacked(Bench):
    """A namespace in which somebody else may write `policies` and the blob store."""

    def forged(self, version: int) -> PolicyPublished:
        return PolicyPublished(
            policy="learner",
            version=version,
            status="resumed",
            digest=weights_digest(EVIL),
            full=self.blobs.put(EVIL),
            full_version=version,
        )

    async def records(self, topic: str) -> list[Record]:
        partition = self.log.topics.partition(DEAD_LETTERS if topic == "dead" else POLICIES)
        async with aclosing(read_records(self.log.broker, {partition: WHOLE})) as records:
            return [record async for record in records]

    async def attack(self, newest: int) -> int:
        """Publishes forged versions and repeats signed ones. Returns how many records it wrote."""
        stranger = PublicationSigner(Ed25519PrivateKey.generate(), 2**62)
        signed = [
            Outgoing(one.partition.topic, one.key or b"", one.value or b"", one.headers)
            for one in await self.records("policies")
            if dict(one.headers).get("headrace_signature")
        ]
        same, next_one = (self.log.outgoing(self.forged(newest + more)) for more in (0, 1))
        borrowed = replace(next_one, headers=[*next_one.headers, signed[-1].headers[-1]])
        written = [same, next_one, stranger.sign(same), stranger.sign(next_one), borrowed, *signed]
        for record in written:
            await self.log.broker.send(record)
        return len(written)

    @asynccontextmanager
    async def worker(self) -> AsyncIterator[None]:
        context = self.context()
        running = asyncio.create_task(inference.run(context, "learner"))
        try:
            yield
        finally:
            context.stopping.set()
            await asyncio.wait_for(running, BOUND_S)

    async def served(self, task: int, pinned: int | None = None) -> int:
        """Asks for a generation, and returns the version that answers."""
        await self.log.send(
            GenerationRequested(
                task=task, sample=0, call="0", policy="learner", text="go",
                sampling=Sampling(max_tokens=1), expires_at=int(1000 * (time.time() + BOUND_S)),
                digest=b"d" * 16, pinned=pinned,
            )
        )  # fmt: skip
        answers = dict.fromkeys(self.log.topics.partitions_of(GENERATIONS), 0)
        async with asyncio.timeout(BOUND_S), aclosing(follow_events(self.log, answers)) as items:
            async for item in items:
                event = item.event if isinstance(item, Delivery) else None
                if isinstance(event, GenerationCompleted) and event.task == task:
                    assert event.failure is None
                    version = packed.oldest(event.versions)
                    assert version is not None
                    return version
        raise AssertionError


def test_only_signed_versions_are_served_and_trained_from(
    kafka: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = write_private_key(tmp_path / "key.pem")
    monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "key.pem"))

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        bench = Attacked(broker, tmp_path, namespace, signed_recipe(public_text(key)))
        await bench.make_topics()
        await commit_first_offsets(broker, bench.log.topics)
        await bench.submit(1)
        await bench.train(1)
        async with bench.worker():
            assert await bench.served(1) == 1
            forged = await bench.attack(newest=1)
            assert await bench.served(2) == 1
            assert await bench.served(3, pinned=0) == 0
        async with bench.worker():  # One that starts with the forged records in the log.
            assert await bench.served(4) == 1
        await bench.submit(2)
        await bench.train(2)
        forged += await bench.attack(newest=2)
        published = await bench.published()
        assert facts(published) == [(0, "initial", 0), (1, "trained", 2), (2, "trained", 2)]
        for version in published:
            assert version.digest != weights_digest(EVIL)
            bench.weights(version)
            assert await inference.find_published(bench.log, "learner", version.version) == version
        assert (await publications(bench.log, None))["learner"] == published[-1]
        async with bench.worker():
            assert await bench.served(5) == 2
        dead = {dict(one.headers)["__connect.errors.offset"] for one in await bench.records("dead")}
        assert len(dead) == forged
        await broker.close()

    asyncio.run(asyncio.wait_for(main(), 4 * BOUND_S))


def test_a_trainer_without_the_key_does_not_start(
    kafka: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = write_private_key(tmp_path / "key.pem")
    write_private_key(tmp_path / "other.pem")

    async def main() -> None:
        broker = KafkaBroker(KafkaSettings(kafka, "test"))
        bench = Attacked(broker, tmp_path, namespace, signed_recipe(public_text(key)))
        await bench.make_topics()
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        with pytest.raises(UsageError, match="the trainer needs a private key"):
            await trainer.run(bench.context(), "learner")
        monkeypatch.setenv(KEY_VARIABLE, str(tmp_path / "other.pem"))
        with pytest.raises(UsageError, match="does not name"):
            await trainer.run(bench.context(), "learner")
        assert await bench.records("policies") == []
        await broker.close()

    asyncio.run(asyncio.wait_for(main(), BOUND_S))
