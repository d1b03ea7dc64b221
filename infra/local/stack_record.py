"""`stack.json`: which processes make up a stack, on which ports, and for whom."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from headrace.errors import HeadraceError
from headrace.infra.local.detached import ProcessId
from headrace.schemas.problems import problems_of
from headrace.services.base.files import private

FILE = "stack.json"
ServerName = Literal["kafka", "registry"]
Ports = dict[ServerName, int | None]


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Server:
    """One started server."""

    process: ProcessId
    version: str
    port: int
    ready: bool
    recording: Path | None  # the start-up archive that it writes as it ends

    @property
    def serves(self) -> bool:
        """Whether it has become ready and still runs."""
        return self.ready and self.process.alive


@dataclass(frozen=True, slots=True, config=ConfigDict(extra="forbid"))
class Stack:
    """All that is known of a stack."""

    servers: dict[ServerName, Server]
    owner: ProcessId | None  # the stack ends when this process does
    guard: ProcessId | None  # the process that ends the stack then
    valid_until: float | None = (
        None  # when its certificates end, in Unix seconds; None: it has none
    )


NOTHING = Stack({}, None, None)
"""A stack without processes."""
_STACK = TypeAdapter(Stack)


def load(state: Path) -> Stack:
    """Returns the stack of a state folder as last saved. Raises HeadraceError if it is damaged."""
    path = state / FILE
    try:
        return _STACK.validate_json(path.read_bytes())
    except FileNotFoundError:
        return NOTHING
    except ValidationError as error:
        raise HeadraceError(
            f"{path} is damaged ({problems_of(error)[0]}). End the Java processes whose command "
            f"line names {state}, then delete this file"
        ) from error


def save(state: Path, stack: Stack) -> None:
    """Replaces `stack.json` atomically, because not every reader has the lock."""
    scratch = state / f"{FILE}.new"
    with open(scratch, "wb", opener=private) as file:
        file.write(_STACK.dump_json(stack, indent=2))
    os.replace(scratch, state / FILE)
