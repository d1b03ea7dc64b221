"""Finds requests of an agent's code that it did not await, and says which ones.

Without this, Python raises an AttributeError about a coroutine, or only warns while the agent goes
on without the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from contextvars import ContextVar
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

forgotten: ContextVar[list[str]] = ContextVar("headrace_forgotten")
"""What to say about the requests of the current episode that were dropped without `await`."""


def must_await(
    method: Callable[P, Coroutine[Any, Any, T]],
) -> Callable[P, AgentRequest[T]]:
    """Decorates a method that agents call: it returns an AgentRequest instead of a coroutine."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> AgentRequest[T]:
        return AgentRequest(method(*args, **kwargs), method.__qualname__.lower())

    return call


def check_awaited() -> None:
    """Raises RuntimeError if the current episode dropped a request without `await`."""
    if found := forgotten.get([]):
        raise RuntimeError(found[0])


class AgentRequest(Coroutine[Any, Any, T]):
    """The coroutine of a request. It says so if the agent uses or drops it without `await`."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], name: str) -> None:
        """`name` is how the agent calls the method, for example `episode.step`."""
        self._coroutine = coroutine
        self._name = name
        self._awaited = False
        self._forgotten = forgotten.get(None)

    def __await__(self) -> Generator[Any, Any, T]:
        self._awaited = True
        return self._coroutine.__await__()

    def send(self, value: Any, /) -> Any:
        """Goes on with the request, as asyncio does."""
        self._awaited = True
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Raises an exception in the request, as asyncio does to cancel it."""
        self._awaited = True
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Ends the request."""
        self._awaited = True
        self._coroutine.close()

    def __getattr__(self, name: str) -> Any:
        """Only absent attributes come here, such as `text`: the agent wants the answer."""
        raise AttributeError(f"{self._advice}, to use its answer's {name!r}")

    def __del__(self) -> None:
        if not self._awaited:
            self._coroutine.close()  # Without this, Python warns that it was never awaited.
            if self._forgotten is not None:
                self._forgotten.append(self._advice)

    @property
    def _advice(self) -> str:
        return f"{self._name} was called without await: write `await {self._name}(…)`"
