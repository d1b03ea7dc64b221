"""Follows all that is written to a namespace, from its first record on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.schemas.topics import DEAD_LETTERS, Topics
from headrace.services.kafka.broker import Broker, Record


@dataclass
class Follower:
    """Hands each record to `on_record`, and wakes who waits for what the records tell."""

    _news: asyncio.Event = field(init=False, default_factory=asyncio.Event)
    _following: asyncio.Task[None] | None = field(init=False, default=None)

    async def on_record(self, record: Record) -> None:
        """Takes the next record of a partition."""
        raise NotImplementedError

    def follow(self, broker: Broker, topics: Topics) -> asyncio.Task[None]:
        """Begins to read, for ever."""
        self._following = asyncio.create_task(self._follow(broker, topics), name="follower")
        self._following.add_done_callback(lambda _: self._news.set())
        return self._following

    async def comes_true(self, holds: Callable[[], bool], bound_s: float) -> bool:
        """Waits until `holds`, which is asked after every read. False after `bound_s`."""
        try:
            async with asyncio.timeout(bound_s):
                while not holds():
                    self._news.clear()
                    if self._following is not None and self._following.done():
                        self._following.result()
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    async def _follow(self, broker: Broker, topics: Topics) -> None:
        reader = broker.reader()
        try:
            await reader.assign(
                {
                    partition: 0
                    for topic in topics
                    if topic.topic is not DEAD_LETTERS
                    for partition in topic.all_partitions()
                }
            )
            while True:
                for item in await reader.read():
                    if isinstance(item, Record):
                        await self.on_record(item)
                self._news.set()
        finally:
            await reader.close()
