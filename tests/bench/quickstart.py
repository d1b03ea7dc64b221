"""`python -m tests.bench.quickstart [--learn]`: where a start's time, CPU and memory go.

It runs `headrace run quickstart` in an empty folder, until the first training step or until the
policy has learned. The stages come from what the run says and from its logs, CPU and memory from
the kernel. With several `--python`, which may be interpreters of other checkouts, runs alternate.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import psutil

from headrace.errors import HeadraceError
from headrace.infra.local import stack_record
from tests.bench.report import Figure, print_figures, stoppable

RUN = "headrace run"
SAMPLE_S = 0.1
RUN_S = 600.0
MIB = 2**20
STAGES = (
    ("the first server is started", "run", "starting (Kafka|the registry)"),
    ("the imports of all services are done", "preloader", ""),
    ("broker and registry serve", "run", "preparing the namespace"),
    ("the namespace is prepared", "run", "running"),
    ("the last service has connected", "*", "serving .* in namespace"),
    ("version 0 is published", "trainer", "version 0 initial"),
    ("version 0 is loaded", "inference", "serving version 0"),
    ("batch 1 is assembled", "assemble-batches", "batch 1:"),
    ("the first training step is done", "trainer", "version 1 trained"),
    ("the run ends", "run", "ending: "),
)
"""Each stage, and the first line of which log shows it, or with "*" the last one of all logs."""
FIRST_STEP = "the first training step is done"
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]+Z) ")


@dataclass
class Usage:
    """What the processes of one run used, by the name of what they do."""

    cpu_s: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """At each epoch time the CPU seconds so far, also of processes that have ended."""
    memory: dict[str, float] = field(default_factory=dict)
    """MiB (PSS) when all processes had together the most."""

    def cpu_at(self, at: float) -> dict[str, float]:
        """CPU seconds until an epoch time."""
        return max((one for one in self.cpu_s if one[0] <= at), key=lambda one: one[0])[1]


@dataclass
class Sampler:
    """Reads CPU and memory of a run's processes while it runs."""

    run: psutil.Process
    state: Path
    usage: Usage = field(default_factory=Usage)
    _seen: dict[psutil.Process, tuple[str, float]] = field(default_factory=dict)

    def sample(self, *, memory: bool) -> None:
        """Reads once. Memory costs more to read."""
        held: dict[str, float] = {}
        for process in self._processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                name = _name(process.cmdline()) if process != self.run else RUN
                self._seen[process] = name, times.user + times.system
                if memory:
                    held[name] = held.get(name, 0.0) + process.memory_full_info().pss / MIB
        spent: dict[str, float] = {}
        for name, seconds in self._seen.values():
            spent[name] = spent.get(name, 0.0) + seconds
        self.usage.cpu_s.append((time.time(), spent))
        if sum(held.values()) > sum(self.usage.memory.values()):
            self.usage.memory = held

    def _processes(self) -> Iterator[psutil.Process]:
        """The run, what it has started, and its servers, which are children of init."""
        yield self.run
        with contextlib.suppress(psutil.Error):
            yield from self.run.children(recursive=True)
        with contextlib.suppress(HeadraceError):
            stack = stack_record.load(self.state)
            for server in (*(one.process for one in stack.servers.values()), stack.guard):
                if server is not None:
                    with contextlib.suppress(psutil.Error):
                        yield psutil.Process(server.pid)


def _name(command: Sequence[str]) -> str:
    """What a process does, from its command line."""
    names = {
        "kafka.Kafka": "Kafka", "kafka.tools.StorageTool": "Kafka's formatting",
        "io.quarkus.runner.GeneratedMain": "registry", "headrace.infra.local": "guard",
    }  # fmt: skip
    for part, name in names.items():
        if part in command:
            return name
    if command[1:3] == ["-m", "headrace"] and len(command) > 3:
        return command[4] if command[3] == "serve" else command[3]
    return Path(command[0]).name if command else "starting"


@dataclass
class Measured:
    """One run. Times are seconds from the start of the command."""

    began: float
    stages: dict[str, float]
    usage: Usage

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds by process until the first training step."""
        return self.usage.cpu_at(self.began + self.stages[FIRST_STEP])


def measure(python: str, folder: Path, settings: Sequence[str]) -> Measured:
    """Runs the quickstart once, with settings of its recipe."""
    state = folder / ".headrace"
    command = [python, "-m", "headrace", "run", "quickstart"]
    for setting in settings:
        command += ["--set", setting]
    began = time.time()
    said: list[tuple[float, str]] = []
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        lines = process.stderr

        def read() -> None:
            said.extend((time.time(), line) for line in lines)

        reader = threading.Thread(target=read)
        reader.start()
        sampler = Sampler(psutil.Process(process.pid), state)
        count = 0
        try:
            while process.poll() is None and time.time() < began + RUN_S:
                sampler.sample(memory=count % 20 == 0)
                count += 1
                time.sleep(SAMPLE_S)
        finally:
            process.terminate()  # If it still runs, it ends all that it has started.
            process.wait()
        reader.join()
    if process.returncode:
        raise SystemExit("".join(line for _, line in said))
    logs = {path.stem: _timed(path) for path in (state / "quickstart" / "logs").glob("*.log")}
    stages = dict(_stages({**logs, "run": said}, sampler.usage))
    return Measured(began, {name: at - began for name, at in stages.items()}, sampler.usage)


def _timed(log: Path) -> list[tuple[float, str]]:
    return [
        (datetime.fromisoformat(found[1]).timestamp(), line)
        for line in log.read_text().splitlines()
        if (found := _TIME.match(line))
    ]


def _stages(
    logs: Mapping[str, Sequence[tuple[float, str]]], usage: Usage
) -> Iterator[tuple[str, float]]:
    """Yields each stage and the epoch time at which it was reached."""
    for stage, log, shown in STAGES:
        if log == "preloader":
            # Its first fork shows it: from then on there is a process of a service.
            at = min(at for at, spent in usage.cpu_s if {"trainer", "check"} & spent.keys())
        else:
            found = {
                name: min((at for at, line in lines if re.search(shown, line)), default=0.0)
                for name, lines in logs.items()
                if log in (name, "*")
            }
            at = max(found.values())
        yield stage, at


def figures(runs: Sequence[Measured], label: str) -> list[Figure]:
    """The medians of alike runs, with the least and the most."""
    rows = []
    for stage in sorted(runs[0].stages, key=runs[0].stages.__getitem__):
        rows.append(_row(f"{label}{stage}", [one.stages[stage] for one in runs], "s", 1))
    spent = [one.cpu_s() for one in runs]
    rows.append(_row(f"{label}CPU until then", [sum(one.values()) for one in spent], "s", 1))
    names = {name: median(one.get(name, 0.0) for one in spent) for one in spent for name in one}
    for name in sorted(names, key=lambda name: -names[name]):
        rows.append(_row(f"{label}  {name}", [one.get(name, 0.0) for one in spent], "s", 2))
    whole = [sum(one.usage.cpu_s[-1][1].values()) for one in runs]
    rows.append(_row(f"{label}CPU of the whole run", whole, "s", 1))
    held = [one.usage.memory for one in runs]
    rows.append(_row(f"{label}memory (PSS)", [sum(one.values()) for one in held], "MiB", 0))
    for name in sorted(held[0], key=lambda name: -held[0][name]):
        rows.append(_row(f"{label}  {name}", [one.get(name, 0.0) for one in held], "MiB", 0))
    return rows


def _row(what: str, values: Sequence[float], unit: str, digits: int) -> Figure:
    span = f"{min(values):.{digits}f} to {max(values):.{digits}f}" if len(values) > 1 else ""
    return Figure(what, f"{median(values):.{digits}f} {unit}", note=span)


@stoppable()
def main() -> None:
    """Measures and prints one table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.quickstart", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, help="of each interpreter; default 3")
    parser.add_argument("--learn", action="store_true", help="until the policy has learned")
    parser.add_argument("--python", action="append", help="an interpreter; repeatable")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    options = parser.parse_args()
    # Each run has a folder of its own. Links stay: a virtual environment is found by its path.
    pythons = [str(Path(python).absolute()) for python in options.python or [sys.executable]]
    settings = options.settings + ([] if options.learn else ["stop.versions=1"])
    runs: dict[str, list[Measured]] = {python: [] for python in pythons}
    for number in range(options.runs):
        for python in pythons if number % 2 == 0 else pythons[::-1]:
            with TemporaryDirectory(prefix="headrace-quickstart-") as folder:
                measured = measure(python, Path(folder), settings)
            runs[python].append(measured)
            cpu_s = sum(measured.cpu_s().values())
            print(f"{python}: {measured.stages[FIRST_STEP]:.1f} s, {cpu_s:.1f} s CPU", flush=True)
    rows: list[Figure] = []
    for number, (_, measured_runs) in enumerate(runs.items(), 1):
        rows += figures(measured_runs, f"{number}: " if len(runs) > 1 else "")
    print_figures(rows)


if __name__ == "__main__":
    main()
