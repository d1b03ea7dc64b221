"""Long lists that are kept for a while, since to make them blocks the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, TypeVar

from headrace.services.operate.dashboard.index.run_index import RunIndex

T = TypeVar("T")

KEPT = 10.0
"""How long a list is kept, as a multiple of the seconds that it took to make it."""
PAGE = frozenset({"cursor", "limit", "text"})
"""Parts of a query that choose a page of a list, or search in it."""


class KeptList(Generic[T]):
    """Keeps the newest list for `KEPT` times as long as it took to make it.

    Browsers ask every few seconds. With 500,000 episodes a list takes about a second of CPU, in
    which no other request is answered.
    """

    def __init__(
        self,
        make: Callable[[RunIndex, Mapping[str, str]], Sequence[T]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`make` returns the list that a query means. `clock` returns seconds."""
        self._make = make
        self._clock = clock
        self._index: RunIndex | None = None
        self._query: Mapping[str, str] = {}
        self._until = 0.0
        self._rows: Sequence[T] = ()

    def rows(self, index: RunIndex, query: Mapping[str, str]) -> Sequence[T]:
        """Returns what `make` returns, now or a little earlier. Raises what it raises."""
        query = {name: value for name, value in query.items() if name not in PAGE}
        began = self._clock()
        if self._index is not index or self._query != query or began >= self._until:
            self._index, self._rows = None, ()  # two long lists need not be in memory
            self._rows = self._make(index, query)
            self._index, self._query = index, query
            ended = self._clock()
            self._until = ended + KEPT * (ended - began)
        return self._rows
