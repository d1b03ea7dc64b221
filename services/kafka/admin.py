"""Requests about topics, offsets and consumer groups.

Offsets and groups are requested through plain consumers, not through librdkafka's admin client:
after a broker's restart, the admin client's requests to group coordinators time out forever, and
may abort the process (an assertion in `rd_kafka_enq_once_del_source_return`; seen with 2.16.0).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from time import monotonic
from typing import TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._config import ConfigResource
from confluent_kafka.admin._metadata import ClusterMetadata
from confluent_kafka.cimpl import NewTopic

from headrace.errors import DependencyError, UsageError
from headrace.services.kafka.access.visibility import has_leaders, sees_all
from headrace.services.kafka.broker import Committed, Partition, records_lost
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.convert import (
    checked,
    committed_in,
    make_consumer,
    topic_partitions,
)
from headrace.services.kafka.failures import (
    BEHIND,
    TRANSIENT,
    UNKNOWN,
    answer_of,
    as_failure,
    error_of,
    failure,
)
from headrace.services.kafka.security.login import check_login

REQUEST_S = 3.0
PATIENCE_S = 15.0
"""How long a request is repeated if that may help, for example during a broker's restart."""
CHANGE_S = 30.0
"""The limit for what brokers do on disk: they create and delete topics."""
CHANGE = {"operation_timeout": CHANGE_S, "request_timeout": CHANGE_S}
RETRY_S = 0.05
UNKNOWN_S = 4.0
"""How long a request is repeated after an `UNKNOWN` error."""
BEHIND_S = 120.0
"""How long a request is repeated while a broker has not opened a partition that it leads. A broker
that has just started, or that the controller did not hear for a session, opens one after the other,
and may have thousands of them. It coordinates consumer groups only when all are open."""
MAX_REPLICATION = 3
"""Copies of each new topic; fewer if there are fewer brokers."""
EARLIEST, LATEST = -2, -1
"""Kafka's two special timestamps."""

R = TypeVar("R")


class Admin:
    """Sends requests to the cluster: one at a time, in one thread, each with a time limit."""

    def __init__(self, settings: KafkaSettings) -> None:
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kafka-admin")
        self._closed = False
        self._made: Consumer | None = None

    async def check(self) -> None:
        """Raises DependencyError within 5 s if no broker answers, or 7 s if one refuses it."""
        await self._run(lambda: check_login(self._consumer(), self._settings))

    async def list_topics(self) -> dict[str, int]:
        topics = (await self._list()).topics
        return {
            name: len(topic.partitions)
            for name, topic in topics.items()
            if topic.error is None and not name.startswith("__")
        }

    async def cluster_id(self) -> str:
        found = (await self._list()).cluster_id
        if not found:
            raise DependencyError(
                f"the brokers at {self._settings.bootstrap_servers} do not say the id of their "
                "cluster. Headrace needs Kafka 0.10.1 or newer, or a broker that is compatible"
            )
        return found

    async def sees_all_topics(self) -> bool:
        visible = (await self._list()).topics.keys()

        def ask() -> bool:
            with self._admin() as admin:
                return sees_all(admin, visible, CHANGE_S)

        return await self._patiently("can't find out whether ACLs hide topics", ask)

    async def create_topics(self, topics: Mapping[str, tuple[int, Mapping[str, str]]]) -> None:
        found = await self._list()
        replication = min(MAX_REPLICATION, len(found.brokers))
        absent = [
            NewTopic(name, partitions, replication, config=dict(config))
            for name, (partitions, config) in topics.items()
            if name not in found.topics
        ]
        if absent:
            await self._change(
                "can't create the topic",
                lambda admin: admin.create_topics(absent, **CHANGE),
                KafkaError.TOPIC_ALREADY_EXISTS,
            )
        found = await self._until(
            f"the topics {', '.join(sorted(topics))} to appear",
            lambda metadata: all(has_leaders(metadata, name) for name in topics),
        )
        for name, (partitions, _) in topics.items():
            number = len(found.topics[name].partitions)
            if number != partitions:
                raise UsageError(
                    f"the topic {name} has {number} partitions, not {partitions}. Their number is "
                    f"fixed when a namespace is created: use {number} partitions, or another "
                    "namespace"
                )
        # The metadata may name a leader before that broker knows it; once it answers, it does.
        new = [Partition(topic.topic, at) for topic in absent for at in range(topic.num_partitions)]
        await self._patiently("the new topics do not answer", partial(self._ends, new), UNKNOWN)

    async def delete_topics(self, topics: Sequence[str]) -> None:
        found = await self._list()
        present = [name for name in topics if name in found.topics]
        if present:
            await self._change(
                "can't delete the topic",
                lambda admin: admin.delete_topics(present, **CHANGE),
                KafkaError.UNKNOWN_TOPIC_OR_PART,
            )
        await self._until(
            f"the topics {', '.join(present)} to disappear",
            lambda metadata: not any(name in metadata.topics for name in present),
        )

    async def topic_settings(self, topics: Sequence[str]) -> dict[str, dict[str, str]]:
        if not topics:
            return {}
        asked = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in topics]

        def ask() -> dict[str, dict[str, str]]:
            with self._admin() as admin:
                answers = admin.describe_configs(asked, request_timeout=CHANGE_S)
                return {
                    resource.name: {
                        name: entry.value
                        for name, entry in answer_of(answer, CHANGE_S).items()
                        if entry.value is not None
                    }
                    for resource, answer in answers.items()
                }

        return await self._patiently("can't read the topics' settings", ask)

    async def ends(
        self, partitions: Sequence[Partition], *, include_uncommitted: bool = False
    ) -> dict[Partition, tuple[int, int]]:
        names = ", ".join(sorted({partition.topic for partition in partitions}))
        ask = partial(self._open_ends if include_uncommitted else self._ends, partitions)
        return await self._patiently(f"can't find the ends of {names}", ask, UNKNOWN, UNKNOWN_S)

    async def offsets_at(
        self, partitions: Sequence[Partition], timestamp: float
    ) -> dict[Partition, int]:
        if not partitions:
            return {}
        asked = topic_partitions(partitions, max(0, int(timestamp * 1_000)))
        found = await self._patiently(
            "can't find offsets by time",
            lambda: checked(self._consumer().offsets_for_times(asked, timeout=REQUEST_S)),
        )
        bounds = await self.ends(partitions)
        offsets = {Partition(one.topic, one.partition): one.offset for one in found}
        return {at: offset if offset >= 0 else bounds[at][1] for at, offset in offsets.items()}

    async def check_offsets(self, positions: Mapping[Partition, int]) -> None:
        """Raises RecordsLost if the log neither holds an offset nor ends there."""
        bounds = await self.ends(list(positions))
        beyond = [at for at, offset in positions.items() if offset > bounds[at][1]]
        if beyond:  # An open transaction may hold the readers' end back.
            bounds |= await self.ends(beyond, include_uncommitted=True)
        for partition, offset in positions.items():
            first, end = bounds[partition]
            if not first <= offset <= end:
                raise records_lost(partition, offset, bounds[partition])

    async def committed(
        self, consumer_group: str, partitions: Sequence[Partition]
    ) -> dict[Partition, Committed]:
        if not partitions:
            return {}
        asked = topic_partitions(partitions)
        found = await self._of_group(
            f"can't read the commits of the consumer group {consumer_group}",
            consumer_group,
            lambda consumer: consumer.committed(asked, timeout=REQUEST_S),
        )
        return committed_in(found)

    async def commit_first(self, consumer_group: str, partitions: Sequence[Partition]) -> None:
        existing = await self.committed(consumer_group, partitions)
        absent = topic_partitions([at for at in partitions if at not in existing], 0)
        if absent:
            await self._of_group(
                f"can't make the first commits of {consumer_group}; does it have members already?",
                consumer_group,
                lambda consumer: consumer.commit(offsets=absent, asynchronous=False),
            )

    async def members(self, consumer_group: str) -> int:
        def ask() -> int:
            with self._admin() as admin:
                asked = admin.describe_consumer_groups([consumer_group], request_timeout=REQUEST_S)
                return len(answer_of(asked[consumer_group], REQUEST_S).members)

        return await self._patiently(f"can't count the members of {consumer_group}", ask)

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._thread.submit(self._forget)
            await asyncio.to_thread(self._thread.shutdown)

    async def _run(self, work: Callable[[], R]) -> R:
        if self._closed:
            raise DependencyError("this broker object is closed and sends no more requests")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _patiently(
        self,
        what: str,
        ask: Callable[[], R],
        fine: frozenset[int] = frozenset(),
        fine_s: float = PATIENCE_S,
    ) -> R:
        """Sends a request, and repeats it while that may help.

        Errors in `fine` count as temporary too, for `fine_s` seconds.
        """
        limits_s = dict.fromkeys(TRANSIENT, PATIENCE_S) | dict.fromkeys(BEHIND, BEHIND_S)
        limits_s |= dict.fromkeys(fine, fine_s)
        begun = monotonic()
        while True:
            try:
                return await self._run(ask)
            except KafkaException as exception:
                error = error_of(exception)
                if monotonic() - begun > limits_s.get(error.code(), -1.0):
                    servers = self._settings.bootstrap_servers
                    raise failure(f"{what} (at {servers})", error) from exception
            await self._run(self._forget)  # Its knowledge of leaders may be out of date.
            await asyncio.sleep(RETRY_S)

    async def _until(self, what: str, holds: Callable[[ClusterMetadata], bool]) -> ClusterMetadata:
        """Polls the cluster's metadata until `holds` is true of it."""
        begun = monotonic()
        while not holds(found := await self._list()):
            if monotonic() - begun > PATIENCE_S:
                raise DependencyError(
                    f"waited {PATIENCE_S:.0f} s for {what}, without success; see the brokers' log"
                )
            await asyncio.sleep(RETRY_S)
        return found

    async def _list(self) -> ClusterMetadata:
        listed: ClusterMetadata = await self._patiently(
            "can't list the topics", lambda: self._consumer().list_topics(timeout=REQUEST_S)
        )
        return listed

    async def _of_group(
        self, what: str, consumer_group: str, ask: Callable[[Consumer], list[TopicPartition]]
    ) -> list[TopicPartition]:
        """Sends a request of a consumer group, without joining it."""

        def work() -> list[TopicPartition]:
            with make_consumer(self._settings.member(consumer_group)) as consumer:
                return checked(ask(consumer))

        return await self._patiently(what, work)

    async def _change(
        self, what: str, ask: Callable[[AdminClient], Mapping[str, Future[None]]], fine: int
    ) -> None:
        """Changes topics, and waits until all are changed. The error `fine` does not count."""

        def work() -> None:
            with self._admin() as admin:
                for name, change in ask(admin).items():
                    try:
                        answer_of(change, CHANGE_S)
                    except KafkaException as exception:
                        error = error_of(exception)
                        if error.code() != fine:
                            raise failure(f"{what} {name}", error) from exception

        await self._run(work)

    def _consumer(self) -> Consumer:
        if self._made is None:
            self._made = make_consumer(self._settings.reader())
        return self._made

    def _ends(self, partitions: Sequence[Partition]) -> dict[Partition, tuple[int, int]]:
        return _bounds(self._consumer(), partitions)

    def _open_ends(self, partitions: Sequence[Partition]) -> dict[Partition, tuple[int, int]]:
        """The ends, open transactions included."""
        properties = self._settings.reader() | {"isolation.level": "read_uncommitted"}
        with make_consumer(properties) as consumer:
            return _bounds(consumer, partitions)

    def _admin(self) -> AdminClient:
        with as_failure("can't create a Kafka client"):
            return AdminClient(self._settings.admin())

    def _forget(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            made.close()


def _bounds(
    consumer: Consumer, partitions: Sequence[Partition]
) -> dict[Partition, tuple[int, int]]:
    """First offsets and ends, with two requests to each leader for any number of partitions."""
    if not partitions:
        return {}
    first, end = (
        checked(consumer.offsets_for_times(topic_partitions(partitions, which), timeout=REQUEST_S))
        for which in (EARLIEST, LATEST)
    )
    return {
        Partition(low.topic, low.partition): (low.offset, high.offset)
        for low, high in zip(first, end, strict=True)
    }
