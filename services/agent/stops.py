"""Exceptions that end an agent's coroutine early: a limit, a failure, or an exit of its own code.

They are no Exceptions, so that they pass through the `except Exception` clauses of an agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal

from headrace.errors import DependencyError, InfrastructureError
from headrace.schemas.events import Failure
from headrace.services.base.redactor import REDACTOR
from headrace.services.base.texts import encodable

reached_limits: ContextVar[list[str]] = ContextVar("reached_limits")
"""Gets each limit that stops an episode of this context, also if the agent goes on."""


class EpisodeStopped(BaseException):
    """The episode reached a limit."""

    def __init__(self, ending: Literal["turn_limit", "token_limit", "overflow"]) -> None:
        super().__init__(ending)
        self.ending = ending
        reached_limits.get([]).append(ending)


Blamed = Literal["infrastructure", "agent"]


class AttemptFailed(BaseException):
    """The attempt can't go on."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.code)
        self.failure = failure

    @classmethod
    def retryable(cls, code: str, message: str, origin: Blamed = "infrastructure") -> AttemptFailed:
        """Returns the error for a failure after which the next attempt may succeed."""
        return cls(Failure(origin=origin, code=code, message=message, retryable=True))

    @classmethod
    def infrastructure(cls, error: InfrastructureError) -> AttemptFailed:
        """Returns the error for what neither the policy nor the agent's code did.

        For example, the Docker engine of a contained agent does not answer.
        """
        message = REDACTOR.text(encodable(str(error.message)), 1000)
        code = encodable(str(error.code))
        return cls(
            Failure(origin="infrastructure", code=code, message=message, retryable=error.retryable)
        )


class NoScore(Exception):
    """A judge answered without a score. If the agent doesn't catch this, its attempt fails."""


class LogLost(BaseException):
    """A request could not be written to the log. The worker must end."""

    def __init__(self, error: DependencyError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def exits_contained() -> Iterator[None]:
    """Turns an exit of the agent's code into an error.

    A SystemExit in an asyncio task would end the worker's process.
    """
    try:
        yield
    except (SystemExit, KeyboardInterrupt) as exit:
        raise contained(exit) from exit


def contained(exit: BaseException) -> RuntimeError:
    """Returns the error to raise instead of an exit of the agent's code."""
    return RuntimeError(f"the agent's code raised {type(exit).__name__}: {exit}")


def error_of(agent: asyncio.Future[Any]) -> BaseException | None:
    """Returns what an agent's finished coroutine raised, even if it is a CancelledError.

    Of a group, as a TaskGroup raises it, returns the error that says how the attempt ended, if
    there is one. Returns AttemptFailed for what neither the policy nor the agent's code did.
    """
    try:
        error = agent.exception()
    except asyncio.CancelledError as cancelled:
        return cancelled
    for kind in (LogLost, AttemptFailed, EpisodeStopped, InfrastructureError):
        found: BaseException | None = None
        if isinstance(error, BaseExceptionGroup):
            found = error.subgroup(kind)
        while isinstance(found, BaseExceptionGroup):
            found = found.exceptions[0]
        if found is not None:
            error = found
            break
    return AttemptFailed.infrastructure(error) if isinstance(error, InfrastructureError) else error
