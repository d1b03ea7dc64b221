"""Every error that Headrace raises on purpose.

    HeadraceError                  exit 1
    ├── UsageError                 exit 2    a flag or the recipe is wrong
    ├── CheckFailed                exit 3    what `--check` demands is not true
    ├── RecordsLost                exit 4    records that are needed were deleted from the log
    ├── DependencyError            exit 75   no broker, registry or blob store; restart
    │   └── Fenced                 exit 75   a newer process is this writer now
    ├── Interrupted                exit 130  Ctrl-C or SIGTERM ended the work early
    ├── BlobError                            a blob is absent, or its bytes do not match its digest
    ├── EnvironmentFailed                    an environment violated its contract; never a reward
    └── InfrastructureError                  an environment or engine broke; never a reward
    ValueError
    ├── DecodeError                          bytes that are not an event; dead-lettered
    │   └── UnknownSchema                    the writer's schema must be fetched first
    └── TooLarge                             an event is larger than a record may be

An error says what happened, to what, and what to do next.
"""

from __future__ import annotations

from pathlib import Path


class HeadraceError(Exception):
    """The base of errors whose message tells a person what failed."""

    exit_code = 1


class UsageError(HeadraceError):
    """The command line or the recipe is wrong."""

    exit_code = 2


class CheckFailed(HeadraceError):
    """The run ended, and what `--check` demanded is not true."""

    exit_code = 3


class RecordsLost(HeadraceError):
    """Records that are needed were deleted from the log. A restart does not bring them back."""

    exit_code = 4


class DependencyError(HeadraceError):
    """The broker, the registry or the blob store does not answer. A restart may help."""

    exit_code = 75


class Fenced(DependencyError):
    """Another process has this writer's `transactional.id` now, so this process must end."""


class Interrupted(HeadraceError):
    """Ctrl-C or SIGTERM ended a run or a replay before it was finished."""

    exit_code = 130


class BlobError(HeadraceError):
    """A blob is absent from the store, or its content does not have the digest in its name."""


class DamagedBlob(BlobError):
    """A blob's content does not have the digest in its name. `path` is the file that has it."""

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


class EnvironmentFailed(HeadraceError):
    """An environment violated its contract, for example with an invalid answer.

    The episode is retried, never rewarded.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class InfrastructureError(HeadraceError):
    """The environment or engine failed, not the policy. The episode is retried, never rewarded."""

    def __init__(self, code: str, message: str = "", *, retryable: bool = True) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.code = code
        self.message = message
        self.retryable = retryable


class DecodeError(ValueError):
    """A record's bytes are not an event of its topic. Has the bytes, for the dead letter."""

    def __init__(self, reason: str, value: bytes | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.value = value


class UnknownSchema(DecodeError):
    """The writer's schema is not in the codec: fetch it, `add_schema` it, and decode again."""

    def __init__(self, schema_id: int, value: bytes) -> None:
        super().__init__(f"the schema with id {schema_id} is not known", value)
        self.schema_id = schema_id


class TooLarge(ValueError):
    """An event is larger than MAX_RECORD_BYTES. Large data belongs in the blob store."""
