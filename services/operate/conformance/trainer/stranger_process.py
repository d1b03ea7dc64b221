"""The process of a trainer that the kit starts, kills and starts again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from headrace.errors import UsageError
from headrace.services.operate.conformance.trainer.trainer_rules import SIGTERM_S
from headrace.services.processes.guard import die_with_parent
from headrace.services.processes.signals import send_signal

KILLED_S = 10.0
"""Seconds that a killed process may take to be gone."""
GRACE_S = 0.5
"""Seconds that child processes may take to end after their parent."""


class StrangerProcess:
    """One trainer's command. It is a session of its own, and each start is a new process."""

    def __init__(
        self, command: Sequence[str], folder: Path, variables: Mapping[str, str], output: Path
    ) -> None:
        """It works in `folder`, with these environment variables beside the usual ones. What it
        prints goes to the file `output`."""
        self._command = [_absolute(part) for part in command]
        self._folder = folder
        self._variables = {**os.environ, **variables}
        self.output = output
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Starts the command. Raises UsageError if there is no such program."""
        with self.output.open("ab") as output:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, cwd=self._folder, env=self._variables,
                    stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                    start_new_session=True, preexec_fn=die_with_parent,
                )  # fmt: skip
            except OSError as error:
                raise UsageError(
                    f"can't start the trainer {self._command[0]!r}: {error.strerror}"
                ) from error

    @property
    def code(self) -> int | None:
        """The exit code. None while it runs."""
        return None if self._process is None else self._process.returncode

    async def ended(self) -> None:
        """Waits until the process ends by itself."""
        assert self._process is not None, "the process was not started"
        await self._process.wait()

    async def kill(self) -> None:
        """Kills the process and all of its session with SIGKILL. Does nothing if it has ended."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid, _ in _session(self._process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(self._process.wait(), KILLED_S)

    async def terminate(self) -> tuple[float | None, list[str]]:
        """Sends SIGTERM, waits, and kills what is left.

        Returns the seconds that it took, None if that was too long, and the commands of what was
        left of its session.
        """
        assert self._process is not None, "the process was not started"
        loop = asyncio.get_running_loop()
        began = loop.time()
        took: float | None = None
        send_signal(self._process, signal.SIGTERM)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), SIGTERM_S)
            took = loop.time() - began
        left: list[str] = []
        if took is not None:
            await asyncio.sleep(GRACE_S)
            left = [command for _, command in _session(self._process.pid)]
        await self.kill()
        return took, left


def _absolute(part: str) -> str:
    """Makes the path of a file absolute, because the command runs in a folder of its own."""
    path = Path(part)
    return str(path.absolute()) if path.exists() else part


def _session(session: int) -> Iterator[tuple[int, str]]:
    """Yields the process id and the command of each process of a session, except its leader."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            state, owner, pid = fields[0], int(fields[3]), int(folder.name)
            if owner == session and pid != session and state != "Z":
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                yield pid, command.decode("utf-8", "replace").strip()
