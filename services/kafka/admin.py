"""What is asked about topics and consumer groups, beside reading and writing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from time import monotonic
from typing import TypeVar

from confluent_kafka import (
    ConsumerGroupTopicPartitions,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._listoffsets import OffsetSpec
from confluent_kafka.admin._metadata import ClusterMetadata
from confluent_kafka.cimpl import NewTopic

from services.errors import DependencyError, UsageError
from services.kafka.broker import Committed, Partition
from services.kafka.failures import TRANSIENT, error_of, failure
from services.kafka.settings import KafkaSettings

REQUEST_S = 10.0
CHANGE_S = 30.0
"""For what brokers do on disk: making and removing topics."""
CHECK_S = 4.0
METADATA_INTERVAL_S = 0.05
EARLIEST: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
LATEST: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call]

R = TypeVar("R")


class Admin:
    """Requests to the cluster; each is bounded. Made on first use: it opens connections."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._made: AdminClient | None = None

    async def check(self) -> None:
        """DependencyError within 5 s where no broker answers."""
        servers = self._settings.bootstrap_servers
        try:
            await asyncio.to_thread(self._client().list_topics, timeout=CHECK_S)
        except KafkaException as exception:
            raise DependencyError(
                f"no Kafka broker answers at {servers} ({error_of(exception).str()}): start one "
                f"with `headrace up`, or name yours with --bootstrap-servers"
            ) from exception

    async def list_topics(self) -> dict[str, int]:
        """Every topic's number of partitions, by name; Kafka's own topics left out."""
        topics = (await self._metadata()).topics
        return {
            name: len(topic.partitions)
            for name, topic in topics.items()
            if topic.error is None and not name.startswith("__")
        }

    async def create_topics(self, topics: Mapping[str, tuple[int, Mapping[str, str]]]) -> None:
        """Makes the topics that are absent. Returns once all are there with a leader."""
        metadata = await self._metadata()
        replication = self._settings.replication or min(3, len(metadata.brokers))
        absent = [
            NewTopic(name, partitions, replication, config=dict(config))
            for name, (partitions, config) in topics.items()
            if name not in metadata.topics
        ]
        if absent:
            made = self._client().create_topics(
                absent, operation_timeout=CHANGE_S, request_timeout=CHANGE_S
            )
            for name, future in made.items():
                await self._answer(
                    f"can't make the topic {name}", future, KafkaError.TOPIC_ALREADY_EXISTS
                )
        counts = await self._until(
            f"the topics {', '.join(sorted(topics))} to appear",
            lambda found: (
                topics.keys() <= found.topics.keys()
                and all(_has_leaders(found, name) for name in topics)
            ),
        )
        for name, (partitions, _) in topics.items():
            there = len(counts.topics[name].partitions)
            if there != partitions:
                raise UsageError(
                    f"the topic {name} has {there} partitions, not {partitions}: their number is "
                    f"fixed when a namespace is made. Use it, or another namespace"
                )
        # A leader that is named may not know it yet; it does once it answers.
        new = {topic.topic for topic in absent}
        await self._offsets(
            [Partition(name, n) for name in new for n in range(topics[name][0])], LATEST, False
        )

    async def delete_topics(self, topics: Sequence[str]) -> None:
        """Removes the topics that exist. Returns once they are gone."""
        present = [name for name in topics if name in (await self._metadata()).topics]
        if not present:
            return
        gone = self._client().delete_topics(
            present, operation_timeout=CHANGE_S, request_timeout=CHANGE_S
        )
        for name, future in gone.items():
            await self._answer(
                f"can't remove the topic {name}", future, KafkaError.UNKNOWN_TOPIC_OR_PART
            )
        await self._until(
            f"the topics {', '.join(present)} to vanish",
            lambda found: not any(_has_leaders(found, name) for name in present),
        )

    async def ends(
        self, partitions: Sequence[Partition], *, committed: bool = True
    ) -> dict[Partition, tuple[int, int]]:
        """Each partition's first offset and the one after its last record, committed or not."""
        first, end = await asyncio.gather(
            self._offsets(partitions, EARLIEST, committed),
            self._offsets(partitions, LATEST, committed),
        )
        return {place: (first[place], end[place]) for place in partitions}

    async def committed(
        self, consumer_group: str, partitions: Sequence[Partition]
    ) -> dict[Partition, Committed]:
        """The group's places; a partition without one is absent."""
        if not partitions:
            return {}
        asked = ConsumerGroupTopicPartitions(
            consumer_group, [TopicPartition(place.topic, place.number) for place in partitions]
        )

        async def ask() -> dict[Partition, Committed]:
            futures = self._client().list_consumer_group_offsets(
                [asked], require_stable=True, request_timeout=REQUEST_S
            )
            answer = await asyncio.wrap_future(futures[consumer_group])
            return committed_in(answer.topic_partitions or [])

        return await self._patiently(
            f"can't read the places of the consumer group {consumer_group}", ask
        )

    async def commit_first(self, consumer_group: str, partitions: Sequence[Partition]) -> None:
        """Commits offset 0 where the group has no place yet."""
        there = await self.committed(consumer_group, partitions)
        absent = [
            TopicPartition(place.topic, place.number, 0)
            for place in partitions
            if place not in there
        ]
        if not absent:
            return
        asked = ConsumerGroupTopicPartitions(consumer_group, absent)

        async def ask() -> None:
            futures = self._client().alter_consumer_group_offsets(
                [asked], request_timeout=REQUEST_S
            )
            answer = await asyncio.wrap_future(futures[consumer_group])
            committed_in(answer.topic_partitions or [])

        await self._patiently(
            f"can't set the first places of {consumer_group}: does it have members already?", ask
        )

    async def close(self) -> None:
        """Closes the connections, if there are any."""
        made, self._made = self._made, None
        if made is not None:
            await asyncio.to_thread(made.__exit__, None, None, None)

    def _client(self) -> AdminClient:
        if self._made is None:
            try:
                self._made = AdminClient(self._settings.admin())
            except KafkaException as exception:
                raise failure("can't make a Kafka client", error_of(exception)) from exception
        return self._made

    async def _metadata(self) -> ClusterMetadata:
        try:
            return await asyncio.to_thread(self._client().list_topics, timeout=REQUEST_S)
        except KafkaException as exception:
            what = f"can't list the topics at {self._settings.bootstrap_servers}"
            raise failure(what, error_of(exception)) from exception

    async def _until(self, what: str, holds: Callable[[ClusterMetadata], bool]) -> ClusterMetadata:
        """Waits until the cluster's metadata is as it should be; nothing tells, so it asks."""
        try:
            async with asyncio.timeout(REQUEST_S):
                while not holds(metadata := await self._metadata()):
                    await asyncio.sleep(METADATA_INTERVAL_S)
        except TimeoutError:
            raise DependencyError(f"waited {REQUEST_S:.0f} s for {what}, in vain") from None
        return metadata

    async def _offsets(
        self, partitions: Sequence[Partition], which: OffsetSpec, committed: bool
    ) -> dict[Partition, int]:
        if not partitions:
            return {}
        asked = {TopicPartition(place.topic, place.number): which for place in partitions}
        isolation = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED

        async def ask() -> dict[Partition, int]:
            futures = self._client().list_offsets(
                asked, isolation_level=isolation, request_timeout=REQUEST_S
            )
            found = await asyncio.gather(*map(asyncio.wrap_future, futures.values()))
            return {
                Partition(place.topic, place.partition): at.offset
                for place, at in zip(futures, found, strict=True)
            }

        names = ", ".join(sorted({place.topic for place in partitions}))
        return await self._patiently(f"can't find the ends of {names}", ask)

    async def _patiently(self, what: str, ask: Callable[[], Awaitable[R]]) -> R:
        """Asks, and again while that may help: a leader is being found, a transaction ends."""
        begun = monotonic()
        while True:
            try:
                return await ask()
            except KafkaException as exception:
                error = error_of(exception)
                if error.code() not in TRANSIENT or monotonic() - begun > REQUEST_S:
                    raise failure(what, error) from exception
            await asyncio.sleep(METADATA_INTERVAL_S)

    async def _answer(self, what: str, future: Future[R], fine: int | None = None) -> R | None:
        """A request's answer. None where it failed with the code that is `fine`."""
        try:
            return await asyncio.wrap_future(future)
        except KafkaException as exception:
            error = error_of(exception)
            if error.code() == fine:
                return None
            raise failure(what, error) from exception


def committed_in(places: Sequence[TopicPartition]) -> dict[Partition, Committed]:
    """The places in a broker's answer, those without one left out. KafkaException for an error."""
    for place in places:
        if place.error is not None:
            raise KafkaException(place.error)
    return {
        Partition(place.topic, place.partition): Committed(place.offset, place.metadata or "")
        for place in places
        if place.offset >= 0
    }


def _has_leaders(metadata: ClusterMetadata, name: str) -> bool:
    """Whether the topic is there, and each of its partitions can be written to."""
    topic = metadata.topics.get(name)
    return (
        topic is not None
        and topic.error is None
        and bool(topic.partitions)
        and all(partition.leader >= 0 for partition in topic.partitions.values())
    )
