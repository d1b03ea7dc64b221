"""Pages of lists: a bounded number of rows, and where the next page begins."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from headrace.errors import UsageError

T = TypeVar("T")

DEFAULT, MOST = 50, 500


def whole_number(
    query: Mapping[str, str], name: str, default: int, least: int = 0, most: int = 2**53
) -> int:
    """Returns a parameter of a request. Raises UsageError if it is not a whole number in range."""
    text = query.get(name, "")
    if not text:
        return default
    digits = text[1:] if text[0] == "-" else text
    if not digits.isdecimal() or len(digits) > 16 or not least <= int(text) <= most:
        raise UsageError(f"{name}={text[:40]!r}: give a whole number from {least} to {most}")
    return int(text)


def decimal(query: Mapping[str, str], name: str) -> float | None:
    """Returns a parameter of a request, or None. Raises UsageError if it is not a number."""
    text = query.get(name, "")
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{name}={text[:40]!r}: give a number") from None


def page_of(
    rows: Sequence[T],
    query: Mapping[str, str],
    to_tree: Callable[[T], Any],
    cursor: str = "cursor",
) -> dict[str, Any]:
    """Returns one page of rows as JSON values. The cursor is the number of its first row."""
    limit = whole_number(query, "limit", DEFAULT, 1, MOST)
    first = whole_number(query, cursor, 0)
    items = [to_tree(row) for row in rows[first : first + limit]]
    later = first + limit
    following = str(later) if later < len(rows) else None
    return {"items": items, "total": len(rows), "next": following}


def bounded(rows: Iterable[T], most: int) -> list[T]:
    """Returns at most so many rows."""
    return list(itertools.islice(rows, most))
