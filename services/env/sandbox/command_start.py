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
from dataclasses import dataclass, replace
from typing import IO

from headrace.errors import InfrastructureError
from headrace.services.env.sandbox.responsibility import Evidence, responsible
from headrace.services.env.sandbox.sandbox_engine import CommandOutput, SandboxEngine
from headrace.services.processes.docker.docker_errors import Conflict, NotThere
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
CENSUS = """
n=0 stopped=0
for p in /proc/[0-9]*; do
  if [ "$p" = /proc/1 ]; then continue; fi
  user=gone state=
  while read -r key value rest; do
    if [ "$key" = State: ]; then state=$value; fi
    if [ "$key" = Uid: ]; then user=$value; break; fi
  done 2>/dev/null <$p/status
  case $user in "$1"|gone) n=$((n+1)) ;; *) continue ;; esac
  case $state in T|t) stopped=$((stopped+1)) ;; esac
done
echo begun $n $stopped
"""
"""Counts the live processes of the user that is its argument, which is the policy's, and those of
them that are stopped or traced. Those that end meanwhile count: they may have children. The first
process does not count: whoever its user is, nothing in the sandbox can affect it. It runs as the
keeper, whose processes the policy's can't affect."""
_COUNTED = re.compile(rb"begun (\d+) (\d+)\s*")
CENSUS_S = 40.0
KILLED = 137
"""Exit code of a killed process: it used too much memory, or its sandbox was killed."""
DYING_S = 5.0
"""Seconds that the engine has to report the end of a command, or of a sandbox that starts none, and
that killed processes have to end."""
POLL_S = 0.1
ROUNDS = 2
"""How often a sandbox is looked into in which the keeper can't start a command: what fills it may
end by itself."""
SPARE_PIDS = 8
"""Processes that starting a command takes. A sandbox with fewer left is full."""
SPARE_MB = 24
"""MiB that starting a command takes. A sandbox with less left is full."""
MOST_PIDS = 2 + 2 * SPARE_PIDS
"""Most processes and threads of a sandbox in which the policy has none: those of the keeper, a
command that starts, and the census."""
SAID_BYTES = 1024
"""Bytes that are kept of what comes before the wrapper's word."""
LEFT = "processes that are left in the sandbox keep commands from starting"
SILENT = "engine_silent"
"""Code of the error of a call that the engine did not answer in time."""
REFUSED = ("engine_error", "sandbox_conflict", "sandbox_lost")
"""Codes of errors with which an engine that can be reached refuses a call."""


class SandboxEnded(Exception):
    """The policy ended its own sandbox, or made it useless: an observation, not a failure."""


@dataclass(frozen=True, slots=True)
class Census:
    """The processes of the policy's user that live in a sandbox."""

    alive: int
    stopped: int
    """Those that are stopped or traced. Nothing but the policy's own processes does that."""


class CommandStart:
    """Starts one command in a container that runs."""

    def __init__(
        self, engine: SandboxEngine, name: str, limits: Limits, keep_processes: bool
    ) -> None:
        """`keep_processes` says whether processes may outlive their command."""
        self._engine = engine
        self._name = name
        self._limits = limits
        self._wrapper = BESIDE if keep_processes else ALONE

    async def begin(
        self, stack: AsyncExitStack, command: Sequence[str], given: IO[bytes] | None = None
    ) -> tuple[str, CommandOutput, bytes]:
        """Start a command. Return its id, its output, and what of the output was read already.

        It gets the bytes of `given` at its stdin, without an end. Raises SandboxEnded if the policy
        keeps it from beginning, and InfrastructureError if something else does.
        """
        whole = ("sh", "-c", self._wrapper, "sh", *command)
        for tries_left in reversed(range(TRIES)):
            run_id, over = None, True
            try:
                run_id, output = await stack.enter_async_context(
                    self._engine.run(self._name, whole, USER, WORK, given)
                )
                said, over = await self._first(run_id, output)
            except InfrastructureError as error:
                if error.code not in REFUSED:
                    await self._require_engine(error)
                said = str(error).encode()
            before, word, first = said.partition(BEGUN)
            if run_id is not None and word:
                return run_id, output, before + first
            await self.judge(said.decode("utf-8", "replace"), run_id, tries_left, over=over)
        raise AssertionError("the last try is never repeated")

    async def require_alone(self) -> None:
        """Return once no process of the policy's user lives, without starting one of that user.

        Raises SandboxEnded if some live on, and InfrastructureError if that can't be known.
        """
        until = asyncio.get_running_loop().time() + DYING_S
        while (census := (await self._look_inside())[0]) is not None and census.alive:
            if asyncio.get_running_loop().time() > until:
                raise SandboxEnded(LEFT)
            await asyncio.sleep(POLL_S)
        if census is None:
            await self.judge("the keeper can't look into the sandbox")

    async def exit_code(self, run_id: str) -> int | None:
        """Return the exit code of a command that has ended; None if the worker ended it.

        Raises as `begin` does if the container is gone meanwhile.
        """
        try:
            return await self._engine.exit_code(run_id)
        except NotThere as error:
            await self.require_known(error)
            await self.judge(str(error))
            raise

    async def require_known(self, error: InfrastructureError) -> None:
        """Raise `error` if the engine has forgotten a command of a sandbox that runs.

        It was restarted, and its containers were not. What runs in them is not the policy's doing.
        """
        if isinstance(error, NotThere):
            with suppress(NotThere):
                if (await self._engine.inspect(self._name))["State"].get("Running"):
                    raise InfrastructureError("exec_failed", error.message) from error

    async def judge(
        self, said: str, run_id: str | None = None, tries_left: int = 0, *, over: bool = True
    ) -> None:
        """Raise the reason why a command did not begin, or return if it may be tried again.

        `run_id` is None if the engine refused the command. `over` is whether its output has ended.
        """
        try:
            evidence = replace(await self._look(run_id, over), tries_left=tries_left)
        except InfrastructureError as error:
            await self._require_engine(error)
            raise
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
        raise SandboxEnded(LEFT)

    async def _require_engine(self, error: InfrastructureError) -> None:
        """Raise the error of a call about the sandbox, if it is not the policy's doing.

        A process that stops a command while the engine starts it may make the engine hang, but only
        for this sandbox.
        """
        if error.code != SILENT:
            raise error
        try:
            async with asyncio.timeout(LOOK_S):
                await self._engine.info()
        except (InfrastructureError, TimeoutError):
            raise error from None
        raise SandboxEnded("the engine can't reach the sandbox any more") from error

    async def _first(self, run_id: str, output: CommandOutput) -> tuple[bytes, bool]:
        """Wait for the wrapper's word. What comes after it is the command's own output.

        Also return whether the output has ended.
        """
        said = b""
        for limit_s in (LOOK_S, START_S - LOOK_S):
            try:
                async with asyncio.timeout(limit_s):
                    # What is left in the sandbox may write before the word, until it is killed.
                    while BEGUN not in said:
                        if not (chunk := await output.read()):
                            return said, True
                        said = said[-SAID_BYTES:] + chunk
                return said, False
            except TimeoutError:
                if (await self._look(run_id, over=False)).survivors:
                    break
        return said + b"[nothing]", False

    async def _look(self, run_id: str | None, over: bool) -> Evidence:
        code, known = await self._end_of(run_id, DYING_S if over else 0.0)
        # A command that goes on without its output is not the wrapper any more.
        itself = run_id is not None and code is None and not (known and over)
        processes, full = 0, False
        for _ in range(ROUNDS):
            census, processes, full = await self._look_inside()
            if census is not None:
                survivors = max(0, census.alive - itself) + census.stopped
                ended = run_id is None or code is not None
                return Evidence(responds=True, survivors=survivors, ended=ended)
            if full:
                break
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(DYING_S):  # its state may lag behind its end
                        await self._engine.ended(self._name)
                if not (await self._engine.inspect(self._name))["State"].get("Running"):
                    memory = await self._engine.out_of_memory(self._name)
                    return Evidence(running=False, out_of_memory=memory)
            except NotThere:
                return Evidence(exists=False, running=False)
        return Evidence(full=full, survivors=max(0, processes - MOST_PIDS))

    async def _end_of(self, run_id: str | None, limit_s: float) -> tuple[int | None, bool]:
        """Return a command's exit code, if it has ended in time, and whether the engine knows it.

        Its end may be reported later than the end of its output.
        """
        until = asyncio.get_running_loop().time() + limit_s
        while run_id is not None:
            try:
                code = await self._engine.exit_code(run_id)
            except NotThere:
                return None, False
            if code is not None or asyncio.get_running_loop().time() > until:
                return code, True
            await asyncio.sleep(POLL_S)
        return None, False

    async def _look_inside(self) -> tuple[Census | None, int, bool]:
        """Return a census, the most processes, and whether processes or memory are used up.

        It measures while the census is taken: what fills the sandbox may come and go.
        """
        counting = asyncio.create_task(self._census())
        most, full = 0, False
        try:
            while not counting.done():
                with suppress(NotThere, Conflict):  # it has ended
                    processes, memory = await self._engine.usage(self._name)
                    most = max(most, processes)
                    full = full or processes >= self._limits.pids - SPARE_PIDS
                    full = full or memory >= (self._limits.memory_mb - SPARE_MB) * MIB
                await asyncio.wait({counting}, timeout=POLL_S)
            return await counting, most, full
        finally:
            counting.cancel()
            await asyncio.wait({counting})

    async def _census(self) -> Census | None:
        """Count the live processes of the policy's user; None if no command can be started."""
        said = b""
        command = ("sh", "-c", CENSUS, "sh", self._engine.policy_user(self._name))
        try:
            async with (
                asyncio.timeout(CENSUS_S),
                self._engine.run(self._name, command, KEEPER, "/") as (_, output),
            ):
                while chunk := await output.read():
                    said += chunk
        except TimeoutError:
            return None
        except InfrastructureError as error:
            if error.code not in REFUSED:
                raise
        counted = _COUNTED.fullmatch(said)
        return Census(int(counted[1]), int(counted[2])) if counted else None
