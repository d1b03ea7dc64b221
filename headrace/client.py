"""A client for other people's Python: submit tasks, wait for results, read trajectories.

    from headrace import Client

    with Client() as client:                       # the local stack in ./.headrace
        tasks = client.submit([{"payload": {"question": "6 * 7"}, "samples": 4}])
        for result in client.results(tasks, timeout_s=600):
            print(result.task, [outcome.reward for outcome in result.outcomes])
        for trajectory in client.trajectories():
            print(trajectory.reward, trajectory.turns[-1].text)

`Client` works in a script and in a notebook. `AsyncClient` has the same methods as coroutines and
asynchronous iterators. Reading leaves no trace in the namespace: no consumer group, no dead letter.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Coroutine, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from headrace.async_client import AsyncClient, SubmittedTask
from headrace.errors import UsageError
from headrace.schemas.events import EpisodeEnded, TaskEnded
from headrace.schemas.recipe.recipe import Recipe
from headrace.trajectories import Trajectory

T = TypeVar("T")

CLOSE_S = 10.0
"""Seconds that the loop's thread may take to end."""


class Client:
    """`AsyncClient` without `async`: its loop runs in a thread, so it works in notebooks too."""

    def __init__(
        self,
        bootstrap: str | None = None,
        registry: str | None = None,
        namespace: str | None = None,
        *,
        source: str = "client",
        state: str | Path = ".headrace",
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """Connects at once. Arguments and errors are those of AsyncClient."""
        self._async = AsyncClient(
            bootstrap, registry, namespace, source=source, state=state, properties=properties
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="headrace", daemon=True)
        self._thread.start()
        try:
            self._call(self._async.__aenter__())
        except BaseException:
            self._end_loop()
            raise

    def __enter__(self) -> Client:
        """Connected already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the connection."""
        self.close()

    def close(self) -> None:
        """Closes the connection. A second call does nothing."""
        if self._loop.is_closed():
            return
        try:
            self._call(self._async.__aexit__())
        finally:
            self._end_loop()

    @property
    def namespace(self) -> str:
        """The namespace that this client uses."""
        return self._async.namespace

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return self._async.recipe

    def submit(self, tasks: Iterable[Mapping[str, Any]]) -> list[SubmittedTask]:
        """As `AsyncClient.submit`."""
        return self._call(self._async.submit(tasks))

    def results(
        self,
        tasks: Iterable[SubmittedTask | int] | None = None,
        *,
        follow: bool = False,
        timeout_s: float | None = None,
    ) -> Iterator[TaskEnded]:
        """As `AsyncClient.results`."""
        return self._each(self._async.results(tasks, follow=follow, timeout_s=timeout_s))

    def trajectories(
        self,
        tasks: Iterable[SubmittedTask | int] | None = None,
        *,
        follow: bool = False,
        timeout_s: float | None = None,
    ) -> Iterator[Trajectory]:
        """As `AsyncClient.trajectories`."""
        return self._each(self._async.trajectories(tasks, follow=follow, timeout_s=timeout_s))

    def trajectory(self, outcome: EpisodeEnded) -> Trajectory | None:
        """As `AsyncClient.trajectory`."""
        return self._call(self._async.trajectory(outcome))

    def _each(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        try:
            while True:
                try:
                    item = self._call(anext(items))
                except StopAsyncIteration:
                    return
                yield item
        finally:
            if not self._loop.is_closed():
                self._call(items.aclose())

    def _call(self, work: Awaitable[T]) -> T:
        if self._loop.is_closed():
            _close_unused(work)
            raise UsageError("the client is closed: make a new one")

        async def run() -> T:
            return await work

        future = asyncio.run_coroutine_threadsafe(run(), self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()  # Ctrl-C in a notebook ends the work too.
            raise

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


def _close_unused(work: Awaitable[Any]) -> None:
    if isinstance(work, Coroutine):
        work.close()
