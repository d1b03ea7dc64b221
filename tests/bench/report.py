"""Figures beside their bars, with the machine that they were measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
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
