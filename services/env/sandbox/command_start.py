"""Starts a command in a sandbox, or says who is responsible if none can be started.

The policy's processes run as the same user as every command, so what an earlier command left behind
may kill, stop or trace the next one before it begins. So the wrapper of a command kills everything
else of its user first, and again when the command has ended.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import IO

from headrace.errors import InfrastructureError
from headrace.services.env.sandbox.responsibility import Evidence, responsible
from headrace.services.processes.docker.docker_engine import DockerEngine, NotThere, Output
from headrace.services.processes.docker.hardened import KEEPER, USER, WORK, Limits

MIB = 2**20
START_S = 60.0
"""Seconds that a command has to start; a busy host is slow."""
LOOK_S = 10.0
"""Seconds after which a command that has not started is looked into: it may have been stopped."""
TRIES = 3
"""Most times that a command is started, if what prevented it is gone each time."""
BEGUN = b"begun\n"
KILL = "kill -9 -1 2>/dev/null"
"""Kills all processes of its user but itself. None escapes by forking: a process with a
deadly signal can't fork."""
ALONE = f'{KILL}; exec 2>&1; echo begun; "$@"; code=$?; {KILL}; exit $code'
"""The wrapper of every command. Before the command begins, and when it has ended, it kills whatever
else its user runs. The word that it prints then says that the command begins. It joins both
streams, so that their order is kept."""
BESIDE = 'exec 2>&1; echo begun; exec "$@"'
"""The wrapper if processes may outlive their command."""
CENSUS = f"""
n=0
for p in /proc/[0-9]*; do
  user=gone
  while read -r key value rest; do
    if [ "$key" = Uid: ]; then user=$value; break; fi
  done 2>/dev/null <$p/status
  case $user in {USER.partition(":")[0]}|gone) n=$((n+1)) ;; esac
done
echo begun $n
"""
"""Counts the processes of the policy's user. Those that end meanwhile count: they may have
children. It runs as the keeper, whose processes the policy's can't affect."""
_COUNTED = re.compile(rb"begun (\d+)\s*")
CENSUS_S = 40.0
KILLED = 137
"""Exit code of a killed process: it used too much memory, or its sandbox was killed."""
DYING_S = 5.0
"""Seconds that the engine has to report the end of a sandbox that starts no command."""
SPARE_PIDS = 8
"""Processes that starting a command takes. A sandbox with fewer left is full."""
SPARE_MB = 24
"""MiB that starting a command takes. A sandbox with less left is full."""
MOST_PIDS = 2 + 2 * SPARE_PIDS
"""Most processes and threads of a sandbox in which the policy has none: those of the keeper, a
command that starts, and the census."""
SAID_BYTES = 1024
"""Bytes that are kept of what comes before the wrapper's word."""
REFUSED = ("engine_error", "sandbox_conflict", "sandbox_lost")
"""Codes of errors with which an engine that can be reached refuses a call."""


class SandboxEnded(Exception):
    """The policy ended its own sandbox, or made it useless: an observation, not a failure."""


class CommandStart:
    """Starts one command in a container that runs."""

    def __init__(
        self, engine: DockerEngine, name: str, limits: Limits, keep_processes: bool
    ) -> None:
        """`keep_processes` says whether processes may outlive their command."""
        self._engine = engine
        self._name = name
        self._limits = limits
        self._wrapper = BESIDE if keep_processes else ALONE

    async def begin(
        self, stack: AsyncExitStack, command: Sequence[str], given: IO[bytes] | None = None
    ) -> tuple[str, Output, bytes]:
        """Start a command. Return its id, its output, and what of the output was read already.

        It gets the bytes of `given` at its stdin, without an end. Raises SandboxEnded if the policy
        keeps it from beginning, and InfrastructureError if something else does.
        """
        whole = ("sh", "-c", self._wrapper, "sh", *command)
        for tries_left in reversed(range(TRIES)):
            run_id = None
            try:
                run_id, output = await stack.enter_async_context(
                    self._engine.run(self._name, whole, USER, WORK, given)
                )
                said = await self._first(run_id, output)
            except InfrastructureError as error:
                if error.code not in REFUSED:
                    raise
                said = str(error).encode()
            before, word, first = said.partition(BEGUN)
            if run_id is not None and word:
                return run_id, output, before + first
            await self.judge(said.decode("utf-8", "replace"), run_id, tries_left)
        raise AssertionError("the last try is never repeated")

    async def exit_code(self, run_id: str) -> int | None:
        """Return the exit code of a command that has ended; None if the worker ended it.

        Raises as `begin` does if the container is gone meanwhile.
        """
        try:
            return await self._engine.exit_code(run_id)
        except NotThere as error:
            await self.judge(str(error))
            raise

    async def judge(self, said: str, run_id: str | None = None, tries_left: int = 0) -> None:
        """Raise the reason why a command did not begin, or return if it may be tried again.

        `run_id` is None if the engine refused the command.
        """
        evidence = replace(await self._look(run_id), tries_left=tries_left)
        verdict = responsible(evidence)
        if verdict == "again":
            return
        if verdict == "infrastructure":
            code = "exec_failed" if evidence.running else "sandbox_lost"
            raise InfrastructureError(code, f"a command did not start: {said[:500]}; {evidence}")
        if not evidence.running:
            raise SandboxEnded("the sandbox ran out of memory")
        if evidence.full:
            raise SandboxEnded("no command can be started: the sandbox is full")
        raise SandboxEnded("processes that are left in the sandbox keep commands from starting")

    async def _first(self, run_id: str, output: Output) -> bytes:
        """Wait for the wrapper's word. What comes after it is the command's own output."""
        said = b""
        for limit_s in (LOOK_S, START_S - LOOK_S):
            try:
                async with asyncio.timeout(limit_s):
                    # What is left in the sandbox may write before the word, until it is killed.
                    while BEGUN not in said and (chunk := await output.read()):
                        said = said[-SAID_BYTES:] + chunk
                return said
            except TimeoutError:
                if (await self._look(run_id)).survivors:
                    break
        return said + b"[nothing]"

    async def _look(self, run_id: str | None) -> Evidence:
        code = None
        with suppress(NotThere):
            code = await self._engine.exit_code(run_id) if run_id else None
        alive = await self._census()
        if alive is not None:
            itself = run_id is not None and code is None
            return Evidence(responds=True, survivors=max(0, alive - itself), ended=code is not None)
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(DYING_S):  # its state may lag behind its end
                    await self._engine.ended(self._name)
            state = (await self._engine.inspect(self._name))["State"]
            if not state.get("Running"):
                return Evidence(running=False, out_of_memory=bool(state.get("OOMKilled")))
            processes, memory = await self._engine.usage(self._name)
        except NotThere:
            return Evidence(exists=False, running=False)
        full = processes >= self._limits.pids - SPARE_PIDS
        full = full or memory >= (self._limits.memory_mb - SPARE_MB) * MIB
        return Evidence(full=full, survivors=max(0, processes - MOST_PIDS))

    async def _census(self) -> int | None:
        """Count the live processes of the policy's user; None if no command can be started."""
        said = b""
        try:
            async with (
                asyncio.timeout(CENSUS_S),
                self._engine.run(self._name, ("sh", "-c", CENSUS), KEEPER, "/") as (_, output),
            ):
                while chunk := await output.read():
                    said += chunk
        except TimeoutError:
            return None
        except InfrastructureError as error:
            if error.code not in REFUSED:
                raise
        counted = _COUNTED.fullmatch(said)
        return int(counted[1]) if counted else None
