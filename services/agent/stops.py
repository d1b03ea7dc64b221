"""What ends an agent's coroutine early, from inside: a limit, a failure, an exit of its own code.

The first are no Exceptions, so that an agent's code lets them pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from headrace.errors import DependencyError
from headrace.schemas.events import Failure


class EpisodeStopped(BaseException):
    """A limit is reached."""

    def __init__(self, ending: Literal["turn_limit", "token_limit", "overflow"]) -> None:
        super().__init__(ending)
        self.ending = ending


class AttemptFailed(BaseException):
    """An attempt can't go on."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.code)
        self.failure = failure


class LogLost(BaseException):
    """A request could not be sent: the worker must end."""

    def __init__(self, error: DependencyError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def exits_contained() -> Iterator[None]:
    """Makes an exit of the agent's code an error: as SystemExit a task would end the process."""
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as exit:
        raise RuntimeError(f"the agent's code raised {type(exit).__name__}: {exit}") from exit


def error_of(agent: asyncio.Future[None]) -> BaseException | None:
    """What an agent's coroutine raised: CancelledError too, where its own code leaked one."""
    try:
        return agent.exception()
    except asyncio.CancelledError as error:
        return error
