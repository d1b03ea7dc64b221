"""A chaos run: rounds of faults and of healing, then the end and the judgement."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from headrace.services.log.event_log import EventLog
from headrace.services.namespace.lookup import open_namespace
from headrace.services.namespace.run_life import enter
from headrace.services.operate.verify.invariants import limit_checks
from headrace.services.operate.verify.invariants.log_facts import Facts
from headrace.services.operate.verify.log_report import examine
from headrace.services.operate.verify.verify import read_all
from tests.chaos import report
from tests.chaos.deploy import deployed, where_in
from tests.chaos.injections import (
    KINDS,
    SERVICES,
    Kind,
    World,
    keep_trainer_dead,
    kill,
    write_rates,
)

logger = logging.getLogger("chaos")

DRAIN_BOUND_S = 150.0
"""Less than an episode's deadline: what only the deadline ends counts as stuck."""
GAP_BOUND_S = 45.0
PHASE_S = (3.0, 8.0)
MIXED = (0, 1, 2, 2, 3, 3)
"""How many kinds a phase mixes, each as likely."""
ROUND_S = 60.0
KILLS_A_ROUND = 8
KILLS_EVERY = 3
"""Every so many rounds one worker is killed at a time."""


@dataclass(frozen=True)
class Options:
    """What to do."""

    seconds: float
    injections: int | None
    """End once there were so many, before `seconds` are over."""
    seed: int
    kinds: Sequence[str]
    brokers: int
    policies: int
    """1, or 2 with a barrier between them."""
    disks: bool
    """Whether disks may be made."""
    keep: Path | None = None
    """Where the brokers' logs go if something is wrong."""
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    """No more faults, once it is set: all is healed and judged."""


@dataclass
class Chaos:
    """One run's state."""

    options: Options
    world: World
    random: Random
    drains_s: list[float] = field(default_factory=list)
    not_drained: list[str] = field(default_factory=list)
    began: float = 0.0

    @property
    def kinds(self) -> dict[str, Kind]:
        """What may be injected here."""
        disks = self.world.disks
        return {
            name: KINDS[name]
            for name in self.options.kinds
            if not KINDS[name].disk or KINDS[name].disk in disks
        }

    async def rounds(self) -> None:
        """Faults and healing in turn, until it is enough."""
        loop = asyncio.get_running_loop()
        self.began = loop.time()
        number = 0
        while not self._enough():
            number += 1
            if len(self.world.fleet.recipe.policies) > 1 and number % KILLS_EVERY == 1:
                logger.info("the trainer of one policy stays dead")
                await keep_trainer_dead(self.world, self.random)
            elif number % KILLS_EVERY or "kill-service" not in self.kinds:
                await self._mixes()
                await self._heal()
            else:
                await self._kills()
            await self._drain(number)

    def _enough(self) -> bool:
        most = self.options.injections
        late = asyncio.get_running_loop().time() - self.began > self.options.seconds
        many = most is not None and self.world.injections >= most
        return late or many or self.options.enough.is_set()

    async def _mixes(self) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + ROUND_S
        running: set[asyncio.Task[None]] = set()
        try:
            while loop.time() < until and not self._enough():
                mix = self._mix()
                lasts_s = self.random.uniform(*PHASE_S)
                logger.info(f"{', '.join(mix) or 'nothing'} for {lasts_s:.1f} s")
                seeds = [self.random.getrandbits(32) for _ in mix]
                phase = [
                    asyncio.create_task(self._inject(self.kinds[name], Random(seed), lasts_s))
                    for name, seed in zip(mix, seeds, strict=True)
                ]
                running.update(phase)
                await asyncio.sleep(lasts_s)
                for done in [task for task in running if task.done()]:
                    running.discard(done)
                    done.result()
                self.world.fleet.check()
        finally:
            for task in running:
                task.cancel()
            outcomes = await asyncio.gather(*running, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome

    def _mix(self) -> list[str]:
        """Kinds of one phase. Services are killed in half of those in which there are any."""
        kinds = sorted(self.kinds)
        mix = self.random.sample(kinds, min(len(kinds), self.random.choice(MIXED)))
        killing = "kill-service"
        if mix and killing in kinds and killing not in mix and self.random.random() < 0.5:
            mix.append(killing)
        return mix

    async def _inject(self, kind: Kind, random: Random, lasts_s: float) -> None:
        """One kind, for as long as its phase lasts, or longer if its fault does."""
        loop = asyncio.get_running_loop()
        until = loop.time() + lasts_s
        async with asyncio.TaskGroup() as group:
            while True:
                group.create_task(kind.inject(self.world, random))
                if kind.every is None:
                    return
                await asyncio.sleep(random.uniform(*kind.every))
                if loop.time() >= until:
                    return

    async def _kills(self) -> None:
        """One worker at a time is killed, and its successor waited for."""
        for _ in range(KILLS_A_ROUND):
            if self._enough():
                return
            if not await self.world.watch.flows(SERVICES, GAP_BOUND_S):
                logger.info(f"not all services are at work after {GAP_BOUND_S:g} s")
            service = self.random.choice(SERVICES)
            gap = kill(self.world, service, self.random, alone=True)
            if gap is None:
                continue
            await self.world.watch.mended(gap, GAP_BOUND_S)
            after = "nothing" if gap.seconds is None else f"{gap.seconds:.1f} s"
            logger.info(f"killed {service}: {after}")
            self.world.fleet.check()

    async def _heal(self) -> None:
        await self.world.cluster.mend()
        for disk in self.world.disks.values():
            disk.free()
        write_rates(self.world.rates, {})
        self.world.fleet.check()

    async def _drain(self, number: int) -> None:
        """Waits until every task that was submitted by now has ended."""
        watch = self.world.watch
        waiting = set(watch.open_tasks)
        began = time.monotonic()
        if await watch.comes_true(lambda: not waiting & watch.open_tasks, DRAIN_BOUND_S):
            self.drains_s.append(time.monotonic() - began)
            logger.info(
                f"round {number}: {self.world.injections} injections, "
                f"{len(waiting)} tasks drained in {self.drains_s[-1]:.1f} s"
            )
        else:
            stuck = sorted(waiting & watch.open_tasks)
            self.not_drained.append(
                f"round {number}: {len(stuck)} of {len(waiting)} tasks in {DRAIN_BOUND_S:g} s: "
                f"{stuck[:10]}"
            )
            logger.info(self.not_drained[-1])

    async def finish(self, log: EventLog) -> None:
        """No more tasks; all that there are end, are decided and trained; the run ends."""
        watch, fleet = self.world.watch, self.world.fleet
        await fleet.end_source()
        whole = await watch.comes_true(
            lambda: not watch.open_tasks and watch.low_mark >= watch.tasks and not watch.untrained,
            DRAIN_BOUND_S,
        )
        if not whole:
            self.not_drained.append(
                f"the end: {len(watch.open_tasks)} tasks open, {watch.low_mark} of {watch.tasks} "
                f"decided, versions {watch.versions} of batches {dict(watch.batches)} in "
                f"{DRAIN_BOUND_S:g} s"
            )
        for state in ("ending", "ended"):
            await enter(log, state, fleet.recipe, "chaos is over")
        with contextlib.suppress(TimeoutError):
            await fleet.end(30.0)


async def run(options: Options, folder: Path) -> report.Outcome:
    """The whole run, in an empty folder. Everything that it starts has ended when it returns."""
    async with AsyncExitStack() as stack:
        made = deployed(folder, options.brokers, disks=options.disks, policies=options.policies)
        world, log = await stack.enter_async_context(made)
        chaos = Chaos(options, world, Random(options.seed))
        logger.info("running")
        began = time.monotonic()
        await chaos.rounds()
        await chaos.finish(log)
        seconds = time.monotonic() - began
        await world.fleet.close()
        logger.info("reading the log")
        outcome = await _judge(chaos, seconds)
        if not outcome.good and options.keep is not None:
            for number in range(1, options.brokers + 1):
                kept = options.keep / f"data-{number}"
                shutil.copytree(world.cluster.data(number), kept, dirs_exist_ok=True)
        return outcome


async def _judge(chaos: Chaos, seconds: float) -> report.Outcome:
    world, options = chaos.world, chaos.options
    where = where_in(world.fleet.where.state, world.cluster.direct, world.cluster.registry_url)
    async with open_namespace(where, "checker") as (log, life):
        deliveries, undecodable = await read_all(log)
        found = examine(life.recipe(), deliveries, settled=True, undecodable=undecodable)
        ahead: list[str] = []
        if "clock-jump" not in world.counts:  # The times of records show who went ahead.
            judged = limit_checks.check(Facts.of(deliveries), life.recipe())
            ahead = [line for line in judged if "is ahead of" in line]
    lost, doubled = report.losses(deliveries)
    gaps = world.watch.gaps
    return report.Outcome(
        seed=options.seed,
        brokers=options.brokers,
        seconds=seconds,
        injections=dict(world.counts),
        records=len(deliveries),
        lost=lost,
        doubled=doubled,
        violations=[*found.violations, *ahead],
        duplicates=found.duplicates,
        endings=report.endings(deliveries),
        restarts=world.fleet.restarts,
        drains_s=chaos.drains_s,
        not_drained=chaos.not_drained,
        gaps_alone=report.figures(gap for gap in gaps if gap.alone),
        gaps_in_mixes=report.figures(gap for gap in gaps if not gap.alone),
        **report.summary(found),
    )
