"""Brings the local stack up and down: a real Kafka and a real schema registry.

A state folder has one stack, a lock for all changes to it, and `stack.json`, which says what runs.
That is written as soon as a process has started, so the next `up` or `down` knows what a killed one
left.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import DependencyError, HeadraceError
from headrace.infra.local import detached as processes
from headrace.infra.local import registry_server as registry
from headrace.infra.local import stack_record as record
from headrace.infra.local.detached import Interrupts, ProcessId
from headrace.infra.local.security.stack_secrets import FOLDER, remove_secrets
from headrace.infra.local.start import Start
from headrace.infra.local.stop import take_down
from headrace.services.base.files import private_folder

_LOCK_BOUND_S = 900.0  # the first `up` with a slow network
_HELD_BOUND_S = 11.0  # a service exits by force after 10 s


@dataclass(frozen=True, slots=True)
class LocalStack:
    """A running stack."""

    bootstrap_servers: str
    registry_url: str  # with the path of the Confluent-compatible API
    kafka_pid: int
    registry_pid: int
    state: Path
    owner_pid: int | None  # it ends with this process; None means that it stays until `down`
    credentials: Path | None = None  # the folder of credentials of a secure stack
    valid_until: float | None = None  # when its certificates end, in Unix seconds


def up(
    state: Path,
    *,
    on_progress: Callable[[str], None] = lambda _: None,
    kafka_port: int | None = None,
    registry_port: int | None = None,
    owner_pid: int | None = None,
    cancelled: Callable[[], bool] = lambda: False,
    record_archives: bool = False,
    lasting: bool = False,
    roles: Sequence[str] = (),
) -> LocalStack:
    """Finds the stack of `state`, or starts the servers that are missing, with their old data.

    `on_progress` receives one line at a time, from several threads. If a port is None, the server
    uses the port that it had, else the usual one (9092, 8081), else a free one; 0 leaves the usual
    one out. A stack that this call starts ends when the process `owner_pid` ends, even if that is
    killed. A stack that already runs keeps its owner. With `record_archives`, servers without a
    start-up archive start slower, and write one when they end, which takes seconds. A Kafka that is
    `lasting` optimizes its code, which pays after some minutes. With `roles`, the servers accept
    only clients that authenticate: each role gets credentials, and so does the administrator.
    Without them, the stack is as secure as it was at its last start.

    Raises UsageError if a given port is taken, the stack runs and is not secure, or an extra is not
    installed, DependencyError if jars can't be fetched or a server does not start, Cancelled once
    `cancelled()` is true, and KeyboardInterrupt after Ctrl-C. Then it ends all that it has started.
    """
    state = state.resolve()
    for folder in (state, state / "logs"):
        private_folder(folder)
    owner = None if owner_pid is None else ProcessId.of(owner_pid)
    if owner_pid is not None and owner is None:
        raise HeadraceError(f"process {owner_pid}, which is to own the local stack, does not run")
    asked: record.Ports = {"kafka": kafka_port, "registry": registry_port}
    interrupts = Interrupts()

    def interrupted() -> bool:
        return interrupts.noted or cancelled()

    start = Start(state, on_progress, asked, owner, interrupted, roles, record_archives, lasting)
    try:
        with interrupts, processes.locked(state / "stack.lock", _LOCK_BOUND_S, interrupted):
            start.run()
            found = _describe(state, start.stack)
        if found is None:
            raise DependencyError(
                f"the local stack ended right after its start: see {state / 'logs'}"
            )
        return found
    except KeyboardInterrupt:
        if start.missing:  # Ctrl-C came after all servers had started
            with processes.locked(state / "stack.lock", _LOCK_BOUND_S):
                start.undo()
        raise


def find(state: Path) -> LocalStack | None:
    """Returns the stack of `state`, or None if a server does not run. Changes nothing."""
    state = state.resolve()
    return _describe(state, record.load(state))


def down(
    state: Path, *, wipe: bool = False, on_progress: Callable[[str], None] = lambda _: None
) -> bool:
    """Ends the stack of `state`, and deletes its data if `wipe`. Returns whether a server ran.

    Raises DependencyError if a process can't be ended.
    """
    state = state.resolve()
    if not state.exists():
        return False
    with processes.locked(state / "stack.lock", _LOCK_BOUND_S):
        ran = take_down(state, record.load(state), on_progress)
        if wipe:
            for folder in ("kafka", "kafka-format", "registry", "logs"):
                shutil.rmtree(state / folder, ignore_errors=True)
            (state / "kafka.properties").unlink(missing_ok=True)
            remove_secrets(state, forget=True)
        return ran


def hold(state: Path) -> None:
    """Lets the stack of `state` run until this process ends, at most 11 s after its owner's end.

    So the owner's children can write their last records and leave in order.
    """
    processes.share(_holders(state.resolve()))


def down_abandoned(state: Path, owner: ProcessId) -> None:
    """Ends the stack after its `owner` has ended, unless it has another owner now."""
    with processes.locked(state / "stack.lock", _LOCK_BOUND_S):
        stack = record.load(state)
        if stack.owner == owner:
            with (
                contextlib.suppress(DependencyError),
                processes.locked(_holders(state), _HELD_BOUND_S),
            ):
                pass
            take_down(state, stack)


def _holders(state: Path) -> Path:
    return state / "holders.lock"


def _describe(state: Path, stack: record.Stack) -> LocalStack | None:
    broker, schemas = stack.servers.get("kafka"), stack.servers.get("registry")
    if not (broker and schemas and broker.serves and schemas.serves):
        return None
    secure = stack.valid_until is not None
    return LocalStack(
        bootstrap_servers=f"127.0.0.1:{broker.port}",
        registry_url=f"{'https' if secure else 'http'}://127.0.0.1:{schemas.port}{registry.PATH}",
        kafka_pid=broker.process.pid,
        registry_pid=schemas.process.pid,
        state=state,
        owner_pid=stack.owner.pid if stack.owner else None,
        credentials=state / FOLDER if secure else None,
        valid_until=stack.valid_until,
    )
