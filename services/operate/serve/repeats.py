"""Logs a traceback once, and then only how often it came again."""

from __future__ import annotations

import logging
from collections import OrderedDict
from types import TracebackType

MOST = 1_000
"""Tracebacks that are remembered."""

_Lines = tuple[tuple[str, int], ...]


class Repeats(logging.Filter):
    """Drops records with a traceback that was logged before, except at each power of ten."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: OrderedDict[tuple[str, str, _Lines], int] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Returns whether to log a record. Shortens one whose traceback is known."""
        if not record.exc_info or record.exc_info[0] is None:
            return True
        kind, _, trace = record.exc_info
        key = (str(record.msg), kind.__qualname__, _lines(trace))
        count = self._counts[key] = self._counts.get(key, 0) + 1
        self._counts.move_to_end(key)
        if len(self._counts) > MOST:
            self._counts.popitem(last=False)
        if count == 1:
            return True
        if str(count).strip("0") != "1":
            return False
        record.msg = f"{record.getMessage()}: {kind.__qualname__}: {record.exc_info[1]} (the same "
        record.msg += f"traceback as before; {count:,} times in all)"
        record.args, record.exc_info, record.exc_text = (), None, None
        return True


def _lines(trace: TracebackType | None) -> _Lines:
    lines = []
    while trace is not None:
        lines.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return tuple(lines)
