"""`stack.json`: which processes make up a stack, on which ports, for whom."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace.errors import HeadraceError
from headrace.infra.local.detached import ProcessId

FILE = "stack.json"
ServerName = Literal["kafka", "registry"]


@dataclass(frozen=True, slots=True)
class Server:
    """One started server."""

    process: ProcessId
    version: str
    port: int
    ready: bool
    recording: str | None  # the start-up archive that it writes as it ends

    @property
    def serves(self) -> bool:
        """Whether it came up and still runs."""
        return self.ready and self.process.alive


@dataclass(frozen=True, slots=True)
class Stack:
    """All that is known of a stack. The default is one of which nothing runs."""

    servers: dict[ServerName, Server] = field(default_factory=dict)
    owner: ProcessId | None = None  # the stack is not to outlive it
    guard: ProcessId | None = None  # sees to that


def load(state: Path) -> Stack:
    """The stack of this state folder, as last saved. Raises HeadraceError on a damaged file."""
    path = state / FILE
    try:
        return parse(path.read_text("utf-8"))
    except FileNotFoundError:
        return Stack()
    except ValueError as error:
        raise HeadraceError(
            f"{path} is damaged ({error}): end the Java processes whose command line names "
            f"{state}, then delete this file"
        ) from error


def parse(text: str) -> Stack:
    """Read `stack.json`. Raises ValueError."""
    try:
        raw = json.loads(text)
        servers = {name: _server(value) for name, value in raw["servers"].items()}
        return Stack(servers, _process(raw["owner"]), _process(raw["guard"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a stack: {error!r}") from error


def render(stack: Stack) -> str:
    """The text of `stack.json`."""
    return json.dumps(asdict(stack), indent=2) + "\n"


def save(state: Path, stack: Stack) -> None:
    """Replace `stack.json` whole: a reader without the lock never sees half of it."""
    scratch = state / f"{FILE}.new"
    scratch.write_text(render(stack), "utf-8")
    os.replace(scratch, state / FILE)


def _server(raw: dict[str, Any]) -> Server:
    return Server(**(raw | {"process": ProcessId(**raw["process"])}))


def _process(raw: dict[str, Any] | None) -> ProcessId | None:
    return None if raw is None else ProcessId(**raw)
