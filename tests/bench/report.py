"""Figures beside their bars, with the machine that they were measured on."""

from __future__ import annotations

import os
import platform
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headrace.infra.local.jars import KAFKA_VERSION


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number."""

    what: str
    value: str
    bar: str = ""
    aim: str = ""
    note: str = ""


@contextmanager
def stoppable() -> Iterator[None]:
    """Lets SIGTERM and Ctrl-C end a benchmark at once, and leave nothing that it has started."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt  # asyncio's own handler would wait for code that computes.

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit("the benchmark was stopped before its end") from None


def print_figures(figures: Sequence[Figure]) -> None:
    """One table to stdout, under the machine."""
    console = Console(width=140)
    console.print(machine())
    table = Table("what", "measured", "bar", "aim", "note")
    for figure in figures:
        table.add_row(figure.what, figure.value, figure.bar, figure.aim, figure.note)
    console.print(table)


def machine() -> str:
    """The machine in a line, with its load: others may be using it."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return (
        f"{_processor()}, {os.cpu_count()} cores, {memory:.0f} GiB; Python "
        f"{platform.python_version()}, Kafka {KAFKA_VERSION}, confluent-kafka "
        f"{version('confluent-kafka')}; load (1, 5, 15 min) {load}"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except FileNotFoundError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def rate(count: int, seconds: float) -> str:
    """Things a second."""
    return f"{count / seconds:,.0f}/s"
