"""A node of the wait graph."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wait:
    """Something that waits, and what it waits for. It is also the JSON of the dashboard."""

    id: str
    """Unique in the graph, for example `episode/42/0`."""
    kind: str
    """`trainer`, `batch`, `group`, `episode`, `prompt`, `action`, `task`, `worker`, `service`,
    `broker` or `run`."""
    name: str
    """What it is called for people."""
    since: float
    """Since when it waits, in epoch seconds."""
    on: tuple[str, ...]
    """The ids of what it waits for. Empty: it is a root, and `cause` says why it does not go on."""
    cause: str
    """Why it waits, as far as the log shows it."""
    help: str
    """A command that shows more or helps, or what to do, with its commands between backticks."""
    busy: bool = False
    """It works, and not for longer than is usual: however old, it is no problem."""
