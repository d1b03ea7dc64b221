"""Shows the warnings and errors of a run's processes, each kind once. Their logs have the rest."""

from __future__ import annotations

import re
from pathlib import Path

from headrace.services.operate.run.endings import without_numbers

MOST_KINDS = 50
"""Kinds of messages that are shown. Messages that differ only in their numbers are one kind."""
POLL_BYTES = 65_536
"""Most bytes of a log that are read at once. Earlier ones are left out."""
CHARACTERS = 300
"""Most characters of a message."""
_LINE = re.compile(r"\S+Z (?:WARNING|ERROR|CRITICAL) +(?P<service>\S+) (?P<message>.*)")


class LogNotes:
    """Reads what is new in the logs of a folder."""

    def __init__(self) -> None:
        self._read: dict[str, int] = {}
        """Bytes of each log that were read."""
        self._shown: set[tuple[str, str]] = set()

    def news(self, folder: Path) -> list[str]:
        """Returns a line for each new kind of message. A folder that was renamed goes on."""
        lines = []
        for log in sorted(folder.glob("*.log")):
            for line in self._new_lines(log):
                found = _LINE.match(line)
                if found is None or len(self._shown) >= MOST_KINDS:
                    continue
                kind = (found["service"], without_numbers(found["message"]))
                if kind not in self._shown:
                    self._shown.add(kind)
                    lines.append(f"{found['service']}: {found['message'][:CHARACTERS]}")
        return lines

    def _new_lines(self, log: Path) -> list[str]:
        """Returns the whole lines that were added since the last time."""
        begin = self._read.get(log.name, 0)
        try:
            with log.open("rb") as file:
                end = file.seek(0, 2)
                file.seek(max(begin, end - POLL_BYTES))
                data = file.read(POLL_BYTES)
        except FileNotFoundError:  # it was moved meanwhile
            return []
        whole, newline, _ = data.rpartition(b"\n")
        self._read[log.name] = max(begin, end - POLL_BYTES) + len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines()
