"""What sandboxes need of whatever runs them: a Docker engine, or a cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import IO, Any, Protocol


class CommandOutput(Protocol):
    """What a command writes, both streams as they come."""

    async def read(self) -> bytes:
        """Return the next bytes, or none at the end. A cancelled call loses no bytes."""

    async def drain(self) -> None:
        """Read to the end of the command."""


class SandboxEngine(Protocol):
    """Containers in the words of Docker. Errors are InfrastructureErrors."""

    host: str

    def policy_user(self, name: str) -> str:
        """Return the number of the user that runs the commands of a container."""

    async def info(self) -> Mapping[str, Any]:
        """Return something about the engine, to see whether it answers."""

    async def rename(self, name: str, new: str) -> None:
        """Raise NotThere or Conflict unless the container had this name until now."""

    async def remove(self, name: str) -> None:
        """Kill and remove a container, unless it is already gone."""

    async def inspect(self, name: str) -> Mapping[str, Any]:
        """Return `State` with `Running`."""

    async def out_of_memory(self, name: str) -> bool:
        """Return whether a container that does not run ended because its memory was used up."""

    async def ended(self, name: str) -> None:
        """Wait until a container does not run."""

    def run(
        self,
        name: str,
        command: Sequence[str],
        user: str,
        folder: str,
        given: IO[bytes] | None = None,
    ) -> AbstractAsyncContextManager[tuple[str, CommandOutput]]:
        """Begin a command. Yield its id and its output. `user` is USER or KEEPER."""

    async def exit_code(self, command: str) -> int | None:
        """Return the exit code of a command; None if it still runs or that is not known."""

    async def usage(self, name: str) -> tuple[int, int]:
        """Return the processes and the bytes of memory of a container."""

    async def aclose(self) -> None:
        """Close the connections."""
