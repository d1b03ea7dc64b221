"""Rollouts through PipelineRL's own stream on Redis, beside the benchmark `trajectories`.

Groups of 8 samples with 1,024 sampled tokens and their logprobs go from a producer process over
Redis to a consumer process. Stream classes and samples are PipelineRL's own, imported from a
checkout; what one record is follows its actor. Nothing is trained, and nothing is sampled.

It needs no Headrace: it runs in a Python that has PipelineRL's packages. See ../peers.md.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import multiprocessing
import os
import pickle
import platform
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

GROUP = 8
TOKENS, VOCABULARY = 1024, 256
DISTINCT = 64
WARM_UP = 1024
"""Samples, in each setting."""

BOUND_S = 300.0
START_S = 30.0
SIGNALS = (signal.SIGINT, signal.SIGTERM)
PERSISTENCE = {
    "memory": ("--appendonly", "no"),
    "everysec": ("--appendonly", "yes", "--appendfsync", "everysec"),
    "always": ("--appendonly", "yes", "--appendfsync", "always"),
}
PROCESSES = ("producer", "redis", "consumer")


@dataclass(frozen=True, slots=True)
class Options:
    """What both processes of a setting must agree on."""

    checkout: str
    port: int


@dataclass(frozen=True, slots=True)
class Work:
    """One process's part of a run, by the clock and in CPU seconds."""

    began: float
    ended: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Run:
    """One run: its length, and CPU milliseconds a sample by process."""

    samples: int
    seconds: float
    cpu_ms: dict[str, float]

    @property
    def rate(self) -> float:
        """Samples a second."""
        return self.samples / self.seconds

    @property
    def total_ms(self) -> float:
        """CPU milliseconds a sample, of all processes."""
        return sum(self.cpu_ms.values())


def import_from(checkout: str, module: str) -> Any:
    """A module of PipelineRL, which is nowhere installed."""
    # This script has the package's name, so the script's folder must not be searched.
    here = Path(__file__).resolve().parent
    others = [name for name in sys.path if name != checkout and Path(name).resolve() != here]
    sys.path[:] = [checkout, *others]
    if "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
        # The streams name its tensors, but only to write files; dicts on Redis don't touch it.
        sys.modules["torch"] = ModuleType("torch")
    return importlib.import_module(f"pipelinerl.{module}")


def connected_streams(options: Options) -> Any:
    """PipelineRL's streams, on this setting's Redis."""
    streams = import_from(options.checkout, "streams")
    streams.set_streams_backend("redis", host="127.0.0.1", port=options.port)
    return streams


def a_stream(streams: Any) -> Any:
    """The stream of an actor's groups."""
    return streams.SingleStreamSpec(exp_path=Path("bench"), topic="actor")


def some_samples(options: Options) -> list[Any]:
    """Samples as a rollout's end leaves them: one prompt token, 1,024 sampled ones."""
    training_text = import_from(options.checkout, "rollouts").TrainingText
    source = random.Random(0)
    samples = []
    for _ in range(DISTINCT):
        sampled = [source.randrange(VOCABULARY) for _ in range(TOKENS)]
        samples.append(
            training_text(
                text="",
                n_predicted=0,
                input_ids=[1, *sampled],
                labels=[-100, *sampled],
                logprobs=[-source.random() for _ in range(TOKENS)],
                finished=True,
                prompt_tokens=1,
                output_tokens=TOKENS,
            )
        )
    return samples


def a_group(samples: Sequence[Any], task: int) -> list[dict[str, Any]]:
    """One record: the group's samples as dicts, each with what the scheduler adds to it."""
    dumps = []
    for index in range(GROUP):
        sample = samples[(task * GROUP + index) % len(samples)].model_copy(
            update={
                "reward": float(index % 2),
                "group_id": f"bench_{task}",
                "metadata": {"model_version": 0, "rollout_index": index, "step_index": 0},
            }
        )
        dumps.append(sample.model_dump())
    return dumps


def produce(orders: Connection, options: Options) -> None:
    """Writes as many groups as each order says, one after the other."""
    streams = connected_streams(options)
    samples = some_samples(options)
    size = len(pickle.dumps(a_group(samples, 0)))
    task = 0
    with streams.write_to_streams(a_stream(streams), "w") as writer:

        def write(groups: int) -> None:
            nonlocal task
            for _ in range(groups):
                writer.write(a_group(samples, task))
                task += 1

        obey(orders, size, write)


def consume(orders: Connection, options: Options) -> None:
    """Reads as many groups as each order says, to the dicts that a preprocessor takes."""
    streams = connected_streams(options)
    with streams.read_stream(a_stream(streams)) as reader:
        records = reader.read()

        def read(groups: int) -> None:
            for _ in range(groups):
                group = next(records)
                if len(group) != GROUP or any(len(one["logprobs"]) != TOKENS for one in group):
                    raise RuntimeError("a record isn't the group that was written")

        obey(orders, 0, read)


def obey(orders: Connection, ready: int, work: Callable[[int], None]) -> None:
    """Says `ready`, then works as ordered until the orders end."""
    try:
        orders.send(ready)
        while True:
            groups = orders.recv()
            began, cpu_s = time.time(), time.process_time()
            work(groups)
            orders.send(Work(began, time.time(), time.process_time() - cpu_s))
    except (EOFError, BrokenPipeError):
        return


KINDS = {"produce": produce, "consume": consume}


class Worker:
    """A process that produces or consumes."""

    def __init__(self, kind: str, options: Options) -> None:
        self._kind = kind
        self._orders, theirs = multiprocessing.Pipe()
        with theirs:
            handle = theirs.fileno()
            command = [sys.executable, __file__, kind, str(handle), json.dumps(asdict(options))]
            # A session of its own: Ctrl-C reaches the parent alone, which ends this.
            self._process = subprocess.Popen(command, pass_fds=[handle], start_new_session=True)

    def order(self, groups: int) -> None:
        """Lets it begin."""
        self._orders.send(groups)

    def answer(self, bound_s: float = BOUND_S) -> Any:
        """What it says next, bounded."""
        try:
            if self._orders.poll(bound_s):
                return self._orders.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(f"{self._kind} ended before its work") from None
        raise TimeoutError(f"{self._kind} said nothing for {bound_s:.0f} s")

    def end(self) -> None:
        """Ends it, whatever it does."""
        ended(self._process)
        self._orders.close()


def ended(process: subprocess.Popen[bytes]) -> None:
    """Ends a process by its pid."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Redis:
    """A server of its own on a free loopback port, in a new folder."""

    def __init__(self, server: Path, folder: Path, persistence: Sequence[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        command = [str(server), "--bind", "127.0.0.1", "--port", str(self.port)]
        command += ["--dir", str(folder), "--logfile", str(folder / "redis.log"), "--save", ""]
        # A rewrite of the file would only add to the cost.
        command += ["--auto-aof-rewrite-percentage", "0", *persistence]
        libraries = [str(path) for path in server.parent.parent.glob("lib/*-linux-gnu")]
        libraries += [path for path in (os.environ.get("LD_LIBRARY_PATH"),) if path]
        environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(libraries)}
        self._client: Any = None
        self._log = folder / "redis.log"
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)

    def connect(self) -> None:
        """Waits until it answers."""
        redis = importlib.import_module("redis")
        self._client = redis.Redis(host="127.0.0.1", port=self.port)
        until = time.monotonic() + START_S
        while True:
            try:
                self._client.ping()
                return
            except redis.exceptions.ConnectionError:
                if self._process.poll() is not None or time.monotonic() > until:
                    log = self._log.read_text() if self._log.exists() else ""
                    raise RuntimeError(f"Redis didn't start. {log[-2000:]}") from None
                time.sleep(0.02)

    def cpu_s(self) -> float:
        """Its CPU seconds, by its own account; with those of processes that it forks."""
        usage = self._client.info("cpu")
        names = ("user", "sys", "user_children", "sys_children")
        return float(sum(usage[f"used_cpu_{name}"] for name in names))

    def version(self) -> str:
        """The server's."""
        return str(self._client.info("server")["redis_version"])

    def empty(self) -> None:
        """Drops all records; nobody is reading."""
        self._client.flushall()

    def end(self) -> None:
        """Ends it, data and all."""
        if self._client is not None:
            self._client.close()
        ended(self._process)


class Setting:
    """One Redis with its producer and its consumer."""

    def __init__(self, redis: Redis, producer: Worker, consumer: Worker) -> None:
        self.redis = redis
        self._producer, self._consumer = producer, consumer
        self.record_size: int = producer.answer(START_S)
        consumer.answer(START_S)

    def run(self, samples: int) -> Run:
        """All samples from producer to consumer, then nothing is left of them."""
        redis_s = self.redis.cpu_s()
        self._consumer.order(samples // GROUP)
        self._producer.order(samples // GROUP)
        produced: Work = self._producer.answer()
        consumed: Work = self._consumer.answer()
        spent = (produced.cpu_s, self.redis.cpu_s() - redis_s, consumed.cpu_s)
        self.redis.empty()
        cpu_ms = {
            name: seconds * 1000 / samples for name, seconds in zip(PROCESSES, spent, strict=True)
        }
        return Run(samples, consumed.ended - produced.began, cpu_ms)


@contextmanager
def stoppable() -> Iterator[None]:
    """Lets SIGTERM and Ctrl-C end the benchmark once; what it started is ended then."""

    def stop(*_: object) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in SIGNALS:
        signal.signal(number, stop)
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit("the benchmark was stopped before its end") from None


def started(stack: ExitStack, arguments: argparse.Namespace, name: str) -> Setting:
    """A setting's processes, which end with the stack."""
    folder = stack.enter_context(TemporaryDirectory(prefix="bench-redis-", dir=arguments.state))
    redis = Redis(arguments.redis_server.absolute(), Path(folder), PERSISTENCE[name])
    stack.callback(redis.end)
    redis.connect()
    checkout = str(arguments.checkout.resolve())
    options = Options(checkout, redis.port)
    workers = []
    for kind in KINDS:
        workers.append(Worker(kind, options))
        stack.callback(workers[-1].end)
    return Setting(redis, *workers)


def measure(arguments: argparse.Namespace) -> None:
    """Runs every setting in turns and prints the medians."""
    runs: dict[str, list[Run]] = {name: [] for name in arguments.settings}
    with ExitStack() as stack:
        settings = {name: started(stack, arguments, name) for name in runs}
        for setting in settings.values():
            setting.run(WARM_UP)
        before = os.getloadavg()
        for _ in range(arguments.runs):
            for name, setting in settings.items():
                runs[name].append(setting.run(arguments.samples))
        one = next(iter(settings.values()))
        print(machine(arguments.checkout, one.redis.version(), before))
        print(
            f"median of {arguments.runs} runs of {arguments.samples:,} samples in groups of "
            f"{GROUP}, {TOKENS:,} tokens each; a record of {GROUP} is {one.record_size:,} bytes"
        )
    print_table(runs)


def print_table(runs: dict[str, list[Run]]) -> None:
    """A line for each setting."""
    names = "".join(f"{name:>10}" for name in PROCESSES)
    print(f"{'Redis':<10}{'samples/s':>10}  {'least to most':<18}{'ms CPU each':>12}{names}  cores")
    for name, those in runs.items():
        rates = [run.rate for run in those]
        parts = "".join(f"{median(run.cpu_ms[part] for run in those):>10.3f}" for part in PROCESSES)
        total = median(run.total_ms for run in those)
        cores = median(run.total_ms * run.rate / 1000 for run in those)
        span = f"{min(rates):,.0f} to {max(rates):,.0f}"
        print(f"{name:<10}{median(rates):>10,.0f}  {span:<18}{total:>12.3f}{parts}{cores:>7.1f}")


def machine(checkout: Path, redis: str, before: tuple[float, float, float]) -> str:
    """The machine, its load at the beginning and now, and the versions."""
    return (
        f"{os.cpu_count()} cores, load (1 min) {before[0]:.1f} to {os.getloadavg()[0]:.1f}; "
        f"Python {platform.python_version()}, Redis {redis}; PipelineRL {commit(checkout)}"
    )


def commit(checkout: Path) -> str:
    """The checkout's commit, as far as git knows it."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "of an unknown commit"


def parsed() -> argparse.Namespace:
    """The arguments, checked as far as a mistake would show late."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("checkout", type=Path, help="a clone of PipelineRL")
    add("--redis-server", type=Path, help="the program; default: the one on the PATH")
    add(
        "--settings",
        nargs="+",
        choices=PERSISTENCE,
        default=["memory", "always"],
        help="what Redis keeps: nothing, or a file synced each second or at each write; "
        "default: memory always",
    )
    add("--runs", type=int, default=5, help="of each setting, in turns; default 5")
    add("--samples", type=int, default=8192, help=f"a run, a multiple of {GROUP}; default 8192")
    add("--state", type=Path, help="where Redis keeps its file; default: the temporary folder")
    arguments = parser.parse_args()
    if arguments.redis_server is None:
        found = shutil.which("redis-server")
        arguments.redis_server = Path(found) if found else Path("redis-server")
    if not os.access(arguments.redis_server, os.X_OK):
        parser.error(f"no Redis server at {arguments.redis_server}: give --redis-server")
    if not (arguments.checkout / "pipelinerl" / "streams.py").is_file():
        parser.error(
            f"{arguments.checkout} has no pipelinerl/streams.py: give the folder of a clone"
        )
    if arguments.samples < GROUP or arguments.samples % GROUP or arguments.runs < 1:
        parser.error(f"--samples is a multiple of {GROUP}, and --runs at least 1")
    return arguments


@stoppable()
def main() -> None:
    """Measures what the arguments say."""
    try:
        measure(parsed())
    except (RuntimeError, TimeoutError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in KINDS:
        KINDS[sys.argv[1]](Connection(int(sys.argv[2])), Options(**json.loads(sys.argv[3])))
    else:
        main()
