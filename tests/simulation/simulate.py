"""Runs one seed: a whole run with its faults, then the judgement."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import tempfile
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from schemas.events import (
    BatchAssembled,
    EpisodeEnded,
    Event,
    PolicyPublished,
    TaskCancelled,
    TaskEnded,
    TaskSubmitted,
)
from schemas.frontier import Frontier
from schemas.topics import BATCHES, DEAD_LETTERS, POLICIES, RESULTS, TASKS
from services.apply import lags
from services.errors import DecodeError
from services.kafka.broker import Partition, Record
from services.log import Delivery, EventLog
from tests.checker import Facts, Report, examine
from tests.simulation import virtual_time
from tests.simulation.acts import Acts
from tests.simulation.chronicle import Chronicle, Line, listening
from tests.simulation.processes import Run, new_learner
from tests.simulation.scenario import Scenario, draw
from tests.simulation.story import (
    unparked,
    unpublished_weights,
    untrue_stories,
    untrue_weights,
)
from tests.simulation.virtual_time import BEGIN_S, loop
from tests.simulation.world import open_environments

BOUND_S = 500.0
"""Virtual seconds within which all is drained once the faults are over."""
SETTLE_S = 300.0
"""Virtual seconds until the deadline of what a zombie opened, and forgot, has passed too."""
PARKED_S = 30.0
"""Virtual seconds until every reader has parked what was no event when all was drained."""
POLL_S = 0.5


class Undone(Exception):
    """Something is left to do that nobody does."""


@dataclass
class Result:
    """What a seed showed."""

    seed: int
    violations: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    records: int = 0
    fingerprint: str = ""
    """Of every record of the log, in order: two runs of a seed have the same."""
    virtual_s: float = 0.0
    attempts_lost: int = 0
    report: Report | None = None
    facts: Facts | None = None
    lines: list[Line] = field(default_factory=list)

    @property
    def command(self) -> str:
        """What repeats it."""
        return f"python -m tests.simulation --seed {self.seed} --history"


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
            chronicle.note("--- healed")
            await acts.heal()
            await _until_drained(run, log)
            chronicle.note("--- drained")
            read_to = _ends(run)
            await _until_settled(run, log)
            await _until_parked(run, log, read_to)
            await run.stop()
        finally:
            result.faults = chronicle.faults
            result.virtual_s = loop().time()
            if history:
                records = await _records(run, run.log(run.cluster.client("history"), "history"))
                result.lines = sorted([*chronicle.lines, *records])
        await _judge(run, log, read_to, result)


async def _until_drained(run: Run, log: EventLog) -> None:
    """Waits until nothing is left to do. Undone after BOUND_S."""
    progress = _Progress(run, log)
    try:
        async with asyncio.timeout(BOUND_S):
            while not await progress.drained():
                for process in run.processes:
                    if (failure := process.failure()) is not None:
                        raise failure
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise Undone(f"not drained in {BOUND_S:g} s: {progress}") from None


async def _until_settled(run: Run, log: EventLog) -> None:
    """Waits until all that is written is done by all who read it. Undone after SETTLE_S."""
    left: dict[str, int] = {}
    try:
        async with asyncio.timeout(SETTLE_S):
            while any((left := await lags(log.broker, run.topics)).values()):
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise Undone(f"not done in {SETTLE_S:g} s: {left}") from None


class _Progress:
    """How far a run has come, as its log grows."""

    def __init__(self, run: Run, log: EventLog) -> None:
        self._run = run
        self._log = log
        topics = run.topics
        self._places = {Partition(topics.name(topic), 0): 0 for topic in (TASKS, POLICIES)}
        self._places[Partition(topics.name(BATCHES, "default"), 0)] = 0
        self._places |= {Partition(topics.name(RESULTS), n): 0 for n in range(topics.partitions)}
        self._tasks: set[int] = set()
        self._own: set[str] = set()
        self._ended: set[int] = set()
        self._decided = 0
        self._batch = self._version = 0
        self._published = False

    def __str__(self) -> str:
        return (
            f"{len(self._tasks)} tasks, {len(self._ended)} ended, {self._decided} decided; "
            f"batch {self._batch}, version {self._version}"
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
        expected = self._run.recipe.tasks.options["items"]
        submitted = self._run.ending.is_set() or len(self._own) >= expected
        done = len(self._tasks) == len(self._ended) == self._decided
        return submitted and done and self._published and self._batch == self._version

    def _add(self, delivery: Delivery[Event]) -> None:
        event = delivery.event
        if isinstance(event, TaskSubmitted):
            self._tasks.add(delivery.offset)
            if event.source == "source":
                self._own.add(event.task_id)
        elif isinstance(event, TaskEnded):
            self._ended.add(event.task)
        elif isinstance(event, PolicyPublished):
            self._published, self._version = True, max(self._version, event.version)
        elif isinstance(event, BatchAssembled):
            self._batch = event.version
            runs = [(run.first, run.last) for run in event.decided]
            decided = Frontier(event.low_mark, runs)
            self._decided = sum(task in decided for task in self._tasks)


async def _until_parked(run: Run, log: EventLog, read_to: dict[Partition, int]) -> None:
    """Waits, bounded, until what is no event is parked: no group's lag tells of all readers."""
    garbage = []
    for record in _all_records(run):
        try:
            await log.decode(record)
        except DecodeError:
            garbage.append(record)
    with suppress(TimeoutError):
        async with asyncio.timeout(PARKED_S):
            while list(_not_parked(run, garbage, read_to)):
                await asyncio.sleep(POLL_S)


def _not_parked(
    run: Run, garbage: Iterable[Record], read_to: dict[Partition, int]
) -> Iterator[str]:
    letters = run.cluster.state.log(Partition(run.topics.name(DEAD_LETTERS), 0))
    due = [record for record in garbage if record.offset < read_to[record.partition]]
    return unparked(due, letters.read(letters.first, 10**9)[0])


def _ends(run: Run) -> dict[Partition, int]:
    """How far each partition can be read now."""
    places = [Partition(one.name, n) for one in run.topics for n in range(one.partitions)]
    return {place: run.cluster.state.log(place).stable_end for place in places}


async def _judge(run: Run, log: EventLog, read_to: dict[Partition, int], result: Result) -> None:
    """`read_to`: what was there, and readable, while there was time enough to park it."""
    deliveries, garbage, digest = [], [], hashlib.sha256()
    for record in _all_records(run):
        digest.update(f"{record.partition} {record.offset} {record.timestamp}".encode())
        digest.update(record.value or b"")
        try:
            deliveries.append(await log.decode(record))
        except DecodeError:
            garbage.append(record)
    result.records = len(deliveries) + len(garbage)
    result.fingerprint = digest.hexdigest()[:16]
    facts = result.facts = Facts.of(deliveries)
    result.report = examine(
        run.recipe,
        deliveries,
        settled=True,
        one_clock="clock" not in run.scenario.acts,
        undecodable=len(garbage),
    )
    result.violations += result.report.violations
    result.violations += _not_parked(run, garbage, read_to)
    moody = "agent moody" in run.scenario.misbehaviour
    result.violations += untrue_stories(facts, moody=moody)
    result.violations += unpublished_weights(facts)
    if "weights differ" not in run.scenario.misbehaviour:
        result.violations += untrue_weights(facts, new_learner(run.scenario))
    left = open_environments()
    if left:
        result.violations.append(f"I7: {len(left)} environments are left open")
    outcomes = [one.event for one in facts.all(EpisodeEnded)]
    result.endings = Counter(map(_how, outcomes))
    result.attempts_lost = sum(max(0, outcome.attempts - 1) for outcome in outcomes)
    if not run.scenario.costs_attempts:
        result.violations += _failed_for_nothing(facts, outcomes)


def _how(outcome: EpisodeEnded) -> str:
    return outcome.failure.code if outcome.failure else outcome.ending


def _failed_for_nothing(facts: Facts, outcomes: Iterable[EpisodeEnded]) -> Iterator[str]:
    """Episodes of the run's own tasks that any of the faults has cost something."""
    cancelled = {one.event.event_id for one in facts.all(TaskCancelled)}
    own = {
        number
        for number, one in facts.tasks.items()
        if one.event.source == "source" and one.event.event_id not in cancelled
    }
    for outcome in outcomes:
        name = f"episode {outcome.task}/{outcome.sample}"
        if outcome.task in own and _how(outcome) not in ("finished", "duplicate"):
            yield f"I1: {name} ended {_how(outcome)}, and nothing in this run excuses that"
        elif outcome.task in own and outcome.attempts > 1:
            attempts = f"{outcome.attempts} attempts"
            yield f"I2: {name} took {attempts}, and nothing in this run excuses that"


def _all_records(run: Run) -> Iterator[Record]:
    """Every record of the run: in offset order within a partition, those deleted included."""
    gone: dict[Partition, list[Record]] = {}
    for record in run.expired:
        gone.setdefault(record.partition, []).append(record)
    for placed in run.topics:
        if placed.topic is DEAD_LETTERS:
            continue
        for number in range(placed.partitions):
            partition = Partition(placed.name, number)
            log = run.cluster.state.log(partition)
            yield from gone.get(partition, ())
            yield from log.read(log.first, 10**9)[0]


async def _records(run: Run, log: EventLog) -> list[Line]:
    """Every record as a line of the history."""
    lines = []
    for record in _all_records(run):
        task = None
        try:
            event = (await log.decode(record)).event
            text = f"{type(event).__name__} {event.event_id}"
            task = getattr(event, "task", -1)
            if isinstance(event, TaskSubmitted):
                task = record.offset
        except DecodeError:
            text = "garbage"
        source = next((value.decode() for name, value in record.headers if name == "ce_source"), "")
        where = f"{record.partition.topic}/{record.partition.number}@{record.offset}"
        lines.append(Line(record.timestamp - BEGIN_S, source, f"{where} {text}", task))
    return lines
