"""Limits of calls over several inference workers, as processes on a real broker that are killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from headrace.infra import local
from headrace.schemas.events import (
    GenerationCompleted,
    GenerationRequested,
    LimitShared,
    LoadReported,
    PolicyPublished,
    Sampling,
)
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import GENERATIONS, LOADS, SHARES
from headrace.services.models.weights import weights_digest
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.worker.limits.limits_of import LEASE_S
from tests.bench.deployment import Deployment, deployed
from tests.commands import cluster_variables, run_command
from tests.integration.test_cancel import headrace

BOUND_S = 120.0
IN_FLIGHT, CALLS, PERIOD_S, CALL_S = 6, 40, 1.0, 0.1
WAKE_S = 1.0
"""Seconds that a process has to end its calls when it wakes after its lease."""


@dataclass
class Call:
    """A call of the model. Times are of the machine's monotonic clock."""

    process: int
    begun_s: float
    ended_s: float = inf
    cancelled: bool = False


@dataclass
class Pool:
    """The processes of a pool, what was done to them, and the calls that they made."""

    deployment: Deployment
    file: Path
    killed_s: dict[int, float] = field(default_factory=dict)
    paused: list[tuple[int, float, float]] = field(default_factory=list)
    """Process, and from when to when it was stopped."""
    answered: set[int] = field(default_factory=set)
    sent: int = 0

    def processes(self, service: str) -> list[int]:
        """The ids of the processes of a service."""
        found = []
        for child in psutil.Process().children(recursive=True):
            try:
                if service in child.cmdline() and "serve" in child.cmdline():
                    found.append(child.pid)
            except psutil.Error:
                continue
        return sorted(found)

    def kill(self, process: int) -> None:
        """Kills a process, which its supervisor starts again."""
        os.kill(process, signal.SIGKILL)
        self.killed_s[process] = time.monotonic()

    async def pause(self, process: int, seconds: float) -> None:
        """Stops a process for a while."""
        os.kill(process, signal.SIGSTOP)
        begun_s = time.monotonic()
        await asyncio.sleep(seconds)
        self.paused.append((process, begun_s, time.monotonic()))
        os.kill(process, signal.SIGCONT)

    async def ask(self, count: int) -> None:
        """Sends prompts."""
        for number in range(self.sent, self.sent + count):
            request = GenerationRequested(
                task=number,
                sample=0,
                call="0",
                policy="default",
                text="go",
                sampling=Sampling(max_tokens=1),
                expires_at=int(time.time() * 1000) + 600_000,
                digest=b"d" * 16,
            )
            await self.deployment.log.send(request)
        self.sent += count

    async def follow(self) -> None:
        """Notes what is answered."""
        async with self.deployment.following(GENERATIONS) as deliveries:
            async for delivery in deliveries:
                assert isinstance(delivery.event, GenerationCompleted)
                assert delivery.event.failure is None, delivery.event.failure
                self.answered.add(delivery.event.task)

    async def until(self, answered: int) -> None:
        """Waits until so many prompts are answered."""
        async with asyncio.timeout(BOUND_S):
            while len(self.answered) < answered:
                await asyncio.sleep(0.05)

    def calls(self) -> list[Call]:
        """Reads the calls, in their order."""
        found: dict[tuple[int, int], Call] = {}
        for line in self.file.read_text().splitlines():
            what, one, number, at = line.split()
            key = int(one), int(number)
            if what == "begun":
                found[key] = Call(key[0], float(at))
            elif what == "cancelled":
                found[key].cancelled = True
            else:
                found[key].ended_s = float(at)
        for call in found.values():
            call.ended_s = min(call.ended_s, self.killed_s.get(call.process, inf))
            for process, begun_s, ended_s in self.paused:
                long = ended_s - begun_s > LEASE_S - 2 * PERIOD_S
                over = begun_s < call.ended_s < ended_s + WAKE_S
                # What is cancelled when the process wakes made no progress since it was stopped.
                if process == call.process and call.cancelled and long and over:
                    call.ended_s = max(call.begun_s, begun_s)
        return sorted(found.values(), key=lambda call: call.begun_s)

    def check(self) -> None:
        """Compares all calls with the limits, in every window."""
        calls = self.calls()
        begun = [call.begun_s for call in calls]
        windows = [after - first for first, after in zip(begun, begun[CALLS:], strict=False)]
        assert min(windows, default=inf) >= PERIOD_S
        assert self.most_in_flight(calls) <= IN_FLIGHT

    def most_in_flight(self, calls: list[Call]) -> int:
        """Counts the calls in flight at each moment. A process that is stopped has no progress."""
        moves: list[tuple[float, int]] = []
        for call in calls:
            begun_s = call.begun_s
            for process, stopped_s, woken_s in sorted(self.paused):
                if process == call.process and begun_s < woken_s and stopped_s < call.ended_s:
                    moves += [(begun_s, 1), (max(begun_s, stopped_s), -1)]
                    begun_s = woken_s
            if begun_s < call.ended_s:
                moves += [(begun_s, 1), (call.ended_s, -1)]
        running, most = 0, 0
        for _, change in sorted(moves):
            running += change
            most = max(most, running)
        return most


def a_recipe(file: Path) -> Recipe:
    engine = {
        "use": "tests.integration.recording_engine:RecordingEngine",
        "slots": 16,
        "options": {"file": str(file), "call_s": CALL_S, "count": 1},
    }
    limits = {"in_flight": IN_FLIGHT, "calls": CALLS, "period_s": PERIOD_S}
    policy: dict[str, Any] = {"model": "tiny-llama", "training": False}
    policy |= {"engine": engine, "limits": limits}
    return Recipe.model_validate({"name": "limits", "policies": {"default": policy}})


@asynccontextmanager
async def a_pool(folder: Path, stack: local.LocalStack, *services: str) -> AsyncIterator[Pool]:
    """A namespace with version 0, and these services."""
    cluster = ClusterConfig(folder, stack.bootstrap_servers, stack.registry_url)
    file = folder / "calls.txt"
    file.touch()
    async with deployed(cluster, a_recipe(file)) as deployment:
        content = (2).to_bytes(8, "little") + b"{}"
        published = PolicyPublished(
            policy="default",
            version=0,
            status="initial",
            digest=weights_digest(content),
            full=deployment.cluster.open_blobs("test").put(content),
            full_version=0,
        )
        await deployment.log.send(published)
        pool = Pool(deployment, file)
        async with deployment.serving(*services):
            following = asyncio.create_task(pool.follow())
            try:
                yield pool
            finally:
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)


async def divisions(pool: Pool, workers: int) -> list[LimitShared]:
    """Waits until so many workers have a share. Returns the divisions so far."""
    found: list[LimitShared] = []
    async with asyncio.timeout(BOUND_S), pool.deployment.following(SHARES) as deliveries:
        async for delivery in deliveries:
            assert isinstance(delivery.event, LimitShared)
            found.append(delivery.event)
            if sum(share.units > 0 for share in delivery.event.shares) == workers:
                break
    return found


def namespace_of(pool: Pool) -> str:
    return pool.deployment.log.topics.namespace


async def use_the_limit(pool: Pool) -> None:
    """Asks until as many calls as allowed were in flight: on a busy machine few may overlap."""
    async with asyncio.timeout(BOUND_S):
        while pool.most_in_flight(pool.calls()) < IN_FLIGHT:
            await pool.ask(40)
            await pool.until(pool.sent)


async def lower_the_limit(pool: Pool, environment: dict[str, str]) -> None:
    """Calls in flight are fewer as soon as those that run have ended."""
    name = "policies.default.limits.in_flight"
    await headrace("quota", name, "--units", "2", environment=environment)
    async with asyncio.timeout(BOUND_S), pool.deployment.following(SHARES) as deliveries:
        async for delivery in deliveries:
            event = delivery.event
            assert isinstance(event, LimitShared)
            if (event.limit, event.units) == (name, 2):
                lowered = event.number
                break
    obeying: set[str] = set()
    async with asyncio.timeout(BOUND_S), pool.deployment.following(LOADS) as deliveries:
        async for delivery in deliveries:
            report = delivery.event
            assert isinstance(report, LoadReported)
            numbers = [use.number for use in report.limits if use.limit == name]
            if any(number >= lowered for number in numbers):
                obeying.add(report.worker)
            if len(obeying) == 2:
                break
    before = len(pool.calls())
    await pool.ask(20)
    await pool.until(pool.sent)
    assert pool.most_in_flight(pool.calls()[before:]) <= 2
    async with asyncio.timeout(BOUND_S):
        while True:  # The newest report may be of a moment in which more were in use.
            shown = await asyncio.to_thread(run_command, ("quota", "--json"), environment)
            (row,) = [one for one in json.loads(shown.stdout) if one.get("limit") == name]
            assert row["units"] == 2
            if row["drained"]:
                break


def test_two_workers_keep_the_limits_while_one_is_killed(
    local_stack: local.LocalStack, tmp_path: Path
) -> None:
    async def main() -> None:
        async with a_pool(tmp_path, local_stack, "scheduler", "inference", "inference") as pool:
            found = await divisions(pool, workers=2)
            assert all(sum(one.reserved for one in event.shares) <= event.units for event in found)
            await pool.ask(200)
            await pool.until(40)
            pool.kill(pool.processes("inference")[0])
            await pool.until(200)
            await use_the_limit(pool)
            pool.check()
            assert len({call.process for call in pool.calls()}) >= 2
            await lower_the_limit(pool, cluster_variables(local_stack, namespace_of(pool)))

    asyncio.run(main())


def acts(random: Random) -> Iterator[tuple[str, str, float]]:
    """What is done next, to a process of which service, and for how many seconds."""
    while True:
        service = random.choice(["inference", "inference", "scheduler"])
        yield random.choice(["kill", "pause"]), service, random.choice([0.5, 3.0, 7.0, 12.0])


@pytest.mark.long
def test_four_workers_keep_the_limits_while_all_are_killed_and_stopped_at_random(
    local_stack: local.LocalStack, tmp_path: Path
) -> None:
    random = Random(0)

    async def disturb(pool: Pool, until_s: float) -> None:
        for act, service, seconds in acts(random):
            if time.monotonic() > until_s:
                return
            process = random.choice(pool.processes(service))
            if act == "kill":
                pool.kill(process)
                await asyncio.sleep(seconds)
            else:
                await pool.pause(process, seconds)
            await asyncio.sleep(random.uniform(0.0, 3.0))

    async def main() -> None:
        services = ("scheduler", "scheduler", *4 * ("inference",))
        async with a_pool(tmp_path, local_stack, *services) as pool:
            await divisions(pool, workers=4)
            disturbing = asyncio.create_task(disturb(pool, time.monotonic() + 120.0))
            while not disturbing.done():
                await pool.ask(60)
                await asyncio.sleep(3.0)
            disturbing.result()
            await pool.until(pool.sent)
            pool.check()
            assert len(pool.killed_s) > 3
            assert len(pool.paused) > 3

    asyncio.run(main())
