"""Notes when code of this process connects to something or starts a program."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

NOTED = frozenset(
    {
        "socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname",
        "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn",
    }
)  # fmt: skip
"""Events of https://docs.python.org/3/library/audit_events.html."""
MOST = 100

_listening: list[list[str]] = []
_hooked: list[bool] = []


@contextmanager
def outside_calls() -> Iterator[list[str]]:
    """Yields a list that gets what happens until the end of the `with`, at most MOST items."""
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(_note)  # Nothing can remove it.
    found: list[str] = []
    _listening.append(found)
    try:
        yield found
    finally:
        _listening.remove(found)


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _listening and event in NOTED:
        given = arguments[1:] if event.startswith("socket.") and len(arguments) > 1 else arguments
        for found in _listening:
            if len(found) < MOST:
                found.append(f"{event}{given!r:.100}")
