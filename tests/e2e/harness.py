"""Headrace as its users run it: real processes, watched through the log, and all ended after.

Who wrote a record stands in its `ce_source`: `<service>-<host>-<pid>`. So the log itself tells
that a replacement is at work, and since when; nothing is polled.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from headrace.schemas.topics import Topics
from headrace.services.kafka.broker import Record
from headrace.services.kafka.client_settings import KafkaSettings
from headrace.services.kafka.kafka_broker import KafkaBroker
from headrace.services.namespace.cluster_config import ClusterConfig
from tests.following import Follower

LIMIT_S = 400.0
"""No test takes longer, whatever happens."""
BOUND_S = 120.0
"""How long a test waits for one thing. On a quiet machine all come within seconds."""
ENDED_S = 15.0
"""What a run leaves behind must have ended by itself within this time."""
RECIPES = Path(__file__).parent / "recipes"


def run_bounded(test: Coroutine[Any, Any, None], limit_s: float = LIMIT_S) -> None:
    """Runs an asynchronous test. TimeoutError where it does not end in time."""

    async def main() -> None:
        async with asyncio.timeout(limit_s):
            await test

    asyncio.run(main())


def arguments_of(recipe: Path, place: ClusterConfig) -> tuple[str, ...]:
    """Of `headrace`: runs a recipe in a namespace on the stack that is there."""
    cluster = (place.namespace, place.bootstrap_servers, place.registry_url)
    options = ("--namespace", "--bootstrap-servers", "--registry-url")
    named = [word for pair in zip(options, cluster, strict=True) for word in map(str, pair)]
    return ("run", str(recipe), "--state", str(place.state), *named)


@dataclass(frozen=True)
class Written:
    """A record, and who wrote it: no service and pid 0 where no worker did."""

    topic: str
    """Its short name: `results`, `batches.default`."""
    partition: int
    key: bytes
    service: str
    pid: int
    at: float
    """Epoch seconds, by the writer's clock."""


@dataclass
class LogWatch(Follower):
    """All that is written to a namespace from the beginning on."""

    namespace: str
    written: list[Written] = field(default_factory=list)

    async def on_record(self, record: Record) -> None:
        """Keeps who wrote it."""
        self.written.append(_written(record, self.namespace))

    async def until(self, holds: Callable[[], bool], what: str, bound_s: float = BOUND_S) -> None:
        """Waits until `holds`, which is asked after every read. AssertionError after `bound_s`."""
        assert await self.comes_true(holds, bound_s), f"not within {bound_s:g} s: {what}"

    async def count(self, topic: str, number: int, bound_s: float = BOUND_S) -> None:
        """Waits until a topic holds `number` records."""
        await self.until(
            lambda: self.counted(topic) >= number, f"{number} records in {topic}", bound_s
        )

    async def more(self, topic: str, number: int, bound_s: float = BOUND_S) -> None:
        """Waits until a topic holds `number` records more than now."""
        await self.count(topic, self.counted(topic) + number, bound_s)

    async def first_by(self, service: str, pids: set[int], bound_s: float = BOUND_S) -> Written:
        """Waits for the first record of a service's process that is none of `pids`."""

        def found() -> Written | None:
            return next(
                (one for one in self.written if one.service == service and one.pid not in pids),
                None,
            )

        what = f"a record by a new process of {service}"
        await self.until(lambda: found() is not None, what, bound_s)
        first = found()
        assert first is not None
        return first

    async def at_work(self, service: str, processes: int, bound_s: float = BOUND_S) -> None:
        """Waits until so many processes of a service have written something."""

        def holds() -> bool:
            return len({one.pid for one in self.written if one.service == service}) >= processes

        await self.until(holds, f"{processes} processes of {service} at work", bound_s)

    def of(self, topic: str) -> list[Written]:
        """Records of a topic so far."""
        return [one for one in self.written if one.topic == topic]

    def counted(self, topic: str) -> int:
        """How many they are."""
        return len(self.of(topic))

    def tasks_open(self) -> int:
        """Tasks submitted that have not ended."""
        return self.counted("tasks") - len({one.key for one in self.of("results")})

    def writers(self, topic: str, since: float = 0.0) -> dict[int, set[int]]:
        """Pids of the writers of each partition of a topic that were at work since then."""
        found: dict[int, set[int]] = {}
        for one in self.of(topic):
            if one.at >= since:
                found.setdefault(one.partition, set()).add(one.pid)
        return found


def _written(record: Record, namespace: str) -> Written:
    source = next(text.decode() for name, text in record.headers if name == "ce_source")
    service, worker, pid = source.rpartition(f"-{socket.gethostname()}-")
    topic = record.partition.topic.removeprefix(f"{namespace}.").removesuffix(".v1")
    key = record.key or b""
    return Written(
        topic, record.partition.number, key, service, int(pid) if worker else 0, record.timestamp
    )


@asynccontextmanager
async def watching(bootstrap_servers: str, topics: Topics) -> AsyncIterator[LogWatch]:
    """Watches a namespace, which must be there."""
    watch = LogWatch(topics.namespace)
    broker = KafkaBroker(KafkaSettings(bootstrap_servers, "watch"))
    following = watch.follow(broker, topics)
    try:
        yield watch
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await broker.close()


@dataclass
class Command:
    """A `headrace` command as a process, with what it says on stderr."""

    process: asyncio.subprocess.Process
    lines: list[str] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    async def says(self, text: str, bound_s: float = BOUND_S) -> None:
        """Waits for a line that holds `text`."""
        async with asyncio.timeout(bound_s):
            while not any(text in line for line in self.lines):
                if self.process.returncode is not None:
                    raise AssertionError(f"ended before it said {text!r}:\n{self.said}")
                self._news.clear()
                await self._news.wait()

    async def ends(self, bound_s: float) -> int:
        """Waits for its end. The exit code."""
        try:
            return await asyncio.wait_for(self.process.wait(), bound_s)
        except TimeoutError:
            raise AssertionError(f"still running after {bound_s:g} s:\n{self.said}") from None

    @property
    def said(self) -> str:
        """Its last lines."""
        return "\n".join(self.lines[-40:])

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends it a signal."""
        self.process.send_signal(number)

    async def read(self) -> None:
        """Keeps what it says, to its end."""
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.lines.append(line.decode(errors="replace").rstrip())
            self._news.set()
        await self.process.wait()
        self._news.set()


@asynccontextmanager
async def headrace(*arguments: str) -> AsyncIterator[Command]:
    """Runs a command beside the test; kills it, should it still run at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        # Ctrl-C at the terminal is for pytest, which ends what it began.
        start_new_session=True,
    )
    command = Command(process)
    reading = asyncio.create_task(command.read())
    try:
        yield command
    except BaseException:
        print(command.said)
        if "--state" in arguments:
            print_logs(Path(arguments[arguments.index("--state") + 1]))
        raise
    finally:
        if process.returncode is None:
            process.kill()
        await reading


def print_logs(state: Path, lines: int = 20) -> None:
    """Prints the last lines of each process's log: what a failed test leaves to look at."""
    for log in sorted(state.glob("**/logs*/*.log")):
        last = log.read_text(errors="replace").splitlines()[-lines:]
        print(f"--- {log.relative_to(state)}", *(line[:400] for line in last), sep="\n")


async def headrace_done(*arguments: str, bound_s: float = BOUND_S) -> None:
    """Runs a command to its end, which must be exit code 0."""
    async with headrace(*arguments) as command:
        assert await command.ends(bound_s) == 0, command.said


def processes_of(state: Path, *command: str) -> list[psutil.Process]:
    """Processes whose command line names the state folder, but for this one.

    With `command`, only those of this headrace command, such as `"serve", "agent"`.
    """
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it ended meanwhile
            line = process.cmdline()
            named = any(str(state) in argument for argument in line)
            meant = not command or tuple(line[3 : 3 + len(command)]) == command
            if named and meant and process.pid != os.getpid():
                found.append(process)
    return found


def child_of(state: Path, service: str) -> psutil.Process:
    """The one process of a service that serves from this state folder."""
    found = processes_of(state, "serve", service)
    assert len(found) == 1, f"{len(found)} processes of {service}"
    return found[0]


def preloader_of(state: Path) -> psutil.Process:
    """The preloader from which a run's services are forked."""
    (found,) = processes_of(state, "preload")
    return found


def gone(state: Path, bound_s: float = ENDED_S) -> float:
    """Waits until nothing names the state folder any more. Seconds it took."""
    began = time.monotonic()
    _, left = psutil.wait_procs(processes_of(state), timeout=bound_s)
    left += processes_of(state)
    assert not left, f"still running after {bound_s:g} s: {[one.cmdline() for one in left]}"
    return time.monotonic() - began


def end_all_of(state: Path) -> None:
    """Ends what a failed test left: only what names its own state folder."""
    for process in processes_of(state):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@contextmanager
def usual_ports_taken(ports: Sequence[int] = (9092, 8081)) -> Iterator[None]:
    """Makes a local stack that starts meanwhile take free ports: others start theirs, too."""
    with contextlib.ExitStack() as held:
        for port in ports:
            listener = held.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # another has it: just as good
                listener.bind(("127.0.0.1", port))
                listener.listen()
        yield


def kill(pid: int) -> None:
    """kill -9, and no return before it is gone."""
    process = psutil.Process(pid)
    process.kill()
    process.wait(10)
