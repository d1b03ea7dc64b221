"""CPU time by process: what a figure costs, whoever else uses the machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil

from infra import local


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

    def processes(self) -> Mapping[str, psutil.Process]:
        """By the service that each of them is."""
        return self._processes

    def text(self, count: int) -> str:
        """Milliseconds an item, dearest first."""
        now = self._seconds()
        spent = {name: now[name] - self._began[name] for name in now}
        parts = [
            f"{name} {seconds * 1000 / count:.2f}"
            for name, seconds in sorted(spent.items(), key=lambda item: -item[1])
        ]
        return f"CPU ms each {sum(spent.values()) * 1000 / count:.2f}: {', '.join(parts)}"

    def _seconds(self) -> dict[str, float]:
        seconds = {}
        for name, process in self._processes.items():
            times = process.cpu_times()
            seconds[name] = times.user + times.system
        return seconds


def _service(child: psutil.Process) -> str | None:
    """`agent`, of `python -m services.cli serve agent …`; `produce`, of `… tests.bench.work …`."""
    command = child.cmdline()
    if command[2:4] == ["services.cli", "serve"]:
        return command[4]
    return command[3] if command[2:3] == ["tests.bench.work"] else None
