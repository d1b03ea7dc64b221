"""One call of `up`: fetches and starts the missing servers of a stack at the same time."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.errors import DependencyError, UsageError
from headrace.infra.local import detached as processes
from headrace.infra.local import jars
from headrace.infra.local import java_runtime as runtime
from headrace.infra.local import kafka_server as kafka
from headrace.infra.local import registry_server as registry
from headrace.infra.local import stack_record as record
from headrace.infra.local.detached import Cancelled, ProcessId
from headrace.infra.local.security import stack_secrets as secrets
from headrace.infra.local.security.stack_secrets import require_valid
from headrace.infra.local.stop import STOP_BOUND_S, stop_servers, take_down
from headrace.services.base.files import describe_log

_READY_BOUND_S = 120.0  # a broker that was killed first reads its newest segments
_READY_POLL_S = 0.02
_CANCEL_POLL_S = 0.05
_PORT_ATTEMPTS = 3
_PORT_TAKEN = (b"Address already in use", b"seems to be in use")
"""What Kafka and the registry log if another process has taken the port."""


@dataclass(frozen=True, slots=True)
class ServerKind:
    """What differs between the two servers."""

    title: str
    version: str
    usual_port: int
    heap: tuple[str, ...]
    class_path: Callable[[jars.Pins, Path], tuple[Path, ...]]
    fetch: Callable[[jars.Pins, Path, Callable[[str], None], threading.Event], jars.Jars]
    command: Callable[[runtime.JavaRuntime, Path, int, bool], list[str]]
    """Takes the runtime, the state folder, the port, and whether the stack is secure."""
    is_ready: Callable[[Path, int, Path | None], bool]
    """Takes the log, the port, and the authority of a secure stack."""


KINDS: dict[record.ServerName, ServerKind] = {
    "kafka": ServerKind(
        "Kafka", jars.KAFKA_VERSION, 9092, kafka.HEAP, jars.kafka_class_path, jars.kafka_jars,
        lambda run, state, port, secure: kafka.command(
            run, state, port, processes.free_port(port), secure=secure
        ),
        lambda log, *_: kafka.is_ready(log),
    ),
    "registry": ServerKind(
        "the registry", jars.REGISTRY_VERSION, 8081, registry.HEAP, jars.registry_class_path,
        jars.registry_jars,
        lambda run, state, port, secure: registry.command(run, state, port, secure=secure),
        registry.is_ready,
    ),
}  # fmt: skip


@dataclass
class Start:
    """The state of one call. Use it once, while the state folder is locked."""

    state: Path
    on_progress: Callable[[str], None]
    asked: record.Ports
    owner: ProcessId | None
    interrupted: Callable[[], bool]  # only the thread of `run` calls it
    roles: Sequence[str] = ()  # who gets credentials for a secure stack; none: it is as it was
    records: bool = False  # whether it records the start-up archives that are missing
    lasting: bool = False  # whether Kafka optimizes its code
    stack: record.Stack = record.NOTHING
    missing: list[record.ServerName] = field(default_factory=list)
    changing: threading.Lock = field(default_factory=threading.Lock)
    cancelled: threading.Event = field(default_factory=threading.Event)  # stops the threads
    cache: Path = field(default_factory=jars.cache_folder)
    java: Path = field(default_factory=jars.java)  # if it is missing, nothing has been fetched yet

    def run(self) -> None:
        """Starts the missing servers. If that fails, ends all that it has started.

        Raises Cancelled once `interrupted()` is true.
        """
        if self.interrupted():
            raise Cancelled
        self.stack = record.load(self.state)
        self._refuse_other_ports()
        self._settle_secrets()
        missing = [name for name in KINDS if not self._serves(name)]
        self._settle_owner(fresh=len(missing) == len(KINDS))
        if missing:
            self.missing = missing
            try:
                self._start_all()
            except BaseException:  # Whatever the reason is, no process may be left behind.
                self.undo()
                raise

    def _serves(self, name: record.ServerName) -> bool:
        server = self.stack.servers.get(name)
        return server is not None and server.serves

    def _settle_secrets(self) -> None:
        """Decides whether the stack is secure. If it is, makes what is missing for that."""
        until = self.stack.valid_until
        if not any(map(self._serves, KINDS)):
            roles = self.roles or secrets.secure_roles(self.state)
            until = secrets.keep_secrets(self.state, roles) if roles else None
        elif until is None and self.roles:
            raise UsageError(
                f"the local stack of {self.state} runs without certificates: stop it first with "
                "`headrace down`"
            )
        require_valid(until, self.state)
        self._save(replace(self.stack, valid_until=until))

    @property
    def _secure(self) -> bool:
        return self.stack.valid_until is not None

    def _refuse_other_ports(self) -> None:
        for name, port in self.asked.items():
            server = self.stack.servers.get(name)
            if port and server and server.serves and server.port != port:
                raise UsageError(
                    f"{KINDS[name].title} of {self.state} already runs on port {server.port}, "
                    f"not on {port}: stop it first with `headrace down`"
                )

    def _settle_owner(self, *, fresh: bool) -> None:
        """Decides whose stack this is from now on. If it has an owner, a guard watches that."""
        owner = self.stack.owner
        if fresh or (owner and not owner.alive):
            owner = self.owner
        guard = self.stack.guard
        if guard and owner != self.stack.owner:
            processes.stop([guard], STOP_BOUND_S)
        if owner is None:
            guard = None
        elif guard is None or not guard.alive:
            # Start the guard before any server, so that no server can outlive the owner.
            log = self.state / "logs" / "guard.log"
            command = [sys.executable, "-m", __package__, str(self.state)]
            guard = processes.spawn([*command, str(owner.pid), owner.started], log=log)
        self._save(replace(self.stack, owner=owner, guard=guard))

    def _start_all(self) -> None:
        with ThreadPoolExecutor(len(self.missing), thread_name_prefix="up") as pool:
            futures = [pool.submit(self._start, name) for name in self.missing]
            try:
                self._wait_for(futures)
            finally:
                self.cancelled.set()
        if self.interrupted():
            raise Cancelled
        failures = [failure for future in futures if (failure := future.exception())]
        # Raise the cause first: the other start was only cancelled because of it.
        for failure in sorted(failures, key=lambda failure: isinstance(failure, Cancelled)):
            raise failure

    def _wait_for(self, futures: Sequence[Future[None]]) -> None:
        """Returns when all are done, one has failed, or the start was interrupted."""
        while not self.interrupted():
            done, running = wait(futures, timeout=_CANCEL_POLL_S, return_when=FIRST_EXCEPTION)
            if not running or any(future.exception() for future in done):
                return

    def undo(self) -> None:
        """Ends what this call has started, and nothing else. The caller must hold the lock."""
        self.stack = record.load(self.state)
        servers = self.stack.servers
        others = {name: server for name, server in servers.items() if name not in self.missing}
        stop_servers([servers[name] for name in self.missing if name in servers])
        if others:
            self._save(replace(self.stack, servers=others))
        else:
            take_down(self.state, replace(self.stack, servers={}))
        self.missing = []

    def _save(self, stack: record.Stack) -> None:
        self.stack = stack
        record.save(self.state, stack)

    def _put(self, name: record.ServerName, server: record.Server) -> None:
        with self.changing:
            self._save(replace(self.stack, servers=self.stack.servers | {name: server}))

    def _clear(self, name: record.ServerName) -> Path:
        """Ends what a killed `up` left half started. Renames the old log and returns a new one."""
        left = self.stack.servers.get(name)
        if left:
            stop_servers([left])
        log = self.state / "logs" / f"{name}.log"
        if log.exists():
            log.replace(log.with_name(f"{name}.previous.log"))
        log.touch()
        folder = self.state / "tmp" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return log

    def _start(self, name: record.ServerName) -> None:
        """Fetches and starts one server, and waits until it serves.

        If another process takes a port meanwhile, it tries another port.
        """
        kind = KINDS[name]
        found = kind.fetch(jars.load_pins(), self.cache, self.on_progress, self.cancelled)
        run = runtime.prepare(
            name, self.java, found.class_path, kind.heap, self.cache,
            may_record=self.records, lasting=self.lasting and name == "kafka",
        )  # fmt: skip
        log = self._clear(name)
        if name == "kafka":
            kafka.format_log(run, self.state, log, self.cache, self.cancelled)
        fixed = self._fixed_port(name)
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            port = self._choose_port(name, fixed)
            if self.cancelled.is_set():
                raise Cancelled
            self.on_progress(f"starting {kind.title} {kind.version} on port {port}")
            command = kind.command(run, self.state, port, self._secure)
            process = processes.spawn(command, log=log, folder=self.state)
            server = record.Server(
                process, kind.version, port, ready=False, recording=run.recording
            )
            self._put(name, server)
            try:
                self._wait_until_ready(kind, server, log)
            except DependencyError:
                lost = not process.alive and _lost_port(log, port)
                movable = fixed is None or processes.port_is_free(fixed)
                if not (lost and movable) or attempt == _PORT_ATTEMPTS:
                    raise
                continue
            self._put(name, replace(server, ready=True))
            return

    def _fixed_port(self, name: record.ServerName) -> int | None:
        """Returns the port that was asked for, or that clients of the other server already know."""
        last = self.stack.servers.get(name)
        if self.asked[name] is None and last and last.ready and any(map(self._serves, KINDS)):
            return last.port
        return self.asked[name] or None

    def _choose_port(self, name: record.ServerName, fixed: int | None) -> int:
        if fixed is not None:
            if not processes.port_is_free(fixed):
                raise UsageError(
                    f"port {fixed}, wanted for {KINDS[name].title}, is taken by another process: "
                    "end that process, or stop the stack with `headrace down` and give another port"
                )
            return fixed
        last = self.stack.servers.get(name)
        usual = [] if self.asked[name] == 0 else [KINDS[name].usual_port]
        for port in (*([last.port] if last else []), *usual):
            if processes.port_is_free(port):
                return port
        return processes.free_port()

    def _wait_until_ready(self, kind: ServerKind, server: record.Server, log: Path) -> None:
        deadline = time.monotonic() + _READY_BOUND_S
        authority = self.state / secrets.FOLDER / "ca.pem" if self._secure else None
        while not kind.is_ready(log, server.port, authority):
            if not server.process.alive:
                raise DependencyError(f"{kind.title} ended while it started; {describe_log(log)}")
            if time.monotonic() > deadline:
                raise DependencyError(
                    f"{kind.title} did not start within {_READY_BOUND_S:.0f} s; {describe_log(log)}"
                )
            if self.cancelled.wait(_READY_POLL_S):
                raise Cancelled


def _lost_port(log: Path, port: int) -> bool:
    """Returns whether a server ended because `port`, or the port of its controller, is taken."""
    said = log.read_bytes()
    return not processes.port_is_free(port) or any(words in said for words in _PORT_TAKEN)
