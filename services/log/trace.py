"""W3C traces: what a task sends belongs to the trace of the event that it handles."""

from __future__ import annotations

import random
from contextvars import ContextVar

_parent: ContextVar[str] = ContextVar("headrace_traceparent", default="")


def enter_trace(traceparent: str) -> None:
    """Makes everything that this asyncio task sends from now on part of an event's trace."""
    _parent.set(traceparent)


def next_traceparent() -> str:
    """A `traceparent` with a new span, in the trace that was entered, or else in a new one."""
    parts = _parent.get().split("-")
    trace = parts[1] if len(parts) == 4 and len(parts[1]) == 32 else ""
    trace = trace or f"{random.getrandbits(128):032x}"
    return f"00-{trace}-{random.getrandbits(64):016x}-01"
