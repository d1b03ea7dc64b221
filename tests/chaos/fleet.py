"""The services as processes: kept alive as `headrace run` does, and more of a kind at will."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from headrace.schemas.recipe.recipe import Recipe
from headrace.services.namespace.cluster_config import ClusterConfig, write_resolved
from headrace.services.operate.processes import Preloader, headrace_command
from headrace.services.operate.run.children import child_specs
from headrace.services.operate.run.supervisor import (
    ChildSpec,
    RestartRule,
    Supervisor,
)

RULE = RestartRule(first_delay_s=0.5, longest_delay_s=0.5, deaths=1_000_000)
"""A dead child comes back after the half second of `run`'s first restart, however often it dies."""
DRAIN_S = 11.0
"""A service that doesn't end in order within 10 s ends itself."""
ROOT = Path(__file__).parents[2]


@dataclass
class Clocks:
    """What the services' clocks are wrong by: `sitecustomize.py` in `site` reads it."""

    folder: Path

    def prepare(self) -> None:
        """Has every process that is started from now on look there."""
        self.folder.mkdir(parents=True)
        os.environ["HEADRACE_CHAOS_CLOCKS"] = str(self.folder)
        paths = [str(Path(__file__).parent / "site"), str(ROOT)]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)

    def skew(self, name: str, seconds: float) -> None:
        """Sets the clock of a process, by its id, or of `all`."""
        scratch = self.folder / f".{name}"
        scratch.write_text(str(seconds))
        scratch.replace(self.folder / name)

    def right(self, name: str) -> None:
        """Sets it right again."""
        (self.folder / name).unlink(missing_ok=True)


@dataclass
class Fleet:
    """All services of a recipe, one process each, and those added."""

    recipe: Recipe
    where: ClusterConfig
    logs: Path
    deaths: list[str] = field(default_factory=list)
    """What the supervisors said of children that ended, last ones."""
    restarts: int = 0
    _watching: dict[Supervisor, asyncio.Task[None]] = field(default_factory=dict)
    """Every supervisor, and the task that ends where a child can't be kept alive."""
    _resolved: Path = Path()
    _number: int = 0

    async def start(self) -> None:
        """Starts one process of each service."""
        self._resolved = write_resolved(self.recipe, self.where.state)
        specs = child_specs(self.recipe, self._resolved)
        preloader = Preloader(self._resolved, [spec.command for spec in specs], self._note)
        await self._supervisor(specs, preloader)

    async def add(self, service: str, policy: str | None = None) -> Supervisor:
        """Starts one more, also of a sole writer; it is kept alive until `remove`."""
        self._number += 1
        chosen = () if policy is None else ("--policy", policy)
        command = headrace_command("serve", service, str(self._resolved), *chosen, "--parent-fd")
        spec = ChildSpec(f"{service}-more-{self._number}", (*command, "{parent_fd}"))
        return await self._supervisor([spec])

    async def remove(self, more: Supervisor) -> None:
        """Ends one that was added, in order."""
        if (watching := self._watching.pop(more, None)) is not None:
            await more.stop(DRAIN_S)
            self.restarts += more.restarts
            await watching

    def check(self) -> None:
        """Raises where a service can't be kept alive: it refused to start."""
        for watching in self._watching.values():
            if watching.done():
                watching.result()

    def pids(self, service: str, policy: str | None = None) -> list[int]:
        """The processes of a service that run, stopped ones included: of one policy, or all."""
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                command = process.cmdline()
                if command[3:5] == ["serve", service] and (policy is None or policy in command):
                    found.append(process.pid)
        return found

    async def end_source(self) -> None:
        """No more tasks are submitted."""
        for pid in self.pids("source"):
            signal_to(pid, signal.SIGTERM)

    async def end(self, bound_s: float) -> None:
        """Waits until every service has ended by itself, as it does with its run."""
        for supervisor in self._watching:
            supervisor.release()
        async with asyncio.timeout(bound_s):
            await asyncio.gather(*self._watching.values())

    async def close(self) -> None:
        """Ends everything by force."""
        watching, self._watching = self._watching, {}
        await asyncio.gather(*(supervisor.stop(0.1) for supervisor in watching))
        self.restarts += sum(supervisor.restarts for supervisor in watching)
        for task in watching.values():
            task.cancel()
        await asyncio.gather(*watching.values(), return_exceptions=True)

    async def _supervisor(
        self, specs: list[ChildSpec], preloader: Preloader | None = None
    ) -> Supervisor:
        supervisor = Supervisor(
            specs, self.logs, rule=RULE, preloader=preloader, on_change=self._note
        )
        await supervisor.start()
        supervisor.send_cluster(self.where.to_json())
        self._watching[supervisor] = asyncio.create_task(supervisor.watch())
        return supervisor

    def _note(self, line: str) -> None:
        self.deaths = [*self.deaths[-99:], line]


def signal_to(pid: int, number: signal.Signals) -> bool:
    """Signals a process. Whether it was there."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
