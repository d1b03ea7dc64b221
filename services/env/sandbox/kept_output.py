"""Keeps the beginning and the end of an output of any length."""

from __future__ import annotations


class KeptOutput:
    """The first and the last bytes of an output, in at most `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._half = limit // 2
        self._first = bytearray()
        self._last = bytearray()
        self.seen = 0
        """Bytes received so far."""

    def add(self, chunk: bytes) -> None:
        """Takes the next bytes."""
        self.seen += len(chunk)
        room = self._half - len(self._first)
        self._first += chunk[:room]
        self._last += chunk[max(0, room) :]
        if len(self._last) > 2 * self._half:
            del self._last[: -self._half]

    def text(self) -> str:
        """Returns what is kept. A line says how many bytes are left out."""
        last = bytes(self._last[-self._half :])
        left_out = self.seen - len(self._first) - len(last)
        middle = f"\n[{left_out} bytes left out]\n".encode() if left_out else b""
        return (bytes(self._first) + middle + last).decode("utf-8", "replace")
