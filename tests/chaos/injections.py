"""The kinds of faults. Each is a coroutine that lasts as long as its fault, and heals it."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.chaos.disks import Disk
from tests.chaos.fleet import Clocks, Fleet, signal_to
from tests.chaos.servers import Cluster
from tests.chaos.watch import Gap, Watch

SERVICES = (
    "source", "scheduler", "agent", "env", "inference",
    "assemble-groups", "assemble-batches", "item-statistics", "trainer",
)  # fmt: skip
SOLE_WRITERS = ("scheduler", "assemble-batches", "item-statistics", "trainer")
SCALED = ("agent", "env", "inference")
"""Services of which there may be any number."""
MOST = 8
SESSION_S = 6.0
DEAD_S = 60.0
"""How long a trainer stays dead."""
SLACK_BYTES = 128 * 1024
"""What a full disk still takes: it fills while something is being written."""


@dataclass
class World:
    """All that can be harmed."""

    cluster: Cluster
    fleet: Fleet
    watch: Watch
    clocks: Clocks
    rates: Path
    disks: dict[str, Disk]
    counts: Counter[str] = field(default_factory=Counter)
    """Injections so far, by kind."""
    busy: set[str] = field(default_factory=set)
    """What a running fault has hold of: no second one takes it."""

    @property
    def injections(self) -> int:
        """How many there were."""
        return self.counts.total()

    def count(self, kind: str) -> None:
        """Notes an injection."""
        self.counts[kind] += 1
        self.watch.disturb()

    @contextmanager
    def holding(self, what: str) -> Iterator[bool]:
        """Takes hold of something. False where another fault has it."""
        if what in self.busy:
            yield False
            return
        self.busy.add(what)
        try:
            yield True
        finally:
            self.busy.discard(what)


Inject = Callable[[World, Random], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    inject: Inject
    every: tuple[float, float] | None = None
    """Seconds between two of one phase; None: once a phase."""
    disk: str = ""
    """The disk that it needs."""


async def kill_service(world: World, random: Random) -> None:
    """kill -9 of any service's process."""
    kill(world, random.choice(SERVICES), random, alone=False)


def kill(world: World, service: str, random: Random, *, alone: bool) -> Gap | None:
    """kill -9 of a process of this service, if there is one: the gap that begins.

    `alone`: nothing else is wrong.
    """
    pids = world.fleet.pids(service)
    if not pids:
        return None
    pid = random.choice(pids)
    at = time.time()
    if not signal_to(pid, signal.SIGKILL):
        return None
    world.count("kill-service")
    return world.watch.killed(service, pid, at, alone=alone)


async def keep_trainer_dead(world: World, random: Random) -> None:
    """kill -9 of one policy's trainer, again and again for a minute, and of other services."""
    loop = asyncio.get_running_loop()
    policy = random.choice(list(world.fleet.recipe.policies))
    world.count("dead-trainer")
    until = next_kill = loop.time() + DEAD_S
    next_kill -= DEAD_S
    while loop.time() < until:
        for pid in world.fleet.pids("trainer", policy):
            signal_to(pid, signal.SIGKILL)
        if loop.time() >= next_kill:
            await kill_service(world, random)
            next_kill = loop.time() + random.uniform(2.0, 5.0)
        await asyncio.sleep(0.3)


async def stop_service(world: World, random: Random) -> None:
    """SIGSTOP of a process past its session, then SIGCONT: it wakes as a zombie."""
    service = random.choice(SERVICES)
    pids = world.fleet.pids(service)
    with world.holding(f"stop {service}") as mine:
        if not mine or not pids:
            return
        pid = random.choice(pids)
        signal_to(pid, signal.SIGSTOP)
        world.count("stop-service")
        try:
            await asyncio.sleep(SESSION_S + random.uniform(1.0, 4.0))
        finally:
            signal_to(pid, signal.SIGCONT)


async def twin(world: World, random: Random) -> None:
    """A second copy of a sole writer: they fence each other for as long as both live."""
    service = random.choice(SOLE_WRITERS)
    with world.holding(f"twin {service}") as mine:
        if not mine:
            return
        world.count(f"twin-{service}")
        policies = list(world.fleet.recipe.policies)
        several = service != "scheduler" and len(policies) > 1
        policy = random.choice(policies) if several else None
        second = await world.fleet.add(service, policy)
        try:
            await asyncio.sleep(random.uniform(6.0, 10.0))
        finally:
            await world.fleet.remove(second)


async def scale(world: World, random: Random) -> None:
    """Workers of a kind from 1 to 8, and back to 1."""
    service = random.choice(SCALED)
    with world.holding("scale") as mine:
        if not mine:
            return
        more = []
        try:
            world.count("scale-up")
            for _ in range(MOST - 1):
                more.append(await world.fleet.add(service))
            await asyncio.sleep(random.uniform(10.0, 14.0))
        finally:
            world.count("scale-down")
            await asyncio.gather(*(world.fleet.remove(one) for one in more))


async def kill_broker(world: World, random: Random) -> None:
    """kill -9 of a broker, and its restart on its log."""
    broker = random.choice(world.cluster.brokers)
    with world.holding("broker") as mine:
        if not mine:
            return
        world.count("kill-broker")
        await broker.end()
        try:
            await asyncio.sleep(random.uniform(0.0, 3.0))
        finally:
            await broker.start()


async def stop_broker(world: World, random: Random) -> None:
    """SIGSTOP of a broker for some seconds."""
    broker = random.choice(world.cluster.brokers)
    with world.holding("broker") as mine:
        if not mine:
            return
        world.count("pause-broker")
        broker.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(random.uniform(2.0, 9.0))
        finally:
            broker.send(signal.SIGCONT)


async def delay(world: World, random: Random) -> None:
    """Everything between the services and a broker takes longer."""
    broker = random.choice(world.cluster.brokers)
    with world.holding("delay") as mine:
        if not mine:
            return
        world.count("net-delay")
        broker.proxy.delay_s = random.choice((0.01, 0.05, 0.2, 0.5))
        try:
            await asyncio.sleep(random.uniform(3.0, 6.0))
        finally:
            broker.proxy.delay_s = 0.0


async def cut(world: World, random: Random) -> None:
    """All connections to a broker are reset."""
    world.count("net-cut")
    random.choice(world.cluster.brokers).proxy.cut()


async def drop_replies(world: World, random: Random) -> None:
    """Requests arrive and are done; their replies are lost."""
    broker = random.choice(world.cluster.brokers)
    with world.holding("replies") as mine:
        if not mine:
            return
        world.count("net-drop-replies")
        broker.proxy.mute()
        try:
            await asyncio.sleep(random.uniform(0.3, 4.0))
        finally:
            broker.proxy.unmute()


async def jump_clocks(world: World, random: Random) -> None:
    """The clocks of all services, or of one, are wrong by seconds to an hour."""
    with world.holding("clocks") as mine:
        if not mine:
            return
        name = "all"
        if random.random() < 0.5 and (pids := world.fleet.pids(random.choice(SERVICES))):
            name = str(random.choice(pids))
        world.count("clock-jump")
        seconds = random.choice((1.0, -1.0)) * random.choice((2.0, 30.0, 600.0, 3_600.0))
        world.clocks.skew(name, seconds)
        try:
            await asyncio.sleep(random.uniform(2.0, 5.0))
        finally:
            world.clocks.right(name)


async def fail_some(world: World, random: Random) -> None:
    """Environments and engines fail, 6 or 20 times of 100."""
    with world.holding("rates") as mine:
        if not mine:
            return
        rate = random.choice((0.06, 0.2))
        world.count(f"infrastructure-{round(rate * 100)}%")
        parts = random.choice((("env",), ("engine",), ("env", "engine")))
        write_rates(world.rates, dict.fromkeys(parts, rate))
        try:
            await asyncio.sleep(random.uniform(3.0, 8.0))
        finally:
            write_rates(world.rates, {})


def write_rates(path: Path, rates: dict[str, float]) -> None:
    """Has the plug-ins fail that often."""
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(rates))
    scratch.replace(path)


async def fill_blobs(world: World, random: Random) -> None:
    """The blob store's disk is full, then free again."""
    await _fill(world, random, "blobs")


async def fill_checkpoints(world: World, random: Random) -> None:
    """The checkpoints' disk is full, then free again."""
    await _fill(world, random, "checkpoints")


async def _fill(world: World, random: Random, name: str) -> None:
    with world.holding(f"disk {name}") as mine:
        if not mine:
            return
        world.count(f"disk-full-{name}")
        disk = world.disks[name]
        disk.fill(SLACK_BYTES)
        try:
            await asyncio.sleep(random.uniform(4.0, 9.0))
        finally:
            disk.free()


async def fill_broker(world: World, random: Random) -> None:
    """A broker's disk is full: it stops. The disk is freed, and the broker started again."""
    broker = random.choice(world.cluster.brokers)
    with world.holding("broker") as mine:
        if not mine:
            return
        world.count("disk-full-broker")
        disk = world.disks[broker.name]
        disk.fill(SLACK_BYTES)
        try:
            await asyncio.sleep(random.uniform(3.0, 7.0))
        finally:
            disk.free()
            await broker.end()  # it may still be ending by itself
            await broker.start()


KINDS = {
    "kill-service": Kind(kill_service, every=(1.5, 3.0)),
    "stop-service": Kind(stop_service, every=(2.0, 5.0)),
    "twin": Kind(twin),
    "scale": Kind(scale),
    "kill-broker": Kind(kill_broker, every=(3.0, 6.0)),
    "pause-broker": Kind(stop_broker),
    "net-delay": Kind(delay),
    "net-cut": Kind(cut, every=(1.0, 3.0)),
    "net-drop-replies": Kind(drop_replies),
    "clock-jump": Kind(jump_clocks),
    "infrastructure": Kind(fail_some),
    "disk-full-blobs": Kind(fill_blobs, disk="blobs"),
    "disk-full-checkpoints": Kind(fill_checkpoints, disk="checkpoints"),
    "disk-full-broker": Kind(fill_broker, disk="broker-1"),
}
