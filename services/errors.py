"""Every error that Headrace raises on purpose.

    HeadraceError                  exit 1
    ├── UsageError                 exit 2    a wrong flag, a wrong recipe
    ├── CheckFailed                exit 3    `--check` does not hold
    ├── Interrupted                exit 130  Ctrl-C or SIGTERM ended the run
    ├── RecordsLost                exit 4    records that are needed were deleted from the log
    ├── DependencyError            exit 75   broker, registry or blob store out of reach: restart me
    │   └── Fenced                 exit 75   another process has taken over this writer
    ├── BlobError                            a blob is absent, or its bytes are not what it's called
    ├── EnvironmentFailed                    an environment does what it must not; never a reward
    └── InfrastructureError                  an environment or engine broke; never a reward
    ValueError
    └── DecodeError                          bytes that are no event: dead-lettered, never raised on
                                             (of `schemas`, which knows nothing of services)

An error says what was wrong, where, and what to do.
"""

from __future__ import annotations

from schemas.errors import DecodeError

__all__ = [
    "BlobError",
    "CheckFailed",
    "DecodeError",
    "DependencyError",
    "EnvironmentFailed",
    "Fenced",
    "HeadraceError",
    "InfrastructureError",
    "Interrupted",
    "RecordsLost",
    "UsageError",
]


class HeadraceError(Exception):
    """Something failed that a person can understand from the message."""

    exit_code = 1


class UsageError(HeadraceError):
    """The command line or the recipe is wrong."""

    exit_code = 2


class CheckFailed(HeadraceError):
    """The run ended, and what `--check` demanded does not hold."""

    exit_code = 3


class Interrupted(HeadraceError):
    """Ctrl-C, or SIGTERM: the run was ended in order before its stop rule held."""

    exit_code = 130


class RecordsLost(HeadraceError):
    """Records that are needed are gone from the log: a restart does not bring them back."""

    exit_code = 4


class DependencyError(HeadraceError):
    """The broker, the registry or the blob store can't be reached. A restart may help."""

    exit_code = 75


class Fenced(DependencyError):
    """Another process holds this writer's `transactional.id` now: this one must end."""


class BlobError(HeadraceError):
    """A blob is absent from the store, or its content does not have the digest it is named by."""


class EnvironmentFailed(HeadraceError):
    """An environment's own fault, as an answer that is none: tried again, never rewarded."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class InfrastructureError(HeadraceError):
    """What failed is neither the policy's doing nor the task's: it is retried, never rewarded."""

    def __init__(self, code: str, message: str = "", *, retryable: bool = True) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code
        self.message = message
        self.retryable = retryable
