"""A namespace as another team sees it. `headrace.Client` is the same without `async`."""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.errors import RecordsLost, UsageError
from headrace.schemas.events import (
    Blob,
    EpisodeEnded,
    PolicyPublished,
    Ref,
    TaskEnded,
    TrajectoryRecorded,
)
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import RESULTS
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.log.kept_records import KeptRecords
from headrace.services.log.log_reader import CaughtUp, Start, follow_events
from headrace.services.log.request_signatures import RequestSigner
from headrace.services.log.unpacked import Texts
from headrace.services.models.blob_owners import owner_name
from headrace.services.models.blobs import BlobStore
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import Connection, connect, locate
from headrace.services.namespace.lookup import find_namespace
from headrace.services.namespace.run_life import read_life
from headrace.services.operate.find_versions import read_versions
from headrace.services.operate.run_references import fetch_models
from headrace.services.operate.submit.task_lines import read_tasks, send_tasks
from headrace.services.tasks.artifact_store import write_artifacts
from headrace.trajectories import Trajectory, unpack

logger = logging.getLogger(__name__)

FETCHED_AT_ONCE = 64
"""Trajectories in memory at once."""


@dataclass(frozen=True, slots=True)
class SubmittedTask:
    """A task that is in the log."""

    number: int
    """Its offset in `tasks`, which every event about it carries."""
    task_id: str


class AsyncClient:
    """A namespace, as another team sees it. Use it as an asynchronous context manager."""

    def __init__(
        self,
        bootstrap: str | None = None,
        registry: str | None = None,
        namespace: str | None = None,
        *,
        source: str = "client",
        state: str | Path | None = None,
        properties: Mapping[str, str] | None = None,
        key: str | Path | None = None,
    ) -> None:
        """Connects to nothing yet.

        `bootstrap` is `host:port[,host:port]` and `registry` the URL of a Confluent-compatible
        schema registry; without both, the local stack of the folder `state` is used, by default
        `.headrace`. Without `namespace`, the run that started last is used, and no replay.
        `source` names who submits: task ids are unique within it. `properties` are librdkafka
        properties, such as `security.protocol`. `key` is the file of the private key that signs
        tasks, if the recipe names keys of your tenant (`headrace keys new`). What is left out comes
        from the environment variables of the commands, such as HEADRACE_STATE.

        Raises UsageError if a name is not allowed, or only one of both addresses is given.
        """
        if (bootstrap is None) != (registry is None):
            raise UsageError("give both `bootstrap` and `registry`, or neither for the local stack")
        self._cluster = ClusterConfig.of_environment(
            state=None if state is None else Path(state),
            bootstrap_servers=bootstrap,
            registry_url=registry,
            namespace=namespace,
            kafka_properties=dict(properties or {}),
        )
        self._source = source
        self._signer = RequestSigner.of_environment(key)
        self._session: _ClientSession | None = None
        self._first_result: dict[int, dict[Partition, Start]] = {}
        """Submitted task to where its result can be at the earliest."""

    async def __aenter__(self) -> AsyncClient:
        """Connects.

        Raises DependencyError if the broker does not answer within 5 s, and UsageError if no such
        namespace exists.
        """
        cluster = await asyncio.to_thread(locate, self._cluster)
        async with AsyncExitStack() as stack:
            connection = await stack.enter_async_context(
                connect(cluster, self._source, self._signer)
            )
            topics, life = await find_namespace(connection, cluster.namespace)
            recipe = life.recipe()
            self._session = _ClientSession(
                connection, connection.log(topics), recipe, Texts(recipe), stack.pop_all()
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes the connection."""
        if self._session is not None:
            await self._session.stack.aclose()
            self._session = None

    @property
    def namespace(self) -> str:
        """The namespace that this client uses."""
        return self._connected().log.topics.namespace

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return self._connected().recipe

    async def submit(self, tasks: Iterable[Mapping[str, Any]]) -> list[SubmittedTask]:
        """Writes tasks; they are durable on return.

        Each task has the keys of a line of `headrace submit`: `payload`, `samples`, `item_id`,
        `task_id` and so on; what is left out comes from the recipe. `artifacts` are files that go
        in with the task: name to a path, to bytes, or to an artifact of another episode. Raises
        UsageError if a key or a value is wrong, if the run would refuse a task, if its tenant needs
        another signature, or if the run has ended: then no task was written. Raises DependencyError
        if the blob store can't take a file.
        """
        session = self._connected()
        topics = session.log.topics
        (await read_life(session.log)).require_open(topics.namespace)
        blobs = self._cluster.open_blobs(
            owner_name(await session.log.broker.cluster_id(), topics.namespace)
        )
        fetch = partial(fetch_models, session.recipe, self._cluster, logger.info, weights=False)
        await asyncio.to_thread(fetch)
        lines = await asyncio.to_thread(_lines, list(tasks), blobs)
        events = await asyncio.to_thread(read_tasks, session.recipe, self._source, lines, blobs)
        if session.writing is None:
            session.writing = await session.connection.writing_log(topics)
        bounds = await session.log.broker.ends(topics.partitions_of(RESULTS))
        starts: dict[Partition, Start] = {each: end for each, (_, end) in bounds.items()}
        submitted = [SubmittedTask(*pair) for pair in await send_tasks(session.writing, events)]
        self._first_result |= dict.fromkeys((task.number for task in submitted), starts)
        return submitted

    async def results(
        self,
        tasks: Iterable[SubmittedTask | int] | None = None,
        *,
        follow: bool = False,
        timeout_s: float | None = None,
        labels: Mapping[str, str] = MappingProxyType({}),
    ) -> AsyncGenerator[TaskEnded, None]:
        """Yields the result of each task, once, as it is in the log.

        With `tasks` (or their numbers) it waits for these and ends with the last of them. Without,
        it yields all results that the log holds, and with `follow` goes on with new ones. With
        `labels`, it leaves out tasks that do not have all of these labels. Raises TimeoutError once
        it has waited for results for `timeout_s` in all. The time in which the caller works with
        one does not count.
        """
        log = self._connected().log
        wanted = None
        if tasks is not None:
            wanted = {task if isinstance(task, int) else task.number for task in tasks}
        seen: set[int] = set()
        clock, waited_s = asyncio.get_running_loop().time, 0.0
        async with aclosing(follow_events(log, self._starts(log, wanted))) as items:
            while wanted is None or not wanted <= seen:
                began_s = clock()
                left_s = None if timeout_s is None else max(0.0, timeout_s - waited_s)
                try:
                    async with asyncio.timeout(left_s):
                        item = await anext(items)
                except TimeoutError:
                    missing = sorted((wanted or set()) - seen)
                    raise TimeoutError(
                        f"no result within {timeout_s:g} s of {len(missing)} tasks: "
                        f"{missing[:10]}. `headrace show NUMBER` tells where a task stands"
                    ) from None
                waited_s += clock() - began_s
                if isinstance(item, CaughtUp):
                    if wanted is None and not follow:
                        return
                elif (ended := _result(item, wanted, seen)) is not None:
                    seen.add(ended.task)
                    if labels.items() <= ended.labels.items():
                        yield ended

    async def trajectories(
        self,
        tasks: Iterable[SubmittedTask | int] | None = None,
        *,
        follow: bool = False,
        timeout_s: float | None = None,
        skip_lost: bool = False,
    ) -> AsyncGenerator[Trajectory, None]:
        """Yields the trajectories that count, in the order of their tasks' results.

        The other arguments are those of `results`. An episode that was refused or failed early has
        no trajectory. Raises RecordsLost if a trajectory was deleted by retention. With
        `skip_lost`, it leaves such ones out, and logs how many.
        """
        lost, records = 0, KeptRecords(self._connected().log.broker)
        try:
            async with aclosing(self.results(tasks, follow=follow, timeout_s=timeout_s)) as results:
                async for ended in results:
                    refs = [one.trajectory for one in ended.outcomes if one.trajectory is not None]
                    if skip_lost:  # to look for each that is gone would take milliseconds
                        kept = await records.kept(refs)
                        refs, lost = kept, lost + len(refs) - len(kept)
                    for first in range(0, len(refs), FETCHED_AT_ONCE):
                        some = refs[first : first + FETCHED_AT_ONCE]
                        found = await self._fetch(some, skip_lost=skip_lost)
                        lost += len(some) - len(found)
                        for trajectory in found:
                            yield trajectory
        finally:
            if lost:
                logger.warning("%d trajectories can't be read any more, and were left out", lost)

    async def trajectory(self, outcome: EpisodeEnded) -> Trajectory | None:
        """The trajectory of one outcome of a result, or None if none was recorded."""
        if outcome.trajectory is None:
            return None
        return (await self._fetch([outcome.trajectory]))[0]

    async def artifact(self, artifact: Blob) -> bytes:
        """Returns the bytes of an artifact, such as one of `outcome.artifacts`, verified.

        Raises BlobError if the blob store does not have it.
        """
        blobs = self._cluster.open_blobs(None)
        return await asyncio.to_thread(lambda: blobs.get(artifact).read_bytes())

    async def save_artifacts(self, outcome: EpisodeEnded, folder: str | Path) -> dict[str, Path]:
        """Writes the files that came out of an episode below a folder, each under its name.

        Returns the files by name. A file that exists is replaced. Raises UsageError if a name would
        lead out of the folder, and BlobError if the blob store does not have a file.
        """
        blobs = self._cluster.open_blobs(None)
        return await asyncio.to_thread(write_artifacts, blobs, outcome.artifacts, Path(folder))

    async def versions(self, policy: str = "default") -> list[PolicyPublished]:
        """Returns the versions of a policy that are published so far, ascending.

        `metrics` of a version has what its training measured, such as `reward_mean`, `loss` and
        `staleness_mean`. Version 0 has none. Raises UsageError if the run has no such policy.
        """
        session = self._connected()
        if policy not in session.recipe.policies:
            raise UsageError(
                f"the run has no policy {policy!r}: it has {', '.join(session.recipe.policies)}"
            )
        return list((await read_versions(session.log, policy)).values())

    async def _fetch(self, refs: list[Ref], *, skip_lost: bool = False) -> list[Trajectory]:
        session, trajectories = self._connected(), []
        if skip_lost:
            events = [event async for event in session.log.fetch_each(refs)]
        else:
            events = list(await session.log.fetch(refs))
        for ref, event in zip(refs, events, strict=True):
            if isinstance(event, TrajectoryRecorded):
                trajectories.append(await asyncio.to_thread(unpack, event, session.texts))
            elif not skip_lost:
                raise RecordsLost(f"{ref.topic}/{ref.partition}@{ref.offset} is not a trajectory")
        return trajectories

    def _starts(self, log: EventLog, wanted: set[int] | None) -> Mapping[Partition, Start]:
        if wanted and wanted <= self._first_result.keys():
            return self._first_result[min(wanted)]
        return dict.fromkeys(log.topics.partitions_of(RESULTS), "first")

    def _connected(self) -> _ClientSession:
        if self._session is None:
            raise UsageError("the client is not connected: use it in a `with` statement")
        return self._session


@dataclass
class _ClientSession:
    """What a client has while it is connected."""

    connection: Connection
    log: EventLog
    recipe: Recipe
    texts: Texts
    stack: AsyncExitStack
    """Closes the connection."""
    writing: EventLog | None = None
    """Opened by the first task that is submitted."""


def _lines(tasks: Iterable[Mapping[str, Any]], blobs: BlobStore) -> list[str]:
    """Returns tasks as JSON lines, and stores files that are given as bytes."""
    lines = []
    for task in tasks:
        line = {"task_id": uuid.uuid4().hex, **task}
        if isinstance(files := line.get("artifacts"), Mapping):
            line["artifacts"] = {name: _file(one, blobs) for name, one in files.items()}
        lines.append(json.dumps(line))
    return lines


def _file(content: Any, blobs: BlobStore) -> Any:
    """Returns a file of a task as JSON values."""
    if isinstance(content, bytes):
        content = blobs.put(content)
    if isinstance(content, Blob):
        return {"sha256": content.sha256.hex(), "size": content.size}
    return str(content) if isinstance(content, Path) else content


def _result(item: Delivery[Any], wanted: set[int] | None, seen: set[int]) -> TaskEnded | None:
    event = item.event
    if not isinstance(event, TaskEnded) or event.task in seen:
        return None
    return event if wanted is None or event.task in wanted else None
