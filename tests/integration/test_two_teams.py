"""Two teams share a cluster and a blob store: what one of them operates leaves the other alone."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from contextlib import aclosing
from pathlib import Path

import pytest

from headrace.errors import HeadraceError
from headrace.infra import local
from headrace.schemas.codec import Codec
from headrace.schemas.events import Blob, PolicyPublished, Sampling, TaskSubmitted, Use
from headrace.schemas.topics import DEAD_LETTERS, TASKS, Topics
from headrace.services.kafka.broker import Broker, Outgoing, Partition, Position
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.kafka_broker import KafkaBroker
from headrace.services.log.dead_letter import WHY
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import Patience
from headrace.services.models.blob_owners import owner_name
from headrace.services.operate.acls.grant import Grants, give_access
from headrace.services.operate.dead_letters.dead_letters import redrive
from headrace.services.tasks.cancellation import find_tasks, send_cancellations
from tests.guarded_stack import guarded_stack, properties_of
from tests.unit.operate.prune.shared_cluster import SharedCluster

pytestmark = pytest.mark.long

OPERATIONS = 1_000
LIMIT_S = 3_600.0
CONTENTS = 40
"""Different weights. Both teams publish them in random order, so they share many."""
PATIENCE = Patience(lambda line: None)


def a_task(task_id: str) -> TaskSubmitted:
    sampling = Sampling(max_tokens=1, stop_ids=b"", allowed=b"")
    return TaskSubmitted(
        source="team", task_id=task_id, item_id="1", agent="default",
        roles={"policy": Use(policy="default", sampling=sampling)},
        max_turns=1, max_tokens=1, deadline_s=10,
    )  # fmt: skip


class Team:
    """A namespace, its published weights, its tasks and its dead letters."""

    def __init__(self, cluster: SharedCluster, name: str, broker: KafkaBroker) -> None:
        self.name = name
        self.log = self.log_of(cluster, broker)
        """As its own principal."""
        self.published: list[Blob] = []
        self.tasks = 0
        self._store = cluster.store(name)
        self._owner = cluster.log(name)

    def log_of(self, cluster: SharedCluster, broker: Broker) -> EventLog:
        """The log of this namespace, read and written with the broker's principal."""
        topics, codec = Topics(self.name, ("default",), 1), Codec()
        cluster.registry.prepare(codec, topics)
        return EventLog(broker, topics, codec, cluster.registry, "test")

    @property
    def partitions(self) -> list[Partition]:
        return [partition for topic in self.log.topics for partition in topic.all_partitions()]

    async def go_on(self, draw: random.Random) -> None:
        """Does what a run does: publishes weights, submits a task, parks a record it can't read."""
        blob = self._store.put(b"weights %d" % draw.randrange(CONTENTS))
        self.published.append(blob)
        await self._owner.send(
            PolicyPublished(
                policy="default", version=len(self.published), status="trained", digest=bytes(32),
                full=blob, full_version=len(self.published),
                tokenizer=self._store.put(b"tokenizer"),
            )
        )  # fmt: skip
        at = await self._owner.send(a_task(str(self.tasks)))
        self.tasks += 1
        task = Position(self.log.topics.partition(TASKS), at.offset)
        [record] = await self._owner.broker.fetch([task])
        await self._owner.dead_letter(record, "its schema was not registered")

    async def forge_dead_letter(self, victim: Team) -> None:
        """Writes a dead letter that names a task of another namespace."""
        theirs = Position(victim.log.topics.partition(TASKS), 0)
        [record] = await victim._owner.broker.fetch([theirs])
        origin = {"topic": theirs.partition.topic, "partition": "0", "offset": "0"}
        headers = [(f"{WHY}{key}", value.encode()) for key, value in origin.items()]
        topic = self.log.topics.name(DEAD_LETTERS)
        key, value = record.key or b"", record.value or b""
        await self.log.broker.send(Outgoing(topic, key, value, headers))


class Operator:
    """Team A's operator, who prunes, cancels and redrives, and also tries it with team B's."""

    def __init__(self, cluster: SharedCluster, ours: Team, theirs: Team, seed: int) -> None:
        self._draw = random.Random(seed)
        self._ours = ours
        self._theirs = theirs
        self._pruner = cluster.pruner(broker=ours.log.broker)
        self._elsewhere = theirs.log_of(cluster, ours.log.broker)
        self.counts: Counter[str] = Counter()

    async def operate(self) -> None:
        """Does one operation. What is refused counts too."""
        operation = self._draw.choice([self._prune, self._cancel, self._redrive])
        try:
            await operation()
        except HeadraceError:
            self.counts["refused"] += 1

    async def _prune(self) -> None:
        forget = self._draw.choice([(), (), (), (self._theirs.name,)])
        unnamed = self._draw.random() < 0.25
        plan = await self._pruner.plan(self._draw.randint(1, 3), unnamed, forget)
        self.counts["pruned"] += len(await self._pruner.carry_out(plan))

    async def _cancel(self) -> None:
        log = self._target()
        if self._draw.random() < 0.1:
            found = await find_tasks(log, (), None, all_queued=True)
        elif self._draw.random() < 0.5:
            found = await find_tasks(log, self._some(), "team", all_queued=False)
        else:
            found = await find_tasks(log, self._some(), None, all_queued=False)
        await send_cancellations(log, found, "not needed")
        self.counts["cancelled"] += len(found)

    async def _redrive(self) -> None:
        log = self._target()
        numbers = None if self._draw.random() < 0.1 else [int(one) for one in self._some()]
        if self._draw.random() < 0.3:
            await self._ours.forge_dead_letter(self._theirs)
        async with aclosing(redrive(log, numbers, PATIENCE)) as results:
            async for _, why in results:
                self.counts["not redriven" if why else "redriven"] += 1

    def _target(self) -> EventLog:
        """The own namespace, or with the own principal that of the other team."""
        if self._draw.random() < 0.75:
            return self._ours.log
        return self._elsewhere

    def _some(self) -> list[str]:
        """Ids of tasks, and numbers of tasks and of dead letters. Both teams use them."""
        return [str(self._draw.randrange(self._ours.tasks)) for _ in range(3)]


async def share(stack: local.LocalStack, servers: str, folder: Path) -> Counter[str]:
    """Returns what team A's operations did."""
    administrator = KafkaSettings(stack.bootstrap_servers, "administrator")
    owner = KafkaBroker(administrator)
    brokers = {
        name: KafkaBroker(KafkaSettings(servers, name, properties_of(name))) for name in ("a", "b")
    }
    cluster, teams = SharedCluster(folder, owner, await owner.cluster_id()), {}
    for name, broker in brokers.items():
        await cluster.make(f"team-{name}", b"base", ended=False)
        teams[name] = Team(cluster, f"team-{name}", broker)
        topics = teams[name].log.topics
        grants = Grants.of(topics, f"User:{name}", ("operator", "redrive"))
        await asyncio.to_thread(give_access, administrator, grants)
    kept = cluster.cluster.cluster_folder("team-b", cluster.cluster_id) / "checkpoints" / "default"
    kept.mkdir(parents=True)
    (kept / "file").write_bytes(b"B's")
    ours, theirs, draw = teams["a"], teams["b"], random.Random(1)
    for team in teams.values():
        await team.go_on(draw)
    operator = Operator(cluster, ours, theirs, seed=0)
    try:
        for name, broker in brokers.items():
            await until_it_sees(broker, teams[name].name)
        for _ in range(OPERATIONS):
            before = await owner.ends(theirs.partitions)
            await operator.operate()
            assert await owner.ends(theirs.partitions) == before
            await draw.choice([ours, theirs]).go_on(draw)
        assert all(cluster.held(theirs.published))
        mine = owner_name(cluster.cluster_id, theirs.name)
        assert all(mine in cluster.owners(blob) for blob in theirs.published)
        assert (kept / "file").read_bytes() == b"B's"
        # B's own operator finds all as it was left.
        states = Counter(
            one.state for one in await find_tasks(theirs.log, (), None, all_queued=True)
        )
        assert states == {"queued": theirs.tasks}
        async with aclosing(redrive(theirs.log, None, PATIENCE)) as results:
            assert [why async for _, why in results] == [""] * theirs.tasks
        return operator.counts
    finally:
        for broker in (owner, *brokers.values()):
            await broker.close()


async def until_it_sees(broker: KafkaBroker, namespace: str) -> None:
    """A broker applies a new ACL a moment later."""
    async with asyncio.timeout(60):
        while {one.partition(".")[0] for one in await broker.list_topics()} != {namespace}:
            await asyncio.sleep(0.05)


def test_a_thousand_operations_of_one_team_touch_nothing_of_the_other(tmp_path: Path) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        guarded_stack(tmp_path / "stack", patch, ("a", "b")) as (stack, servers),
    ):
        counts = asyncio.run(asyncio.wait_for(share(stack, servers, tmp_path), LIMIT_S))
    print(dict(counts))
    for done in ("pruned", "cancelled", "redriven", "not redriven", "refused"):
        assert counts[done] >= 50, counts
