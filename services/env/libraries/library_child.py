"""The child process that a library runs in. Its arguments are the parent's pid and the target.

One request a line on its standard input, one answer a line on its standard output, in turn. What
the library prints goes to standard error. It ends with its input, and with its parent.
"""

from __future__ import annotations

import inspect
import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn, Protocol, TextIO

from headrace.errors import EnvironmentFailed, UsageError
from headrace.services.base.plugins import Loader, load
from headrace.services.processes.parent import die_with


def _reasoning_gym() -> Any:
    from headrace.services.env.libraries.reasoning_gym_problems import Problems

    return Problems


def _textarena() -> Any:
    from headrace.services.env.libraries.textarena_games import Games

    return Games


LIBRARIES: dict[str, Loader] = {"reasoning_gym": _reasoning_gym, "textarena": _textarena}


class Library(Protocol):
    """A library's episodes, each by its name. Made once, from the recipe's options."""

    def reset(self, name: str, task: Mapping[str, Any]) -> Mapping[str, Any]:
        """Begins an episode: the fields of an Observation. `task` has `seed` and `payload`."""

    def step(self, name: str, action: str) -> Mapping[str, Any]:
        """Acts in it. KeyError where it isn't open."""

    def close(self, name: str) -> None:
        """Forgets it."""


def main() -> None:
    """Serves until the input's end."""
    parent, target = sys.argv[1:]
    die_with(int(parent))
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        setup = json.loads(sys.stdin.readline())
        _limit(setup["memory_mb"])
        signal.signal(signal.SIGALRM, _too_slow)
        serve(target, setup, answers)


def serve(target: str, setup: Mapping[str, Any], answers: TextIO) -> None:
    """Makes the library, then answers each request. The first answer says that it is made."""
    library: Any = None
    call: dict[str, Any] = {"verb": "make"}
    while call:
        verb = call.pop("verb")
        try:
            # In real time: what sleeps is as slow as what computes.
            signal.setitimer(signal.ITIMER_REAL, setup["make_s" if verb == "make" else "call_s"])
            if verb == "make":
                library = _make(load("library", target, LIBRARIES), setup["options"])
                answer: dict[str, Any] = {"answer": {}}
            else:
                answer = {"answer": getattr(library, verb)(**call) or {}}
        except Exception as error:  # a library's own code: its parent types it
            answer = {"error": str(error), "kind": _kind(error)}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        answers.write(json.dumps(answer) + "\n")
        call = json.loads(sys.stdin.readline() or "{}")


def _make(library: Callable[..., Library], options: Mapping[str, Any]) -> Library:
    try:
        inspect.signature(library).bind(**options)
    except TypeError as error:
        raise UsageError(f"options of {library.__name__}: {error}") from error
    return library(**options)


def _kind(error: Exception) -> str:
    if isinstance(error, UsageError):
        return "usage"
    if isinstance(error, EnvironmentFailed):
        return error.code
    return type(error).__name__


def _limit(memory_mb: int) -> None:
    with suppress(ValueError, OSError):  # not every system can
        resource.setrlimit(resource.RLIMIT_AS, (memory_mb * 2**20, memory_mb * 2**20))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _too_slow(*_: Any) -> NoReturn:
    raise EnvironmentFailed("too_slow", "it took longer than a call may")


if __name__ == "__main__":
    main()
