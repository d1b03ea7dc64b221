"""Reading: partitions that one is told to read, or shares with a group's other members."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from time import monotonic, sleep

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from headrace.errors import DependencyError
from headrace.services.kafka.admin import Admin
from headrace.services.kafka.broker import Committed, End, OnAssigned, OnRevoked, Partition, Record
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.convert import committed_in, offsets_of
from headrace.services.kafka.failures import LOST, TRANSIENT, error_of, failure
from headrace.services.kafka.poller import Poller

logger = logging.getLogger(__name__)

ASSIGN_S = 30.0
REVOKE_S = 6.5
"""A shard has 3 s to close, and 3 s for what it is sending."""
COMMIT_S = 20.0
LAST_COMMIT_S = 2.0
REQUEST_S = 5.0
ANSWER_S = 2.0
RETRY_S = 0.1


class KafkaReader:
    """Reads partitions that it is told to, without a consumer group. Opens on first use."""

    def __init__(self, settings: KafkaSettings, admin: Admin) -> None:
        self._settings = settings
        self._admin = admin
        self._made: Poller | None = None

    async def assign(self, positions: Mapping[Partition, int]) -> None:
        """Adds partitions, each from its offset. RecordsLost where the offset is gone."""
        if not positions:
            return
        await self._admin.check_offsets(positions)
        poller = self._poller()
        poller.hold(positions)
        await poller.run(lambda: poller.assign(positions))

    async def unassign(self, partitions: Sequence[Partition]) -> None:
        """Drops partitions: `read` yields nothing of them any more."""
        poller = self._poller()
        gone = poller.held.intersection(partitions)
        if not gone:
            return
        poller.drop(gone)
        await poller.run(lambda: poller.unassign(gone))

    async def pause(self, partitions: Sequence[Partition]) -> None:
        """Holds partitions back until `resume`. What was fetched already may still come."""
        await self._poller().pause(partitions)

    async def resume(self, partitions: Sequence[Partition]) -> None:
        """Lets paused partitions flow again."""
        await self._poller().resume(partitions)

    async def read(self) -> list[Record | End]:
        """Waits until there is at least one, and returns what has arrived, bounded."""
        return await self._poller().read()

    async def close(self) -> None:
        """Ends the reading and its thread."""
        if self._made is not None:
            await self._made.close()

    def _poller(self) -> Poller:
        if self._made is None:
            self._made = Poller(self._settings.reader(), "reader")
            self._made.start()
        return self._made


class KafkaSubscription:
    """A member of a consumer group.

    Its callbacks run on the loop while the poll thread waits for them. They may pause, resume and
    commit; a commit of what is being revoked is left out there: `on_revoked` returns it.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        topics: Sequence[str],
        consumer_group: str,
        on_assigned: OnAssigned,
        on_revoked: OnRevoked,
    ) -> None:
        self._consumer_group = consumer_group
        self._told_assigned = on_assigned
        self._told_revoked = on_revoked
        who = f"the consumer group {consumer_group}"
        self._poller = Poller(settings.member(consumer_group), consumer_group, who)
        self._poller.consumer.subscribe(
            list(topics),
            on_assign=self._on_assign,
            on_revoke=partial(self._give_up, lost=False),
            on_lost=partial(self._give_up, lost=True),
        )
        self._poller.start()

    async def read(self) -> list[Record | End]:
        """Waits until there is at least one, and returns what has arrived, bounded."""
        return await self._poller.read()

    async def pause(self, partitions: Sequence[Partition]) -> None:
        """Holds partitions back until `resume`. What was fetched already may still come."""
        await self._poller.pause(partitions)

    async def resume(self, partitions: Sequence[Partition]) -> None:
        """Lets paused partitions flow again."""
        await self._poller.resume(partitions)

    async def commit(self, commits: Mapping[Partition, Committed]) -> None:
        """Commits for partitions that are held. One that is lost in between is left out."""
        begun = monotonic()
        while self._poller.held.intersection(commits):
            error = await self._poller.run(partial(self._commit_held, commits))
            if error is None:
                return
            # Lost, says the broker. In the middle of a rebalance that may be a misunderstanding:
            # if it is true, nothing is held in a moment.
            late = monotonic() - begun > COMMIT_S
            if late or error.code() not in LOST:
                self._raise_unless_transient(error, late)
            await asyncio.sleep(RETRY_S)

    async def close(self) -> None:
        """Revokes all (with `on_revoked`) and leaves the group."""
        await self._poller.close()

    def _on_assign(self, consumer: Consumer, won: list[TopicPartition]) -> None:
        """In the poll thread: tells the loop, and waits until it is ready for the records."""
        places = self._places(consumer, won) if won else {}
        what = f"taking over partitions of {self._consumer_group}"
        if places:
            self._poller.wait(self._assigned(places), ASSIGN_S, what)
        self._poller.assign({place: committed.offset for place, committed in places.items()})

    def _give_up(self, _: Consumer, revoked: list[TopicPartition], *, lost: bool) -> None:
        """In the poll thread: lets the loop finish, commits its last word, gives all back."""
        gone = [Partition(place.topic, place.partition) for place in revoked]
        mine = [place for place in gone if place in self._poller.held]
        what = f"giving up partitions of {self._consumer_group}"
        try:
            if mine:
                last = self._poller.wait(self._revoked(mine, lost), REVOKE_S, what)
                if last and not lost:
                    self._commit_last(last)
        finally:
            self._poller.unassign(gone)

    async def _assigned(self, places: Mapping[Partition, Committed]) -> None:
        await self._told_assigned(places)
        self._poller.hold(places)

    async def _revoked(
        self, partitions: Sequence[Partition], lost: bool
    ) -> Mapping[Partition, Committed]:
        self._poller.drop(partitions)
        return await self._told_revoked(partitions, lost)

    def _places(self, consumer: Consumer, won: list[TopicPartition]) -> dict[Partition, Committed]:
        """In the poll thread: where the group stands in the partitions that were won."""
        asked = [TopicPartition(place.topic, place.partition) for place in won]
        begun = monotonic()
        while True:
            answer, error = _ask(lambda: consumer.committed(asked, timeout=REQUEST_S))
            if error is None:
                break
            self._raise_unless_transient(error, monotonic() - begun > REQUEST_S)
            sleep(RETRY_S)
        places = committed_in(answer)
        for place in asked:
            if Partition(place.topic, place.partition) not in places:
                raise DependencyError(
                    f"the consumer group {self._consumer_group} has no place in "
                    f"{place.topic}/{place.partition}: apply the recipe first"
                )
        return places

    def _commit_held(self, commits: Mapping[Partition, Committed]) -> KafkaError | None:
        """In the poll thread: one attempt, for what is held by now."""
        held = {place: at for place, at in commits.items() if place in self._poller.held}
        return self._commit(held) if held else None

    def _commit_last(self, commits: Mapping[Partition, Committed]) -> None:
        """In the poll thread: the last word on partitions that are being given up.

        Where it does not get through, the next owner reads again what was done already.
        """
        begun = monotonic()
        while (error := self._commit(commits)) is not None:
            if error.code() not in TRANSIENT or monotonic() - begun > LAST_COMMIT_S:
                places = ", ".join(f"{place.topic}/{place.number}" for place in commits)
                logger.warning("no last commit for %s: %s", places, error.str())
                return
            sleep(RETRY_S)

    def _commit(self, commits: Mapping[Partition, Committed]) -> KafkaError | None:
        """In the poll thread: commits, if anybody is there.

        That is asked first, since librdkafka's commit has no time-out of its own: while no broker
        answers it waits for a whole session. (The coordinator would be the one to ask, but it is
        not asked for a consumer that is being closed; and `list_topics` may not be called in a
        callback: it aborts the process.)
        """
        consumer, offsets = self._poller.consumer, offsets_of(commits)
        try:
            consumer.get_watermark_offsets(offsets[0], timeout=ANSWER_S)
        except KafkaException:  # Whatever it says: there is no leader to be found.
            return KafkaError(KafkaError._TRANSPORT)
        return _ask(lambda: consumer.commit(offsets=offsets, asynchronous=False))[1]

    def _raise_unless_transient(self, error: KafkaError, late: bool) -> None:
        if late or error.code() not in TRANSIENT:
            raise failure(f"the consumer group {self._consumer_group}", error)


def _ask(
    ask: Callable[[], list[TopicPartition]],
) -> tuple[list[TopicPartition], KafkaError | None]:
    """What the coordinator answers, and its error if there is one."""
    try:
        answer = ask()
    except KafkaException as exception:
        return [], error_of(exception)
    return answer, next((place.error for place in answer if place.error is not None), None)
