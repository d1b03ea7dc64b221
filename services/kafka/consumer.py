"""Reads from Kafka: given partitions, or those that a consumer group assigns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic, sleep

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from headrace.errors import DependencyError
from headrace.services.kafka.admin import Admin
from headrace.services.kafka.broker import (
    Committed,
    End,
    OnAssigned,
    OnRevoked,
    Partition,
    Reader,
    Record,
    Subscription,
)
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.convert import checked, committed_in, offsets_of
from headrace.services.kafka.failures import (
    FINAL_FOR_MEMBERS,
    LOST,
    TRANSIENT,
    error_of,
    failure,
)
from headrace.services.kafka.poller import Poller

logger = logging.getLogger(__name__)

ASSIGN_S = 30.0
REVOKE_S = 6.5
"""A shard has 3 s to close, and 3 s to finish its sends."""
COMMIT_S = 20.0
LAST_COMMIT_S = 2.0
REQUEST_S = 5.0
ANSWER_S = 2.0
RETRY_S = 0.1


class KafkaReader(Reader):
    """Reads given partitions, without a consumer group. Connects on first use."""

    def __init__(
        self, settings: KafkaSettings, admin: Admin, on_arrival: Callable[[], None]
    ) -> None:
        """`on_arrival` is called on the loop before new items are kept for `read`."""
        self._settings = settings
        self._admin = admin
        self._on_arrival = on_arrival
        self._made: Poller | None = None
        self.closed = False

    async def assign(self, positions: Mapping[Partition, int]) -> None:
        if not positions:
            return
        await self._admin.check_offsets(positions)
        poller = self._poller()
        poller.hold(positions)
        await poller.run(lambda: poller.assign(positions))

    async def unassign(self, partitions: Sequence[Partition]) -> None:
        poller = self._poller()
        gone = poller.held.intersection(partitions)
        if not gone:
            return
        poller.drop(gone)
        await poller.run(lambda: poller.unassign(gone))

    async def read(self) -> list[Record | End]:
        return await self._poller().read()

    async def close(self) -> None:
        if self._made is not None:
            await self._made.close()
        self.closed = True

    def _poller(self) -> Poller:
        if self.closed:
            raise DependencyError("this reader is closed and reads no more")
        if self._made is None:
            self._made = Poller(self._settings.reader(), "reader", self._on_arrival)
            self._made.start()
        return self._made


class KafkaSubscription(Poller, Subscription):
    """A member of a consumer group.

    The callbacks run on the event loop while the poll thread waits for them. They may pause,
    resume and commit. A commit for a partition that is being revoked is left out: `on_revoked`
    returns it instead.
    """

    final = FINAL_FOR_MEMBERS

    def __init__(
        self,
        settings: KafkaSettings,
        topics: Sequence[str],
        consumer_group: str,
        on_assigned: OnAssigned,
        on_revoked: OnRevoked,
        on_arrival: Callable[[], None],
    ) -> None:
        """`on_arrival` is called on the loop before new items are kept for `read`."""
        who = f"the consumer group {consumer_group}"
        super().__init__(settings.member(consumer_group), consumer_group, on_arrival, who)
        self._consumer_group = consumer_group
        self._on_assigned = on_assigned
        self._on_revoked = on_revoked
        self._raised: Exception | None = None
        self.consumer.subscribe(
            list(topics),
            on_assign=partial(self._keep_error, self._assign),
            on_revoke=partial(self._keep_error, partial(self._revoke, lost=False)),
            on_lost=partial(self._keep_error, partial(self._revoke, lost=True)),
        )
        self.start()

    @property
    def closed(self) -> bool:
        """Whether the thread has closed the consumer."""
        return self._closed.done()

    async def commit(self, commits: Mapping[Partition, Committed]) -> None:
        begun = monotonic()
        while self.held.intersection(commits):
            error = await self.run(partial(self._commit_held, commits))
            if error is None:
                return
            # The broker says that the partitions are lost. During a rebalance that may be wrong.
            # If it is right, the loop ends soon, because nothing is held any more.
            late = monotonic() - begun > COMMIT_S
            if late or error.code() not in LOST:
                self._raise_unless_transient(error, late)
            await asyncio.sleep(RETRY_S)

    def _poll(self) -> None:
        try:
            super()._poll()
        finally:  # What the poll itself raises may only follow from a callback's error.
            if self._raised is not None:
                raise self._raised

    def _keep_error(
        self,
        callback: Callable[[Consumer, list[TopicPartition]], None],
        consumer: Consumer,
        partitions: list[TopicPartition],
    ) -> None:
        """In the poll thread: runs a callback, and keeps its error for `_poll`.

        The callback itself must not raise. On Python 3.11, confluent-kafka 2.16 never frees such an
        exception, and with its frames the client stays for ever.
        """
        try:
            callback(consumer, partitions)
        except Exception as error:  # Any error must reach the reader.
            self._raised = error
            if self.stopping.is_set():
                # As text: whoever keeps the line would keep the frames, and with them the client.
                logger.warning("while closing: %s", str(error))

    def _assign(self, consumer: Consumer, assigned: list[TopicPartition]) -> None:
        """In the poll thread: notifies the loop, and waits until it is ready for the records."""
        commits = self._commits(consumer, assigned) if assigned else {}
        what = f"the assignment of partitions of {self._consumer_group}"
        if commits:
            self.wait(self._notify_assigned(commits), ASSIGN_S, what)
        self.assign({at: committed.offset for at, committed in commits.items()})

    def _revoke(self, _: Consumer, revoked: list[TopicPartition], *, lost: bool) -> None:
        """In the poll thread: lets the loop finish, makes its last commits, unassigns all."""
        gone = [Partition(one.topic, one.partition) for one in revoked]
        held = [partition for partition in gone if partition in self.held]
        what = f"the revocation of partitions of {self._consumer_group}"
        try:
            if held:
                last = self.wait(self._notify_revoked(held, lost), REVOKE_S, what)
                if last and not lost:
                    self._commit_last(last)
        finally:
            self.unassign(gone)

    async def _notify_assigned(self, commits: Mapping[Partition, Committed]) -> None:
        await self._on_assigned(commits)
        self.hold(commits)

    async def _notify_revoked(
        self, partitions: Sequence[Partition], lost: bool
    ) -> Mapping[Partition, Committed]:
        self.drop(partitions)
        return await self._on_revoked(partitions, lost)

    def _commits(
        self, consumer: Consumer, assigned: list[TopicPartition]
    ) -> dict[Partition, Committed]:
        """In the poll thread: the group's commits for newly assigned partitions."""
        asked = [TopicPartition(one.topic, one.partition) for one in assigned]
        begun = monotonic()
        while True:
            answer, error = _ask(lambda: consumer.committed(asked, timeout=REQUEST_S))
            if error is None:
                break
            self._raise_unless_transient(error, monotonic() - begun > REQUEST_S)
            sleep(RETRY_S)
        commits = committed_in(answer)
        for one in asked:
            if (partition := Partition(one.topic, one.partition)) not in commits:
                raise DependencyError(
                    f"the consumer group {self._consumer_group} has no commit for "
                    f"{partition.topic}/{partition.number}: apply the recipe first"
                )
        return commits

    def _commit_held(self, commits: Mapping[Partition, Committed]) -> KafkaError | None:
        """In the poll thread: one attempt, for the partitions that are still held."""
        held = {partition: at for partition, at in commits.items() if partition in self.held}
        return self._commit(held) if held else None

    def _commit_last(self, commits: Mapping[Partition, Committed]) -> None:
        """In the poll thread: the last commits for partitions that are being revoked.

        If they fail, the next owner reads records again that were handled already.
        """
        begun = monotonic()
        while (error := self._commit(commits)) is not None:
            if error.code() not in TRANSIENT or monotonic() - begun > LAST_COMMIT_S:
                partitions = ", ".join(
                    f"{partition.topic}/{partition.number}" for partition in commits
                )
                logger.warning("the last commit for %s failed: %s", partitions, error.str())
                return
            sleep(RETRY_S)

    def _commit(self, commits: Mapping[Partition, Committed]) -> KafkaError | None:
        """In the poll thread: commits, if a broker answers.

        It checks that first, because librdkafka's commit has no time-out: while no broker answers,
        it waits for a whole session. (The coordinator would be the right broker to check, but
        librdkafka does not look it up for a consumer that is being closed; and `list_topics`,
        called in a callback, aborts the process.)
        """
        consumer, offsets = self.consumer, offsets_of(commits)
        try:
            consumer.get_watermark_offsets(offsets[0], timeout=ANSWER_S)
        except KafkaException:  # Whatever the error is, the leader does not answer.
            return KafkaError(KafkaError._TRANSPORT)
        return _ask(lambda: consumer.commit(offsets=offsets, asynchronous=False))[1]

    def _raise_unless_transient(self, error: KafkaError, late: bool) -> None:
        if late or error.code() not in TRANSIENT:
            raise failure(self._who, error)


def _ask(
    ask: Callable[[], list[TopicPartition]],
) -> tuple[list[TopicPartition], KafkaError | None]:
    """The coordinator's answer, and its error if there is one."""
    try:
        return checked(ask()), None
    except KafkaException as exception:
        return [], error_of(exception)
