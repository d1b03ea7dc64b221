"""Faults that strike at a moment: what is done to processes, clocks, the log and the disks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

from headrace.schemas.events import (
    EnvironmentUse,
    EpisodeEnded,
    PolicyUse,
    QuotaSet,
    Ref,
    TaskCancelled,
    TaskSubmitted,
)
from headrace.schemas.topics import (
    ACTIONS,
    AUDIT,
    BATCHES,
    DEAD_LETTERS,
    EPISODES,
    GENERATIONS,
    GROUPS,
    INSTANCES,
    ITEMS,
    LIMITS,
    OBSERVATIONS,
    OUTCOMES,
    POLICIES,
    PROMPTS,
    RESULTS,
    RUNS,
    SHARES,
    TASKS,
    TRAJECTORIES,
    TURNS,
    WAITING,
    Topic,
)
from headrace.services.base.clock import now
from headrace.services.kafka.broker import Outgoing, Partition, Record
from headrace.services.log.event_log import EventLog
from headrace.services.tasks.task_maker import Item, TaskMaker
from tests.memory.memory_log import PartitionLog
from tests.simulation.learner import bring_foreign
from tests.simulation.needed import needed
from tests.simulation.processes import Process, Run
from tests.simulation.requests_of_tenants import Requests
from tests.simulation.scenario import RUIN, WAITS
from tests.simulation.tenant_keys import REQUESTS, has_keys
from tests.simulation.virtual_time import loop

GARBAGE = (b"", b"\xffgarbage", b"\0\x7f\xff\xff\xffof a schema that nobody registered", None)
SOLE_WRITERS = ("scheduler", "assemble-batches", "item-statistics", "trainer", "source")
SCALED = ("agent", "env", "inference", "assemble-groups")
NEVER_GARBAGE = (RUNS, TRAJECTORIES, ITEMS, INSTANCES, LIMITS, AUDIT, SHARES, TURNS, DEAD_LETTERS)
"""Read by reference alone, by what hosts a service, at a start alone, if there are limits alone, or
by nobody."""
NEVER_REPEATED = (*NEVER_GARBAGE, TASKS, WAITING, EPISODES, BATCHES, POLICIES)
"""Written by sole writers, who write each record once; and what `submit again` repeats."""
BUSY_S = 30.0
"""Longest that faults wait for the first episode."""
AIMS = (
    *(EPISODES, GENERATIONS, OBSERVATIONS, TRAJECTORIES, OUTCOMES, RESULTS, GROUPS),
    *(ITEMS, BATCHES),
)
"""Topics whose records an aimed fault waits for: what is written next is another's, or missing."""
DRAIN_S = 20.0
"""Longest that an inference worker drains."""
AIM_S = 2.0
"""Longest that it waits."""


class Acts:
    """What can be done to a run."""

    def __init__(self, run: Run, log: EventLog) -> None:
        self._run = run
        self._log = log
        self._chance = Random(f"acts {loop().random.random()}")
        self._background: set[asyncio.Task[None]] = set()
        self._requests: Requests | None = None
        """Of a run in which tenants have keys."""
        if has_keys(run.recipe):
            self._requests = Requests(run, log.broker, Random(f"requests {self._chance.random()}"))
        self._limited = False
        """Whether the other tenant has a limit."""
        self._set_at = 0
        """When its limit was last changed, in epoch milliseconds."""
        self._by_name: dict[str, Callable[[], None]] = {
            "kill": self.kill,
            "freeze": self.freeze,
            "expel": self.expel,
            "rebalance": self.rebalance,
            "outage": self.outage,
            "twin": self.twin,
            "scale": self.scale,
            "restart": self.restart,
            "clock": self.clock,
            "garbage": self.garbage,
            "foreign task": self.foreign_task,
            "submit again": self.submit_again,
            "cancel": self.cancel,
            "foreign transaction": self.foreign_transaction,
            "repeat": self.repeat,
            "retention": self.retention,
            "damage": self.damage,
            WAITS: self.waiting_tenant,
            REQUESTS: self.requests,
            RUIN: self.truncate,
        }

    async def strike(self) -> None:
        """Does what the scenario says, at moments of chance."""
        scenario = self._run.scenario
        if scenario.timing != "any":
            await self._until_busy()
        for name in scenario.acts:
            await asyncio.sleep(self._chance.uniform(0.0, scenario.pause_s))
            if scenario.timing == "aimed":
                await self._until_written(self._chance.choice(AIMS), AIM_S)
                await asyncio.sleep(self._chance.expovariate(1 / scenario.faults.latency_s))
            self._by_name[name]()

    async def _until_busy(self) -> None:
        """Waits, bounded, until the first episode has started."""
        with suppress(TimeoutError):
            async with asyncio.timeout(BUSY_S):
                while not any(log.end for log in self._logs(EPISODES)):
                    await asyncio.sleep(0.1)

    async def _until_written(self, topic: Topic[Any], most_s: float) -> None:
        """Waits, bounded, until a record of a topic comes."""
        written = asyncio.Event()
        logs = self._logs(topic)
        for log in logs:
            log.watchers[written] = None
        with suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await written.wait()
        for log in logs:
            del log.watchers[written]

    async def heal(self) -> None:
        """Ends all faults that last."""
        if self._limited:
            self._limit(None)
        if self._requests is not None:
            self._requests.cancel_what_waits()
        self._run.scenario.faults.heal()
        self._run.scenario.blob_faults.heal()
        self._run.scenario.crash_while_saving = 0.0
        for process in self._run.processes:
            process.thaw()
            process.clock_error_s = 0.0
        await asyncio.gather(*self._background)
        if down_s := self._run.cluster.state.down_s():
            await asyncio.sleep(down_s)
        for service in self._run.scenario.processes:
            for policy in self._run.policies_of(service):
                if not self._run.running(service, policy):
                    self._run.add(service, policy)

    def kill(self) -> None:
        """Kills a process."""
        process = self._any_process()
        self._fault("killed", process)
        process.kill()

    def freeze(self) -> None:
        """Stops a process for a while; it is a zombie then where that is beyond its session."""
        process = self._any_process()
        seconds = self._chance.choice([0.5, 8.0, 15.0])
        self._fault(f"frozen for {seconds:g} s", process)
        process.freeze()
        loop().call_later(seconds, process.thaw)

    def expel(self) -> None:
        """Has a process lose its sessions, and not hear of it for a while."""
        process = self._any_process()
        seconds = self._chance.choice([0.0, 0.5, 4.0])
        self._fault(f"expelled for {seconds:g} s unheard", process)
        if process.client is not None:
            process.overslept = True
            process.client.lose_sessions(seconds)

    def rebalance(self) -> None:
        """Shares all partitions anew."""
        self._fault("rebalance")
        self._run.cluster.rebalance()

    def outage(self) -> None:
        """Restarts the log."""
        seconds = self._chance.choice([0.3, 2.0, 8.0, 40.0])
        self._fault(f"outage for {seconds:g} s")
        self._run.cluster.outage(seconds)

    def twin(self) -> None:
        """Starts a second copy of a sole writer, for a while."""
        service = self._chance.choice(SOLE_WRITERS)
        policies = self._run.policies_of(service)
        policy = self._chance.choice(policies) if len(policies) > 1 else policies[0]
        twin = self._run.add(service, policy)
        self._fault("twin", twin)
        self._later(self._chance.uniform(0.5, 8.0), twin)

    def scale(self) -> None:
        """Changes the number of a service's processes: up by some, or down to one."""
        service = self._chance.choice(SCALED)
        running = self._run.running(service)
        if len(running) > 1 and self._chance.random() < 0.5:
            for process in running[1:]:
                self._fault("scaled away", process)
                self._later(0.0, process)
        else:
            for _ in range(self._chance.randint(1, 3)):
                self._fault("scaled up", self._run.add(service))

    def restart(self) -> None:
        """Ends a process in order, and starts another in its place."""
        process = self._any_process()
        self._fault("restarted in order", process)
        self._later(0.0, process)
        self._run.add(process.service, process.policy)

    def clock(self) -> None:
        """Sets a process's wall clock wrong."""
        process = self._any_process()
        process.clock_error_s = self._chance.choice([-60.0, -5.0, 5.0, 30.0, 120.0])
        self._fault(f"clock wrong by {process.clock_error_s:+g} s", process)

    def garbage(self) -> None:
        """Writes what is no event."""
        placed = self._placed(NEVER_GARBAGE)
        value = self._chance.choice(GARBAGE)
        self._fault(f"garbage for {placed.topic}/{placed.number}")
        elsewhere = None if value else self._referring_elsewhere(placed)
        self._append(elsewhere or no_event(placed, value))

    def _referring_elsewhere(self, placed: Partition) -> Outgoing | None:
        """The end of the newest episode or task, with a trajectory of another team's namespace.

        None if the topic has no such records, or no episode has started.
        """
        if placed.topic != self._run.topics.name(OUTCOMES):
            return None
        records = self._records(Partition(self._run.topics.name(EPISODES), placed.number))
        started = [int(one.key) for one in records if one.key is not None and one.key.isdigit()]
        if not started:
            return None
        ref = Ref(topic="theirs.trajectories.v1", partition=0, offset=0, digest=bytes(16))
        use = PolicyUse(policy="default", tokens=1, longest=1, oldest_version=0)
        outcome = EpisodeEnded(
            task=started[-1], sample=0, item_id="item", ending="finished",
            trajectory=ref, reward=1.0, policies=(use,),
        )  # fmt: skip
        return replace(self._log.outgoing(outcome), partition=placed.number)

    def foreign_task(self) -> None:
        """Another team submits what can't be run."""
        made = TaskMaker(self._run.recipe, "team").make(
            Item("item"), f"team-{self._chance.random()}"
        )
        changes: list[dict[str, Any]] = [
            {"agent": "not-there"},
            {"environment": EnvironmentUse(use="not-there")},
            {"environment": EnvironmentUse(use="default", options='{"odd": 1}')},
            {"payload": "[]"},
            {"samples": 0},
            {"payload": json.dumps({"text": "x" * 1_100_000})},
            {},
        ]
        if len(made.roles) > 1:  # One role is played by the first version.
            role, use = list(made.roles.items())[-1]
            pinned = use.model_copy(update={"version": 0})
            changes += [{"roles": {**made.roles, role: pinned}}] * len(changes)
        task: TaskSubmitted = made.model_copy(update=self._chance.choice(changes))
        self._fault("foreign task")
        self._append(self._log.outgoing(task))

    def waiting_tenant(self) -> None:
        """Another tenant submits tasks, or its limit is changed. At first, its tasks wait."""
        tasks = TaskMaker(self._run.recipe, "team")
        if self._chance.random() < 0.3 or not self._limited:
            self._limit(self._chance.choice([0, 1, 2, None]) if self._limited else 0)
        for _ in range(self._chance.randint(1, 4)):
            made = tasks.make(Item("item"), f"theirs-{self._chance.random()}")
            self._append(self._log.outgoing(made.model_copy(update={"tenant": "theirs"})))
        self._fault("tasks of another tenant")

    def _limit(self, episodes: int | None) -> None:
        """Changes the limit of the other tenant's live episodes."""
        self._limited = True
        self._set_at = max(self._set_at + 1, int(now() * 1000))  # A signed one must be later.
        quota = QuotaSet(tenant="theirs", set_at=self._set_at, live_episodes=episodes)
        if self._requests is None:
            self._append(self._log.outgoing(quota))
        else:
            self._append(self._requests.signed(quota, "operator"))

    def requests(self) -> None:
        """Tenants with keys submit and cancel tasks, and so does somebody who has none."""
        assert self._requests is not None
        self._fault("requests for tenants with keys")
        self._requests.write_some()

    def submit_again(self) -> None:
        """Somebody submits a task a second time."""
        if records := self._records(Partition(self._run.topics.name(TASKS), 0)):
            again = self._chance.choice(records)
            self._fault(f"submitted again by offset {again.offset}")
            self._append(_copy(again))

    def cancel(self) -> None:
        """Somebody cancels a task: one that is there, or one that nobody submits."""
        tasks = self._records(Partition(self._run.topics.name(TASKS), 0))
        source, task_id = "nobody", str(self._chance.random())
        if tasks and self._chance.random() < 0.9:
            headers = dict(self._chance.choice(tasks).headers)
            if b"/" in (name := headers.get("ce_id", b"")):
                source, _, task_id = name.decode().partition("/")
        self._fault(f"cancelled by name {source}/{task_id}")
        cancelled = TaskCancelled(source=source, task_id=task_id, reason="by chance")
        for _ in range(self._chance.choice([1, 1, 1, 2])):
            self._append(self._log.outgoing(cancelled))

    def foreign_transaction(self) -> None:
        """Somebody's transaction stays open for a while, and holds all readers back."""
        placed, state = self._placed(NEVER_GARBAGE), self._run.cluster.state
        seconds = self._chance.choice([0.05, 2.0, 8.0])
        self._fault(f"foreign transaction for {seconds:g} s")
        values = self._chance.choices(GARBAGE, k=self._chance.randint(1, 3))
        records = [no_event(placed, value) for value in values]
        writer = f"team {self._chance.random()}"
        epoch = state.fence(writer)
        state.begin(writer, epoch, records)
        decide = state.commit if self._chance.random() < 0.5 else state.abort
        loop().call_later(seconds, decide, writer, epoch)

    def repeat(self) -> None:
        """Something that was sent arrives a second time, late."""
        if records := self._records(self._placed(NEVER_REPEATED)):
            again = self._chance.choice(records)
            self._fault(f"repeated by {again.partition.topic}@{again.offset}")
            self._append(_copy(again))

    def retention(self) -> None:
        """Deletes what nobody needs any more, as far as topics keep records for days."""
        self._fault("retention")
        for partition, before in needed(self._run).items():
            self._run.expired += self._run.cluster.expire(partition, before)

    def truncate(self) -> None:
        """Deletes all of a partition, whoever needs it yet: who misses it must say so."""
        log = self._chance.choice([*self._logs(PROMPTS), *self._logs(ACTIONS)])
        self._fault(f"truncated for {log.partition.topic}")
        self._run.expired += self._run.cluster.expire(log.partition, log.end)

    def damage(self) -> None:
        """Kills a trainer, and tears its newest checkpoint or brings one of another log."""
        trainer = self._chance.choice(self._run.running("trainer"))
        folder = self._run.folder / trainer.name / "checkpoints" / (trainer.policy or "")
        newest = sorted(folder.glob("v*"))[-1:]
        trainer.kill()
        if self._chance.random() < 0.3:
            self._fault("foreign checkpoint", trainer)
            bring_foreign(folder, self._chance)
            return
        self._fault("checkpoint damaged", trainer)
        for checkpoint in newest:
            path = self._chance.choice(sorted(checkpoint.iterdir()))
            path.write_bytes(path.read_bytes()[: self._chance.randint(0, 20)])

    def _any_process(self) -> Process:
        victims, running = self._run.scenario.victims, self._run.running()
        struck = [process for process in running if process.service in victims]
        return self._chance.choice(struck or running)

    def _later(self, seconds: float, process: Process) -> None:
        """Ends a process for good, in order or by force."""
        force = self._chance.random() < 0.3

        async def end() -> None:
            await asyncio.sleep(seconds)
            process.thaw()
            if process.service == "inference" and process.number % 2 == 0:
                self._fault("drains", process)
                await process.drain(DRAIN_S)
            if force:
                process.kill()
            await process.stop()

        task = asyncio.create_task(end())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _placed(self, never: tuple[object, ...]) -> Partition:
        """A partition of chance."""
        topics = [placed for placed in self._run.topics if placed.topic not in never]
        placed = self._chance.choice(topics)
        return Partition(placed.name, self._chance.randrange(placed.partitions))

    def _logs(self, topic: Topic[Any]) -> list[PartitionLog]:
        """All partitions of a topic."""
        topics = self._run.cluster.state.topics
        return [log for one in self._run.topics if one.topic is topic for log in topics[one.name]]

    def _records(self, partition: Partition) -> list[Record]:
        log = self._run.cluster.state.log(partition)
        return log.read(log.first, 1_000_000)[0]

    def _append(self, outgoing: Outgoing) -> None:
        self._run.cluster.state.append(outgoing)

    def _fault(self, text: str, process: Process | None = None) -> None:
        self._run.chronicle.fault(text, process.name if process is not None else "")


def no_event(place: Partition, value: bytes | None) -> Outgoing:
    """A record that is no event."""
    return Outgoing(place.topic, b"key", value, [], place.number)  # type: ignore[arg-type]


def _copy(record: Record) -> Outgoing:
    partition = record.partition
    return Outgoing(
        partition.topic, record.key or b"", record.value or b"", record.headers, partition.number
    )
