"""Divides turns into legs and stages, from the stamps of all processes.

A turn goes from the encoding of its prompt to the encoding of the next prompt. It has four legs,
one for each record, and each leg has the same stages, without gaps: so the stages of a turn add up
to its duration.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from tests.bench.turn_trace.stamps import KINDS

POINTS = ("encoding", "encoded", "produced", "fetched", "on loop", "taken", "decoded")
"""What a record passes, in order. Then its reader encodes the next record of the turn."""
STAGES = (
    "encode", "give to librdkafka", "produce, broker, fetch", "poll thread to loop",
    "loop to handler", "decode", "handle",
)  # fmt: skip
"""The stages of a leg: from each point to the next."""

Point = tuple[str, str, str]
"""The point, the event's type, the event's id."""


@dataclass(frozen=True, slots=True)
class TracedTurn:
    """The nanoseconds of one turn: four legs of seven stages each."""

    legs: tuple[tuple[int, ...], ...]
    acknowledged: tuple[int, ...]
    """From the end of `produce` to the time when its sender goes on, of each of the four."""

    @property
    def total(self) -> int:
        """All stages."""
        return sum(map(sum, self.legs))


def read_stamps(files: Iterable[Path]) -> dict[Point, int]:
    """The nanoseconds of each point, the first time that it was passed."""
    times: dict[Point, int] = {}
    for file in files:
        for line in file.read_text().splitlines():
            point, kind, name, at_ns = json.loads(line)
            key = point, kind, name
            times[key] = min(at_ns, times.get(key, at_ns))
    return times


def turns_of(times: Mapping[Point, int]) -> Iterator[TracedTurn]:
    """The complete turns. The last turn of an episode has no next prompt, so it is left out."""
    for point, kind, name in list(times):
        if point != POINTS[0] or kind != KINDS[0]:
            continue
        episode, _, call = name.rpartition("/")
        calls = [f"{episode}/{int(call) + number}" for number in range(3)]
        records = list(zip(KINDS, (calls[0], calls[0], calls[1], calls[1]), strict=True))
        passed = [(at, *record) for record in records for at in POINTS]
        passed.append((POINTS[0], KINDS[0], calls[2]))
        acknowledged = [("sent", *record) for record in records]
        if not times.keys() >= {*passed, *acknowledged}:
            continue
        at_ns = [times[each] for each in passed]
        stages = [after - before for before, after in pairwise(at_ns)]
        size = len(STAGES)
        yield TracedTurn(
            tuple(tuple(stages[first : first + size]) for first in range(0, 4 * size, size)),
            tuple(
                times[sent] - times["produced", *record]
                for sent, record in zip(acknowledged, records, strict=True)
            ),
        )


def medians(turns: Iterable[TracedTurn]) -> list[list[float]]:
    """The median microseconds of each stage: a row for each stage, a column for each leg.

    A last column has the median of the stage's sum over the turn, and a last row the median of the
    leg's sum. Sums of medians are not medians of sums, so these don't add up exactly.
    """
    columns = defaultdict(list)
    for turn in turns:
        for leg, stages in enumerate(turn.legs):
            for stage, spent in enumerate((*stages, sum(stages))):
                columns[stage, leg].append(spent)
        for stage in range(len(STAGES)):
            columns[stage, 4].append(sum(leg[stage] for leg in turn.legs))
        columns[len(STAGES), 4].append(turn.total)
    return [
        [median(columns[stage, leg]) / 1000 for leg in range(5)] for stage in range(len(STAGES) + 1)
    ]
