"""Finds what may go from one broker, one blob store and one state folder, and removes it."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, suppress
from dataclasses import dataclass

from headrace.errors import DecodeError, UsageError
from headrace.schemas.events import Event
from headrace.schemas.topics import (
    ACTIONS,
    OBSERVATIONS,
    POLICIES,
    RUNS,
    TASKS,
    TOPICS,
    TRAJECTORIES,
    Topics,
)
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import WHOLE, Patience, read_records
from headrace.services.models.blobs import BlobStore
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import Connection
from headrace.services.namespace.lookup import namespaces_in, topics_in
from headrace.services.operate.prune.needs import (
    ENDED_S,
    Namespace,
    Prunable,
    needed_blobs,
    needless_blobs,
)
from headrace.services.operate.show.facts import Fact, fact_of
from headrace.trainer.checkpoint import Checkpoints

NAMING = (TASKS, ACTIONS, OBSERVATIONS, TRAJECTORIES)
"""Topics whose events may name artifacts."""


@dataclass(frozen=True)
class Pruner:
    """Finds what may go from one broker, one blob store and one state folder."""

    connection: Connection
    blobs: BlobStore
    cluster: ClusterConfig
    patience: Patience
    clock: Callable[[], float] = time.time
    """Epoch seconds."""

    async def plan(self, keep: int, unnamed: bool, forget: Collection[str]) -> list[Prunable]:
        """All that may go. UsageError where a namespace to forget is not there, or still runs."""
        # Before the log is read: what is put from here on is not known to be named yet.
        now_s = self.clock()
        existing = await self.connection.broker.list_topics()
        spaces = await self._read(existing)
        _require_ended(spaces, forget, now_s)
        staying = [space for space in spaces if space.name not in forget]
        needed: set[str] = set()
        for space in staying:
            # Those of a run that has ended go too.
            checkpoints = {} if space.ended(now_s) else self._checkpoints(space)
            needed |= needed_blobs(space, keep, checkpoints, now_s)
        published: set[str] = set()
        for space in spaces:
            published |= space.weights() | space.tokenizers()
        named = None
        if unnamed:
            needed |= await self._artifacts(staying, existing)
            named = published | needed
        stored = await asyncio.to_thread(lambda: list(self.blobs.stored()))
        items = list(needless_blobs(stored, published, needed, named, now_s))
        for space in spaces:
            if space.name in forget:
                items += self._whole(space, existing)
            elif space.ended(now_s):
                items += self._folder(space, "checkpoints", "its run has ended, and never goes on")
        return items

    async def carry_out(self, items: Sequence[Prunable]) -> list[Prunable]:
        """Removes these. Returns what went: a blob that was put again meanwhile stays."""
        gone = []
        for item in items:
            if item.blob is not None:
                blob, before = item.blob, item.put_before
                if not await asyncio.to_thread(self.blobs.remove, blob, before):
                    continue
            if item.path is not None:
                await asyncio.to_thread(shutil.rmtree, item.path, ignore_errors=True)
            if item.topics:
                await self.connection.broker.delete_topics(item.topics)
            gone.append(item)
        return gone

    async def _read(self, existing: Mapping[str, int]) -> list[Namespace]:
        """All namespaces, by `runs` and `policies`."""
        spaces: dict[str, Namespace] = {}
        logs: dict[str, EventLog] = {}
        for name in namespaces_in(existing):
            spaces[name] = Namespace(name)
            log = self.connection.log(Topics(name, (), 1))
            logs |= {topic.real_name(name): log for topic in (RUNS, POLICIES)}
        places = [Partition(name, 0) for name in logs if name in existing]
        async with aclosing(self._facts(logs, places)) as facts:
            async for fact in facts:
                spaces[fact.ref.topic.split(".")[0]].add(fact)
        return list(spaces.values())

    async def _artifacts(
        self, namespaces: Iterable[Namespace], existing: Mapping[str, int]
    ) -> set[str]:
        """SHA-256 in hex of the artifacts that events of these namespaces name."""
        logs: dict[str, EventLog] = {}
        places = []
        for namespace in namespaces:
            topics = topics_in(existing, namespace.name)
            log = self.connection.log(topics)
            for placed in topics:
                if placed.topic in NAMING and placed.name in existing:
                    logs[placed.name] = log
                    places += placed.all_partitions()
        found: set[str] = set()
        async with aclosing(self._facts(logs, places)) as facts:
            async for fact in facts:
                artifacts = getattr(fact.event, "artifacts", ())
                found |= {artifact.sha256.hex() for artifact in artifacts}
        return found

    async def _facts(
        self, logs: Mapping[str, EventLog], places: Sequence[Partition]
    ) -> AsyncGenerator[Fact[Event]]:
        """All events of these partitions, each by the log of its topic."""
        whole = dict.fromkeys(places, WHOLE)
        records = read_records(self.connection.broker, whole, self.patience)
        async with aclosing(records):
            async for record in records:
                with suppress(DecodeError):
                    yield await fact_of(logs[record.partition.topic], record)

    def _checkpoints(self, namespace: Namespace) -> dict[str, list[int]]:
        folder = self.cluster.folder(namespace.name) / "checkpoints"
        policies = {one.policy for one in namespace.publications}
        return {policy: Checkpoints(folder / policy, 1).versions() for policy in policies}

    def _whole(self, namespace: Namespace, existing: Mapping[str, int]) -> Iterator[Prunable]:
        """An ended namespace itself: its folder, then its topics."""
        yield from self._folder(namespace, "", "the namespace is to be forgotten")
        ours = "|".join(topic.name for topic in TOPICS)
        named = re.compile(rf"{re.escape(namespace.name)}\.({ours})(\.[a-z0-9_-]+)?\.v1")
        topics = tuple(name for name in existing if named.fullmatch(name))
        why = "the namespace is to be forgotten"
        yield Prunable("topics", f"{namespace.name}.*", 0, why, topics=topics)

    def _folder(self, namespace: Namespace, inside: str, why: str) -> Iterator[Prunable]:
        path = self.cluster.folder(namespace.name) / inside
        if path.is_dir():
            size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            yield Prunable("checkpoints" if inside else "folder", str(path), size, why, path=path)


def _require_ended(namespaces: Sequence[Namespace], forget: Collection[str], now_s: float) -> None:
    known = {namespace.name: namespace for namespace in namespaces}
    for name in forget:
        if name not in known:
            there = ", ".join(known) or "(none)"
            raise UsageError(f"no namespace {name!r} on this broker, which has: {there}")
        if not known[name].ended(now_s):
            raise UsageError(
                f"namespace {name} is {known[name].life.state}: only one whose run ended at least "
                f"{ENDED_S:.0f} s ago can be forgotten"
            )
