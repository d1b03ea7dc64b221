"""A client for other people's Python: submit tasks, wait for results, read trajectories.

    from headrace import Client

    with Client() as client:                       # the local stack in .headrace
        tasks = client.submit([{"payload": {"question": "6 * 7"}, "samples": 4}])
        for result in client.results(tasks, timeout_s=600):
            print(result.task, [outcome.reward for outcome in result.outcomes])
        for trajectory in client.trajectories():
            print(trajectory.reward, trajectory.turns[-1].text)

`Client` works in a script and in a notebook. `AsyncClient` has the same methods as coroutines and
asynchronous iterators. Reading leaves no trace in the namespace: no consumer group, no dead letter.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from headrace.async_client import AsyncClient
from headrace.loop_thread import ClosedAtExit, LoopThread
from headrace.schemas.recipe.recipe import Recipe

P = ParamSpec("P")
T = TypeVar("T")


def _waiting(
    method: Callable[Concatenate[AsyncClient, P], Awaitable[T]],
) -> Callable[Concatenate[Client, P], T]:
    """The same method for `Client`: it returns when the coroutine has ended."""

    @wraps(method)
    def wait(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return client._wait(method(client._async, *args, **kwargs))

    return wait


def _iterating(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate[Client, P], Generator[T, None, None]]:
    """The same method for `Client`: it yields what the asynchronous generator yields."""

    @wraps(method)
    def iterate(client: Client, /, *args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        items = method(client._async, *args, **kwargs)
        try:
            while (item := client._wait(anext(items, None))) is not None:
                yield item
        finally:
            if not client._thread.loop.is_closed():
                client._wait(items.aclose())

    return iterate


class Client(ClosedAtExit):
    """`AsyncClient` without `async`: its methods return results and iterators.

    The event loop runs in a thread, so a client works in notebooks too.
    """

    def __init__(
        self,
        bootstrap: str | None = None,
        registry: str | None = None,
        namespace: str | None = None,
        *,
        source: str = "client",
        state: str | Path | None = None,
        properties: Mapping[str, str] | None = None,
        key: str | Path | None = None,
    ) -> None:
        """Connects at once. Arguments and errors are those of AsyncClient."""
        self._async = AsyncClient(
            bootstrap,
            registry,
            namespace,
            source=source,
            state=state,
            properties=properties,
            key=key,
        )
        self._thread = LoopThread()
        with ExitStack() as closing:
            closing.callback(self._thread.close)
            self._wait(self._async.__aenter__())
            closing.callback(lambda: self._wait(self._async.__aexit__()))
            self._closing = closing.pop_all()

    @property
    def namespace(self) -> str:
        """The namespace that this client uses."""
        return self._async.namespace

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return self._async.recipe

    submit = _waiting(AsyncClient.submit)
    results = _iterating(AsyncClient.results)
    trajectories = _iterating(AsyncClient.trajectories)
    trajectory = _waiting(AsyncClient.trajectory)
    artifact = _waiting(AsyncClient.artifact)
    save_artifacts = _waiting(AsyncClient.save_artifacts)
    versions = _waiting(AsyncClient.versions)

    def _wait(self, work: Awaitable[T]) -> T:
        return self._thread.wait(work)
