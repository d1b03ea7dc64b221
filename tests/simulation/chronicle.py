"""What happened in a run, in virtual time: faults as they strike, and what processes say."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tests.simulation.virtual_time import OWNER, loop

LOGGERS = ("headrace",)


@dataclass(frozen=True, slots=True, order=True)
class Line:
    """One line of a history. `at` is in virtual seconds."""

    at: float
    process: str
    text: str
    task: int | None = field(default=None, compare=False)
    """Which task it is of, where it is a record of one."""

    def __str__(self) -> str:
        return f"{self.at:10.4f}  {self.process:<22} {self.text}"


@dataclass
class Chronicle:
    """The lines, and how many faults of each kind there were."""

    lines: list[Line] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)

    def fault(self, text: str, process: str = "") -> None:
        """A fault strikes. Its kind is what comes before ` for ` and ` by `."""
        self.faults[text.partition(" for ")[0].partition(" by ")[0]] += 1
        self.note(f"*** {text}", process)

    def note(self, text: str, process: str = "") -> None:
        """Anything else."""
        self.lines.append(Line(loop().time(), process, text))


class _Listener(logging.Handler):
    def __init__(self, chronicle: Chronicle) -> None:
        super().__init__(logging.INFO)
        self._chronicle = chronicle

    def emit(self, record: logging.LogRecord) -> None:
        name = getattr(OWNER.get(), "name", "")
        self._chronicle.note(record.getMessage().split("\n")[0], name)


@contextmanager
def listening(chronicle: Chronicle, *, wanted: bool) -> Iterator[None]:
    """Takes down what the processes log, if that is wanted; else keeps them quiet."""
    listener = _Listener(chronicle)
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(one.level, one.propagate) for one in loggers]
    for one in loggers:
        one.setLevel(logging.INFO if wanted else logging.CRITICAL + 1)
        one.propagate = False
        one.addHandler(listener)
    try:
        yield
    finally:
        for one, (level, propagate) in zip(loggers, before, strict=True):
            one.removeHandler(listener)
            one.setLevel(level)
            one.propagate = propagate
