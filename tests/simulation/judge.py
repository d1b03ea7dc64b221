"""What a run showed: every record of its log, judged, with the story that they tell."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from headrace.errors import DecodeError
from headrace.schemas.events import (
    ActionRequested,
    EpisodeEnded,
    Event,
    ObservationRecorded,
    TaskCancelled,
    TaskSubmitted,
    TrajectoryRecorded,
)
from headrace.schemas.topics import DEAD_LETTERS
from headrace.services.kafka.broker import Partition, Record
from headrace.services.log.event_log import Delivery, EventLog
from headrace.services.operate.verify.invariants import item_checks
from headrace.services.operate.verify.invariants.log_facts import Facts
from headrace.services.operate.verify.log_report import LogReport, examine
from tests.simulation.calls import exceeded
from tests.simulation.chronicle import Line
from tests.simulation.files import unstored_files
from tests.simulation.processes import Run, new_learner
from tests.simulation.repeats import unrepeatable
from tests.simulation.requests_of_tenants import unlawful
from tests.simulation.scenario import DEADLINE_S, UNSAFE
from tests.simulation.story import unparked, unpublished_weights, untrue_stories, untrue_weights
from tests.simulation.virtual_time import BEGIN_S
from tests.simulation.world import open_environments

EXCUSES = {
    "deadline": frozenset(
        {"environment hangs", "outage", "freeze", "clock", "foreign transaction", "ending"}
    ),
    "diverged": UNSAFE | {"agent moody", "lies"},
    "superseded": UNSAFE,
}
"""Of failures by which a lost answer would show: what lasts as long as an episode may, or makes
its past another."""
Ends = dict[Partition, int]
"""How far each partition could be read at some moment."""


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
    report: LogReport | None = None
    facts: Facts | None = None
    lines: list[Line] = field(default_factory=list)

    @property
    def command(self) -> str:
        """What repeats it."""
        return f"python -m tests.simulation --seed {self.seed} --history"


def readable(run: Run) -> Ends:
    """How far each partition can be read now."""
    places = [at for one in run.topics for at in one.all_partitions()]
    return {place: run.cluster.state.log(place).stable_end for place in places}


async def sort_out(run: Run, log: EventLog) -> tuple[list[Delivery[Event]], list[Record]]:
    """All events of the run, and the records that are none."""
    events, garbage = [], []
    for record in all_records(run):
        try:
            events.append(await log.decode(record))
        except DecodeError:
            garbage.append(record)
    return events, garbage


def not_parked(run: Run, garbage: Iterable[Record], read_to: Ends) -> Iterator[str]:
    """Of what is no event, and lies before these ends: what no dead letter holds."""
    letters = run.cluster.state.log(Partition(run.topics.name(DEAD_LETTERS), 0))
    due = [record for record in garbage if record.offset < read_to[record.partition]]
    return unparked(due, letters.read(letters.first, 10**9)[0])


async def judge(run: Run, log: EventLog, read_to: Ends, result: Result) -> None:
    """Fills the result. `read_to`: what was there, and readable, while there was time to park."""
    deliveries, garbage = await sort_out(run, log)
    result.records = len(deliveries) + len(garbage)
    result.fingerprint = _fingerprint(run)
    facts = result.facts = Facts.of(deliveries)
    result.report = examine(
        run.recipe,
        deliveries,
        settled=True,
        one_clock="clock" not in run.scenario.acts,
        undecodable=len(garbage),
    )
    result.violations += result.report.violations
    result.violations += not_parked(run, garbage, read_to)
    moody = "agent moody" in run.scenario.misbehaviour
    result.violations += untrue_stories(facts, moody=moody)
    run.blobs.repair()
    result.violations += unstored_files(facts, run.blobs)
    result.violations += unpublished_weights(facts)
    result.violations += item_checks.check(facts, complete=True)
    result.violations += unrepeatable(facts, run.recipe)
    if "weights differ" not in run.scenario.misbehaviour:
        for name, policy in run.recipe.policies.items():
            taught = policy.training is not None and policy.training.teacher is not None
            learner = new_learner(run.scenario, name)
            result.violations += untrue_weights(facts, name, learner, taught=taught)
    result.violations += exceeded(run.recipe)
    result.violations += unlawful(run, facts)
    left = open_environments()
    if left:
        result.violations.append(f"I7: {len(left)} environments are left open")
    result.violations += unclosed(deliveries)
    outcomes = [one.event for one in facts.all(EpisodeEnded)]
    result.endings = Counter(map(_how, outcomes))
    result.attempts_lost = sum(max(0, outcome.attempts - 1) for outcome in outcomes)
    if not run.scenario.costs_attempts:
        result.violations += _failed_for_nothing(facts, outcomes)
    result.violations += _without_excuse(facts, outcomes, run)


def unclosed(deliveries: Iterable[Delivery[Event]]) -> Iterator[str]:
    """Environments that answered, and got no `close` after that: they have a slot until the
    deadline. One attempt may have several, and each has its own partition."""
    opened: dict[tuple[int, int, int, int], None] = {}
    closed = set()
    for one in deliveries:
        event = one.event
        if isinstance(event, ObservationRecorded) and event.partition >= 0:
            opened[event.task, event.sample, event.attempt, event.partition] = None
        elif isinstance(event, ActionRequested) and event.kind == "close":
            closed.add((event.task, event.sample, event.attempt, one.partition.number))
    for task, sample, attempt, partition in opened:
        if (task, sample, attempt, partition) not in closed:
            where = f"environment {task}/{sample} of attempt {attempt} in partition {partition}"
            yield f"I7: {where} got no close"


def _fingerprint(run: Run) -> str:
    digest = hashlib.sha256()
    for record in all_records(run):
        digest.update(f"{record.partition} {record.offset} {record.timestamp}".encode())
        digest.update(record.value or b"")
    return digest.hexdigest()[:16]


def _how(outcome: EpisodeEnded) -> str:
    return outcome.failure.code if outcome.failure else outcome.ending


def _without_excuse(facts: Facts, outcomes: Iterable[EpisodeEnded], run: Run) -> Iterator[str]:
    """Attempts that failed as EXCUSES has it, where none of these is on: a part forgot its own."""
    unexcused = {code for code, kinds in EXCUSES.items() if not kinds & run.scenario.kinds}
    if run.struck_s > DEADLINE_S / 2:  # Who is killed again and again gets nothing done.
        unexcused.discard("deadline")
    for outcome in outcomes:
        found = None if outcome.trajectory is None else facts.resolve(outcome.trajectory)
        failures = found.failures if isinstance(found, TrajectoryRecorded) else ()
        codes = {one.code for one in (*failures, outcome.failure) if one is not None}
        for code in sorted(codes & unexcused):
            name = f"I8: episode {outcome.task}/{outcome.sample}"
            yield f"{name} had a failure {code}, and nothing in this run excuses that"


def _failed_for_nothing(facts: Facts, outcomes: Iterable[EpisodeEnded]) -> Iterator[str]:
    """Episodes of the run's own tasks that any of the faults has cost something."""
    cancelled = {(one.event.source, one.event.task_id) for one in facts.all(TaskCancelled)}
    own = {
        number
        for number, one in facts.tasks.items()
        if one.event.source == "source" and (one.event.source, one.event.task_id) not in cancelled
    }
    for outcome in outcomes:
        name = f"episode {outcome.task}/{outcome.sample}"
        if outcome.task in own and _how(outcome) not in ("finished", "duplicate"):
            yield f"I1: {name} ended {_how(outcome)}, and nothing in this run excuses that"
        elif outcome.task in own and outcome.attempts > 1:
            attempts = f"{outcome.attempts} attempts"
            yield f"I2: {name} took {attempts}, and nothing in this run excuses that"


def all_records(run: Run) -> Iterator[Record]:
    """Every record of the run: in offset order within a partition, those deleted included."""
    gone: dict[Partition, list[Record]] = {}
    for record in run.expired:
        gone.setdefault(record.partition, []).append(record)
    for placed in run.topics:
        if placed.topic is DEAD_LETTERS:
            continue
        for partition in placed.all_partitions():
            log = run.cluster.state.log(partition)
            yield from gone.get(partition, ())
            yield from log.read(log.first, 10**9)[0]


async def as_lines(run: Run, log: EventLog) -> list[Line]:
    """Every record as a line of the history."""
    lines = []
    for record in all_records(run):
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
