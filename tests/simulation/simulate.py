"""Runs one seed: a whole run with its faults, then the judgement."""

from __future__ import annotations

import asyncio
import importlib
import tempfile
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any

from headrace.errors import DecodeError, RecordsLost
from headrace.schemas.events import BatchAssembled, Event, PolicyPublished, TaskEnded, TaskSubmitted
from headrace.schemas.topics import BATCHES, POLICIES, RESULTS, TASKS
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.namespace.apply import CONSUMERS, OPTIONAL_CONSUMERS, lags
from headrace.services.operate.verify.invariants import item_checks
from headrace.services.operate.verify.invariants.log_facts import Facts
from tests.simulation import virtual_time
from tests.simulation.acts import Acts
from tests.simulation.chronicle import Chronicle, listening
from tests.simulation.judge import (
    Ends,
    Result,
    as_lines,
    judge,
    not_parked,
    readable,
    sort_out,
    unclosed,
)
from tests.simulation.processes import Run
from tests.simulation.scenario import DEADLINE_S, RUIN, Scenario, draw
from tests.simulation.virtual_time import loop

BOUND_S = 500.0
"""Virtual seconds within which all is drained once the faults are over, where episodes have
DEADLINE_S; in proportion where they have more, and for each policy of a run that has several: the
room is that of the policy which has least, so fewer episodes that hang do so at the same time."""
SETTLE_S = 300.0
"""Virtual seconds until the deadline of what a zombie opened, and forgot, has passed too."""
WRITTEN_S = 30.0
"""Virtual seconds until all that was there when all was drained is parked or counted."""
POLL_S = 0.5


class Undone(Exception):
    """Something is left to do that nobody does."""


Scene = Callable[[Run, EventLog], Awaitable[None]]


async def _nothing(run: Run, log: EventLog) -> None:
    """A scene in which nothing happens."""


def simulate(
    seed: int,
    *,
    history: bool = False,
    scenario: Scenario | None = None,
    meanwhile: Scene = _nothing,
    afterwards: Scene = _nothing,
) -> Result:
    """Runs a seed to its end. `history` keeps what the processes said, and every record.

    A test of its own passes its scenario, and scenes: `meanwhile` comes before the acts,
    `afterwards` when all is done.
    """
    scenario = scenario or draw(seed)
    result = Result(seed)
    with tempfile.TemporaryDirectory(dir=_quick_folder(), prefix="simulation-") as folder:

        async def main() -> None:
            run = Run(scenario, Path(folder), Chronicle())
            await _play(run, result, history, meanwhile)
            await afterwards(run, run.log(run.cluster.client("afterwards"), "afterwards"))

        with shrunk(scenario.limits):
            try:
                virtual_time.run(main, seed)
            except Undone as undone:
                result.violations.append(f"I8: {undone}")
            except Exception as error:  # Whatever ended the run: it is what the seed shows.
                if RUIN in scenario.acts and isinstance(error, RecordsLost):
                    return result  # As it must.
                result.violations.append(f"{type(error).__name__}: {error}")
                if history:
                    traceback.print_exception(error)
    return result


def _quick_folder() -> str | None:
    """Where syncing a file costs nothing, if there is such a place."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


@contextmanager
def shrunk(limits: dict[str, Any]) -> Iterator[None]:
    """Sets module constants, and sets them back."""
    before = []
    for name, value in limits.items():
        module_name, _, constant = name.partition(":")
        module = importlib.import_module(module_name)
        before.append((module, constant, getattr(module, constant)))
        setattr(module, constant, value)
    try:
        yield
    finally:
        for module, constant, value in before:
            setattr(module, constant, value)


async def _play(run: Run, result: Result, history: bool, meanwhile: Scene) -> None:
    scenario, chronicle = run.scenario, run.chronicle
    with listening(chronicle, wanted=history):
        try:
            log = await run.start()
            acts = Acts(run, log)
            if scenario.ending_at is not None:
                loop().call_later(scenario.ending_at, run.ending.set)
            await meanwhile(run, log)
            await acts.strike()
            run.struck_s = loop().time()
            chronicle.note("--- healed")
            await acts.heal()
            await _until_drained(run, log)
            chronicle.note("--- drained")
            read_to = readable(run)
            await _until_settled(run, log)
            await _until_written(run, log, read_to)
            await run.stop()
        finally:
            for process in run.processes:
                process.failure()  # Heard, though another's ended the run.
            result.faults = chronicle.faults
            result.virtual_s = loop().time()
            if history:
                records = await as_lines(run, run.log(run.cluster.client("history"), "history"))
                result.lines = sorted([*chronicle.lines, *records])
        await judge(run, log, read_to, result)


async def _until_drained(run: Run, log: EventLog) -> None:
    """Waits until nothing is left to do. Undone after BOUND_S, or what goes in its place."""
    progress = _Progress(run, log)
    recipe = run.scenario.recipe
    bound_s = BOUND_S * len(recipe.policies) * recipe.tasks.deadline_s / DEADLINE_S
    if "environment hangs" in run.scenario.misbehaviour:
        bound_s *= 2  # each time costs a whole deadline, and few tasks may run at the same time
    try:
        async with asyncio.timeout(bound_s):
            while not await progress.drained():
                for process in run.processes:
                    if (failure := process.failure()) is not None:
                        raise failure
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise Undone(f"not drained in {bound_s:g} s: {progress}") from None


async def _until_settled(run: Run, log: EventLog) -> None:
    """Waits until all that is written is done by all who read it. Undone after SETTLE_S."""
    left: dict[str, int] = {}
    services = [*CONSUMERS, *(one for one in OPTIONAL_CONSUMERS if run.running(one))]
    try:
        async with asyncio.timeout(SETTLE_S):
            while any((left := await lags(log.broker, run.topics, services)).values()):
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise Undone(f"not done in {SETTLE_S:g} s: {left}") from None


async def _until_written(run: Run, log: EventLog, read_to: Ends) -> None:
    """Waits, bounded, for what no group's lag tells of.

    All that is no event is parked. The environments that answered are closed. And the statistics of
    the items count the last groups: their job has no consumer group, and perhaps just ended because
    a twin had replaced it.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(WRITTEN_S):
            while True:
                events, garbage = await sort_out(run, log)
                late = chain(
                    not_parked(run, garbage, read_to),
                    item_checks.check(Facts.of(events), complete=True),
                    unclosed(events),
                )
                if next(late, None) is None:
                    return
                await asyncio.sleep(POLL_S)


class _Progress:
    """How far a run has come, as its log grows."""

    def __init__(self, run: Run, log: EventLog) -> None:
        self._run = run
        self._log = log
        topics = run.topics
        single = topics.partition(TASKS), topics.partition(POLICIES)
        shared = (*topics.partitions_of(BATCHES), *topics.partitions_of(RESULTS))
        self._places = dict.fromkeys((*single, *shared), 0)
        self._tasks: set[int] = set()
        self._to_train: set[int] = set()
        self._own: set[str] = set()
        self._ended: set[int] = set()
        policies = run.recipe.policies.items()
        learning = [name for name, policy in policies if policy.training is not None]
        self._decided = dict.fromkeys(learning, 0)
        self._batch = dict.fromkeys(learning, 0)
        self._version = dict.fromkeys(learning, -1)

    def __str__(self) -> str:
        return (
            f"{len(self._tasks)} tasks, {len(self._ended)} ended, {self._decided} decided; "
            f"batches {self._batch}, versions {self._version}"
        )

    async def drained(self) -> bool:
        """Whether all tasks are decided, and all batches trained on."""
        for place, offset in self._places.items():
            records, self._places[place] = self._run.cluster.state.log(place).read(offset, 10**9)
            for record in records:
                try:
                    self._add(await self._log.decode(record))
                except DecodeError:
                    continue
        recipe = self._run.recipe
        expected = recipe.tasks.options.get("items", 0)
        if recipe.warm_start is not None:
            expected += recipe.warm_start.tasks
        submitted = self._run.ending.is_set() or len(self._own) >= expected
        if recipe.curating_policy is not None:  # Only the source knows when it is done.
            submitted = all(one.done() for one in self._run.processes if one.service == "source")
        decided = all(count == len(self._to_train) for count in self._decided.values())
        return submitted and self._tasks == self._ended and decided and self._batch == self._version

    def _add(self, delivery: Delivery[Event]) -> None:
        event = delivery.event
        if isinstance(event, TaskSubmitted):
            self._tasks.add(delivery.offset)
            if event.purpose == "train":
                self._to_train.add(delivery.offset)
            if event.source == "source":
                self._own.add(event.task_id)
        elif isinstance(event, TaskEnded):
            self._ended.add(event.task)
        elif isinstance(event, PolicyPublished):
            if event.policy in self._version:
                newest = max(self._version[event.policy], event.version)
                self._version[event.policy] = newest
        elif isinstance(event, BatchAssembled):
            self._batch[event.policy] = event.version
            decided = event.frontier()
            self._decided[event.policy] = sum(task in decided for task in self._to_train)
