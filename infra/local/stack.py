"""Brings the local stack up and down: a real Kafka and a real schema registry.

One stack a state folder. All changes are made under a lock in it, and what runs is in its
`stack.json`, written before anything is waited for: whatever is killed, the next `up` or `down`
knows what is left.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.errors import DependencyError, HeadraceError
from headrace.infra.local import detached as processes
from headrace.infra.local import registry_server as registry
from headrace.infra.local import stack_record as record
from headrace.infra.local.detached import Interrupts, ProcessId
from headrace.infra.local.start import Start
from headrace.infra.local.stop import take_down

_LOCK_BOUND_S = 900.0  # a cold `up` over a slow line
_HELD_BOUND_S = 11.0  # a service ends by force after 10 s


@dataclass(frozen=True, slots=True)
class LocalStack:
    """A running stack."""

    bootstrap_servers: str
    registry_url: str  # the Confluent-compatible root, path included
    kafka_pid: int
    registry_pid: int
    state: Path
    owner_pid: int | None  # the process that it ends with; None: it stays until `down`


def up(
    state: Path,
    *,
    on_progress: Callable[[str], None] = lambda _: None,
    kafka_port: int | None = None,
    registry_port: int | None = None,
    owner_pid: int | None = None,
    cancelled: Callable[[], bool] = lambda: False,
) -> LocalStack:
    """Find the stack of `state`, or start what is missing of it, on the data of the last one.

    `on_progress` gets a line at a time, from several threads. A port of None is the one it had,
    the usual one (9092, 8081) or a free one. With `owner_pid` a stack started here ends when that
    process does, however it does; one found running keeps the owner it has, or none.

    Raises UsageError if an asked port is taken or the extra isn't installed, DependencyError if
    jars can't be fetched or a server doesn't start, Cancelled once `cancelled()` is true, and
    KeyboardInterrupt after Ctrl-C. Then nothing is left that was started here.
    """
    state = state.resolve()
    for folder in (state, state / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
    owner = _find_owner(owner_pid)
    asked: Mapping[record.ServerName, int | None] = {
        "kafka": kafka_port,
        "registry": registry_port,
    }
    interrupts = Interrupts()

    def interrupted() -> bool:
        return interrupts.noted or cancelled()

    start = Start(state, on_progress, asked, owner, interrupted)
    try:
        with interrupts, processes.locked(state / "stack.lock", _LOCK_BOUND_S, interrupted):
            start.run()
            found = _describe(state, start.stack)
        if found is None:
            raise DependencyError(
                f"the local stack ended right after its start; see {state / 'logs'}"
            )
        return found
    except KeyboardInterrupt:
        if start.missing:  # it came after all was up
            with processes.locked(state / "stack.lock", _LOCK_BOUND_S):
                start.undo()
        raise


def find(state: Path) -> LocalStack | None:
    """The stack of `state` if all of it runs, else None. Starts and changes nothing."""
    state = state.resolve()
    return _describe(state, record.load(state))


def down(
    state: Path, *, wipe: bool = False, on_progress: Callable[[str], None] = lambda _: None
) -> bool:
    """End the stack of `state`, and with `wipe` delete its data. Whether anything ran.

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
        return ran


def hold(state: Path) -> None:
    """Keep the stack of `state` up after its owner's death until this process has ended, too.

    For at most 11 s: so that the owner's children write what they have to, and leave in order.
    """
    processes.share(_holders(state.resolve()))


def down_abandoned(state: Path, owner: ProcessId) -> None:
    """What the guard does once `owner` has ended: `down`, unless the stack is another's by now."""
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


def _find_owner(pid: int | None) -> ProcessId | None:
    if pid is None:
        return None
    owner = ProcessId.of(pid)
    if owner is None:
        raise HeadraceError(f"no process {pid} to own the local stack")
    return owner


def _describe(state: Path, stack: record.Stack) -> LocalStack | None:
    broker, schemas = stack.servers.get("kafka"), stack.servers.get("registry")
    if not (broker and schemas and broker.serves and schemas.serves):
        return None
    return LocalStack(
        bootstrap_servers=f"127.0.0.1:{broker.port}",
        registry_url=f"http://127.0.0.1:{schemas.port}{registry.PATH}",
        kafka_pid=broker.process.pid,
        registry_pid=schemas.process.pid,
        state=state,
        owner_pid=stack.owner.pid if stack.owner else None,
    )
