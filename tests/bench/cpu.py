"""CPU time by process: what a figure costs, whoever else uses the machine.

Where others use it too, "cores" says how much of it the benchmark got.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from headrace.infra import local

WORKERS = ("tests.bench.work", "tests.bench.bare", "tests.bench.bare_trajectories")
"""Modules that run as processes whose first argument is their kind of work."""


class CpuWatch:
    """CPU seconds of this process's children and of the broker, since the watch was made."""

    def __init__(self, state: Path) -> None:
        stack = local.find(state)
        assert stack is not None, f"no stack in {state}"
        self._processes = {"Kafka": psutil.Process(stack.kafka_pid)}
        for child in psutil.Process().children():
            if (name := _service(child)) is not None:
                while name in self._processes:
                    name += "+"
                self._processes[name] = child
        self._began = self._seconds()
        self._clock = time.perf_counter()

    def processes(self) -> Mapping[str, psutil.Process]:
        """By the service that each of them is."""
        return self._processes

    def seconds(self) -> float:
        """CPU seconds of all of them since the watch was made."""
        return sum(self._seconds().values()) - sum(self._began.values())

    def text(self, count: int) -> str:
        """Milliseconds an item, dearest first, and the cores that it kept busy meanwhile."""
        now, wall_s = self._seconds(), time.perf_counter() - self._clock
        spent = {name: now[name] - self._began[name] for name in now}
        parts = [
            f"{name} {seconds * 1000 / count:.2f}"
            for name, seconds in sorted(spent.items(), key=lambda item: -item[1])
        ]
        total = sum(spent.values())
        each = f"{total * 1000 / count:.2f} ms CPU each ({', '.join(parts)})"
        return f"{each}, {total / wall_s:.1f} cores"

    def _seconds(self) -> dict[str, float]:
        seconds = {}
        for name, process in self._processes.items():
            times = process.cpu_times()
            seconds[name] = times.user + times.system
        return seconds


def _service(child: psutil.Process) -> str | None:
    """The service or the kind of work that a process's command line names."""
    command = child.cmdline()
    if "serve" in command[3:5]:
        return command[command.index("serve") + 1]
    return command[3] if "".join(command[2:3]) in WORKERS else None
