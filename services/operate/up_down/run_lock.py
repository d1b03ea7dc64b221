"""Which runs this machine runs now: each `headrace run` holds a lock in the folder of its run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from headrace.errors import DependencyError, UsageError
from headrace.infra.local.detached import locked

_LOCK = "run.lock"


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Holds the run whose files are in `folder`.

    Raises UsageError if another process of this machine holds it: two would start each service
    twice, and each would end the other's sole writers.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / _LOCK, 0.0))
        except DependencyError as error:
            raise UsageError(
                f"another `headrace run` runs the namespace {folder.name} now. Follow it with "
                "`headrace dashboard`, or start another run with --namespace"
            ) from error
        yield


def find_running(state: Path) -> list[str]:
    """Returns the namespaces whose runs with files in `state` run now."""
    return [lock.parent.name for lock in sorted(state.glob(f"*/{_LOCK}")) if _is_held(lock)]


def _is_held(lock: Path) -> bool:
    try:
        with locked(lock, 0.0):
            return False
    except DependencyError:
        return True
