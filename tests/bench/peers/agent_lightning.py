"""Null episodes through Microsoft's Agent Lightning, version 1: a peer of the benchmark `episodes`.

The model is a stub that answers 8 tokens at once, and the environment does nothing. It needs a
virtual environment of its own: `../peers.md` has the commands.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import quantiles
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import urlopen

TURNS = 4
TOKENS_A_TURN = 8
MODEL = "stub"
ATTEMPT = "0"
WARM_UP = 64
EPISODES = 256
"""Played with each number of live ones, and once as many as are live."""
START_S = 60.0
"""A process answers by then, even on a busy machine."""
STOP_S = 8.0
"""A process has this long to end by itself."""
TICK_S = 0.1
"""How often its own controller looks for rollouts, and this script for their ends."""
EVENTS = ["model_request"] * TURNS + ["reward"]


# The model: a server that answers at once.


def completion(messages: int) -> bytes:
    """An answer as vLLM gives it, with token ids and logprobs, as bytes of HTTP."""
    tokens = [100 + number for number in range(TOKENS_A_TURN)]
    prompt = list(range(TOKENS_A_TURN * messages))
    logprobs = [
        {"token": "a ", "logprob": -0.5, "bytes": [97, 32], "top_logprobs": []} for _ in tokens
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "a " * TOKENS_A_TURN},
        "logprobs": {"content": logprobs},
        "finish_reason": "length",
        "token_ids": tokens,
    }
    answer = {
        "id": "chatcmpl-0",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [choice],
        "usage": {
            "prompt_tokens": len(prompt),
            "completion_tokens": TOKENS_A_TURN,
            "total_tokens": len(prompt) + TOKENS_A_TURN,
        },
        "prompt_token_ids": prompt,
    }
    body = json.dumps(answer).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    return head.encode() + b"\r\n\r\n" + body


class Stub(asyncio.Protocol):
    """One connection of an OpenAI-compatible server that computes nothing."""

    answers: dict[int, bytes] = {}  # noqa: RUF012 - shared by all connections.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._read = b""

    def data_received(self, data: bytes) -> None:
        self._read += data
        while (head := self._read.find(b"\r\n\r\n")) >= 0:
            lines = self._read[:head].lower().split(b"\r\n")
            sizes = [line[15:] for line in lines if line.startswith(b"content-length:")]
            end = head + 4 + int(sizes[0] if sizes else 0)
            if len(self._read) < end:
                return
            messages = len(json.loads(self._read[head + 4 : end])["messages"])
            self._read = self._read[end:]
            if messages not in self.answers:
                self.answers[messages] = completion(messages)
            self._transport.write(self.answers[messages])


async def stub(options: argparse.Namespace) -> None:
    """Serves the model until the benchmark ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(Stub, "127.0.0.1", options.port, backlog=1024)
    async with server:
        await server.serve_forever()


# The agent: four model calls, a reward, and nothing between them.


async def converse(client: Any, openai_url: str, event_url: str, waits: list[float]) -> None:
    """One episode. `waits` gets the milliseconds of each of its model calls."""
    messages: list[dict[str, str]] = []
    for _ in range(TURNS):
        messages.append({"role": "user", "content": "go on"})
        waits.append(await ask(client, openai_url, messages))
    reward = {"event_type": "reward", "data": {"value": 1.0}}
    (await client.post(event_url, json=reward)).raise_for_status()


async def ask(client: Any, openai_url: str, messages: list[dict[str, str]]) -> float:
    """One model call, whose answer is added to the messages. Its milliseconds."""
    began = time.perf_counter()
    body = {"model": MODEL, "messages": messages, "max_tokens": TOKENS_A_TURN}
    response = await client.post(f"{openai_url}/chat/completions", json=body)
    response.raise_for_status()
    text = response.json()["choices"][0]["message"]["content"]
    took = (time.perf_counter() - began) * 1000
    messages.append({"role": "assistant", "content": text})
    return took


def new_client(**options: Any) -> Any:
    """Agent Lightning's own asynchronous client. It makes no TLS context, which takes long."""
    module = import_module("agentlightning.client")
    return module.AgentLightningAsyncClient(verify=False, timeout=None, **options)


class NullAgent:
    """The agent as its local controller starts it: one process for each rollout."""

    async def run(self) -> None:
        async with new_client(key=os.environ["AGL_KEY"]) as client:
            await converse(
                client, os.environ["AGL_OPENAI_BASE_URL"], os.environ["AGL_EVENT_URL"], []
            )


class Worker:
    """Plays rollouts in one process, each as a coroutine, and tells the store of their states."""

    def __init__(self, server: str) -> None:
        self._server = server
        self._clients: list[Any] = []

    async def play(self, rollouts: Sequence[str], live: int) -> list[float]:
        """Plays rollouts, a number of them at a time. Milliseconds of their model calls."""
        while len(self._clients) < live:
            self._clients.append(new_client(base_url=self._server))
        waits: list[float] = []
        left = iter(rollouts)
        async with asyncio.TaskGroup() as group:
            for client in self._clients[:live]:
                group.create_task(self._slot(client, left, waits))
        return waits

    async def _slot(self, client: Any, left: Iterator[str], waits: list[float]) -> None:
        for rollout in left:
            url = f"/api/rollouts/{rollout}"
            await self._state(client, url, {"state": "running", "last_attempt_id": ATTEMPT})
            openai_url = f"/proxy/rollout/{rollout}/attempt/{ATTEMPT}/mode/train/openai/v1"
            await converse(client, openai_url, f"{url}/attempt/{ATTEMPT}/events", waits)
            await self._state(client, url, {"state": "succeeded"})

    async def _state(self, client: Any, url: str, status: Mapping[str, str]) -> None:
        (await client.patch(url, json={"status": status})).raise_for_status()


async def agent(options: argparse.Namespace) -> None:
    """Plays what each line of stdin names, and answers with a line."""
    worker = Worker(options.server_url)
    while line := await asyncio.to_thread(sys.stdin.readline):
        job = json.loads(line)
        if "direct" in job:
            async with new_client() as client:
                waits = [await ask(client, job["url"], []) for _ in range(job["direct"])]
        else:
            waits = await worker.play(job["rollouts"], job["live"])
        print(json.dumps(waits), flush=True)


# The processes of Agent Lightning.


def quiet_server(options: argparse.Namespace) -> None:
    """Its server without a line of log for each request and each model call."""
    structlog, uvicorn = import_module("structlog"), import_module("uvicorn")
    warnings = structlog.make_filtering_bound_logger(logging.WARNING)
    structlog.configure(wrapper_class=warnings)
    proxy = {"model_name": MODEL, "train": {"temperature": 1}, "val": {"temperature": 1}}
    app = import_module("agentlightning.server.app").create_app({"key": "", "default_proxy": proxy})
    uvicorn.run(
        app,
        host="127.0.0.1",
        port=options.port,
        access_log=False,
        log_level="warning",
        timeout_keep_alive=120,
    )


def shipped_server(options: argparse.Namespace) -> None:
    """The same as its command `agl-server`."""
    sys.argv = ["agl-server", "host=127.0.0.1", f"port={options.port}"]
    sys.argv.append(f"default_proxy.model_name={MODEL}")
    import_module("agentlightning.server.__main__").main()


def controller(options: argparse.Namespace) -> None:
    """The same as its command `agl-controller`, with local processes."""
    sys.argv = ["agl-controller", "runner_type=local", f"agl_server.url={options.server_url}"]
    sys.argv += [f"local_runner.maximum_size={options.slots}"]
    sys.argv += [f"local_runner.poll_interval={TICK_S}"]
    import_module("agentlightning.controller.__main__").main()


def in_loop(
    work: Callable[[argparse.Namespace], Coroutine[Any, Any, None]],
) -> Callable[[argparse.Namespace], None]:
    """Runs a coroutine, with uvloop where that is installed."""

    def run(options: argparse.Namespace) -> None:
        try:
            import_module("uvloop").run(work(options))
        except ModuleNotFoundError:
            asyncio.run(work(options))

    return run


ROLES: dict[str, Callable[[argparse.Namespace], None]] = {
    "stub": in_loop(stub),
    "agent": in_loop(agent),
    "server": quiet_server,
    "shipped-server": shipped_server,
    "controller": controller,
}


def end_with_parent() -> None:
    """Ends this process when its parent does, even by `kill -9`: a pipe from it closes then."""

    def watch(pipe: int) -> None:
        while os.read(pipe, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(STOP_S)
        os._exit(1)

    pipe = int(os.environ.pop("BENCH_PARENT"))
    threading.Thread(target=watch, args=(pipe,), daemon=True).start()


# The benchmark.


@dataclass
class Processes:
    """Child processes by name, each with the CPU seconds that it has used."""

    folder: Path
    children: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    @contextmanager
    def running(self, name: str, role: str, **options: object) -> Iterator[subprocess.Popen[str]]:
        """Runs this script in another role, until the context ends."""
        theirs, ours = os.pipe()
        os.set_inheritable(theirs, True)
        command = [sys.executable, str(Path(__file__).resolve()), "--role", role]
        for option, value in options.items():
            command += [f"--{option.replace('_', '-')}", str(value)]
        here = str(Path(__file__).resolve().parent)  # Its controller imports `NullAgent`.
        with open(self.folder / f"{name}.log", "w") as log:
            child = subprocess.Popen(
                command,
                cwd=self.folder,
                env={**os.environ, "BENCH_PARENT": str(theirs), "PYTHONPATH": here},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if role == "agent" else log,
                stderr=log,
                pass_fds=(theirs,),
                start_new_session=True,
                text=True,
            )
        os.close(theirs)
        self.children[name] = child
        try:
            yield child
        except BaseException:
            if child.poll() not in (None, 0):
                print((self.folder / f"{name}.log").read_text()[-2000:], file=sys.stderr)
            raise
        finally:
            del self.children[name]
            os.close(ours)
            child.terminate()
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(STOP_S)

    def seconds(self) -> dict[str, float]:
        """CPU seconds of each process and of those that it has started and waited for."""
        pids = {"trainer": os.getpid()}
        pids |= {name: child.pid for name, child in self.children.items()}
        return {name: _cpu_seconds(pid) for name, pid in pids.items()}


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = pid == os.getpid()  # This script's own children are counted by themselves.
    ticks = sum(int(value) for value in fields[11 : 13 if own else 15])
    return ticks / os.sysconf("SC_CLK_TCK")


class Cpu:
    """CPU of all processes since this was made."""

    def __init__(self, processes: Processes) -> None:
        self._processes = processes
        self._began = processes.seconds()
        self._clock = time.perf_counter()

    def text(self, count: int) -> str:
        """Milliseconds an episode, dearest first, and the cores kept busy meanwhile."""
        now, wall_s = self._processes.seconds(), time.perf_counter() - self._clock
        spent = {name: now[name] - self._began.get(name, 0.0) for name in now}
        parts = [
            f"{name} {seconds * 1000 / count:.2f}"
            for name, seconds in sorted(spent.items(), key=lambda item: -item[1])
        ]
        total = sum(spent.values())
        each = f"{total * 1000 / count:.2f} ms CPU each ({', '.join(parts)})"
        return f"{each}, {total / wall_s:.1f} cores"


def wait_until_ready(server: str, child: subprocess.Popen[str]) -> None:
    """Waits until the server answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise RuntimeError("the server ended")
        try:
            with urlopen(f"{server}/healthz", timeout=5.0):
                return
        except OSError:
            time.sleep(0.1)
    raise RuntimeError(f"the server did not answer within {START_S:.0f} s")


@dataclass(frozen=True)
class Figure:
    """One measured number."""

    what: str
    value: str
    note: str = ""


class Trainer:
    """What its trainer asks the store for, through its own client."""

    def __init__(self, server: str) -> None:
        module = import_module("agentlightning.client")
        self._client = module.AgentLightningSyncClient(
            base_url=server, verify=False, timeout=30.0, max_retries=0
        )
        self._ended = 0

    def register(self, endpoint: str) -> None:
        """Names the model's server."""
        self._post("/api/models", [{"model": MODEL, "endpoint": endpoint}])

    def enqueue(self, count: int, config: Mapping[str, Any] | None = None) -> list[str]:
        """Creates rollouts, all with one request as its trainer does."""
        rollout = {"input": {"question": "null"}, "config": config or {}}
        created = self._post("/api/rollouts", [rollout] * count)
        return [item["rollout_id"] for item in created]

    def ended(self) -> int:
        """Number of rollouts that have ended since the last `collect`."""
        return len(self._terminal())

    def collect(self, rollouts: Sequence[str]) -> float:
        """Reads all that ended, as training data, and deletes them. Seconds that it took.

        Fails unless each succeeded with its model calls, their tokens and its reward.
        """
        items = self._terminal()
        states = {item["rollout_id"]: item["state"] for item in items}
        wrong = [name for name in rollouts if states.get(name) != "succeeded"]
        if wrong or len(states) != len(rollouts):
            raise RuntimeError(f"{len(wrong)} of {len(rollouts)} rollouts have not succeeded")
        self._ended += len(items)
        began = time.perf_counter()
        for name in rollouts:
            url = f"/api/rollouts/{name}"
            _check(self._get(f"{url}/events", {"format": "triplet"}))
        seconds = time.perf_counter() - began
        for name in rollouts:
            self._client.delete(f"/api/rollouts/{name}").raise_for_status()
        return seconds

    def _terminal(self) -> list[Any]:
        page = self._get("/api/rollouts/terminal", {"after": self._ended, "limit": 1_000_000})
        items: list[Any] = page["items"]
        return items

    def _get(self, url: str, params: Mapping[str, object]) -> Any:
        response = self._client.get(url, params=params)
        response.raise_for_status()
        return response.json()

    def _post(self, url: str, body: object) -> Any:
        response = self._client.post(url, json=body)
        response.raise_for_status()
        return response.json()


def _check(events: Sequence[Any]) -> None:
    if [event["event_type"] for event in events] != EVENTS:
        raise RuntimeError(f"not the events of an episode: {events}")
    for event in events[:TURNS]:
        tokens = event["data"]["response_token_ids"], event["data"]["response_log_probs"]
        if [len(values) for values in tokens] != [TOKENS_A_TURN] * 2:
            raise RuntimeError(f"not the tokens of a turn: {event}")


@dataclass(frozen=True)
class Played:
    """Some rollouts from their creation until the last one ended in the store."""

    seconds: float
    waits: list[float]
    """Milliseconds of each model call."""
    spent: str
    """CPU."""
    reading_s: float
    """Seconds to read all events afterwards."""


class Benchmark:
    """All figures, one after another."""

    def __init__(self, options: argparse.Namespace, processes: Processes) -> None:
        self._options = options
        self._processes = processes

    def run(self) -> list[Figure]:
        """Starts all processes, measures, and ends them."""
        with ExitStack() as stack:
            start = self._processes.running
            port, model_port = free_port(), free_port()
            self._server = f"http://127.0.0.1:{port}"
            self._model = f"http://127.0.0.1:{model_port}/v1"
            stack.enter_context(start("stub", "stub", port=model_port))
            server = stack.enter_context(start("server", self._server_role(), port=port))
            names = [f"agent-{number}" for number in range(self._options.agents)]
            self._agents = [
                stack.enter_context(start(name, "agent", server_url=self._server)) for name in names
            ]
            wait_until_ready(self._server, server)
            self._trainer = Trainer(self._server)
            self._trainer.register(self._model)
            self._play(max(4, self._count(WARM_UP)), 16)
            figures = [self._direct(self._count(400)), *self._latency(self._count(100))]
            for live in self._options.live:
                count = max(live, self._count(EPISODES + live))
                figures += self._throughput(count, live)
        return figures

    def controlled(self) -> Figure:
        """The same through its own controller, which starts a process for each rollout."""
        count, live = self._count(16), 16
        with ExitStack() as stack:
            start = self._processes.running
            port, model_port = free_port(), free_port()
            url = f"http://127.0.0.1:{port}"
            stack.enter_context(start("stub", "stub", port=model_port))
            server = stack.enter_context(start("server", self._server_role(), port=port))
            wait_until_ready(url, server)
            trainer = Trainer(url)
            trainer.register(f"http://127.0.0.1:{model_port}/v1")
            stack.enter_context(start("controller", "controller", server_url=url, slots=live))
            local = {"agent_class": "agent_lightning:NullAgent"}
            self._controlled(trainer, local, 1)
            cpu = Cpu(self._processes)
            seconds = self._controlled(trainer, local, count)
            note = f"{live} live, {count} episodes in {seconds:.1f} s; {cpu.text(count)}"
        return Figure("the same, a process for each by its controller", rate(count, seconds), note)

    def _controlled(self, trainer: Trainer, local: Mapping[str, str], count: int) -> float:
        began = time.perf_counter()
        rollouts = trainer.enqueue(count, {"timeout_seconds": 60, "local": local})
        while trainer.ended() < count:
            time.sleep(TICK_S)
        seconds = time.perf_counter() - began
        trainer.collect(rollouts)
        return seconds

    def _direct(self, count: int) -> Figure:
        waits = self._ask([{"direct": count, "url": self._model}])
        return Figure(
            "the stub asked directly, p50", f"{p50(waits):.2f} ms", f"{len(waits)} model calls"
        )

    def _latency(self, count: int) -> list[Figure]:
        played = self._play(count, 1)
        values = quantiles(played.waits, n=20)
        note = f"{len(played.waits)} calls; {rate(count, played.seconds)} episodes; {played.spent}"
        what = "a model call through its gateway, 1 live"
        return [
            Figure(f"{what}, p50", f"{values[9]:.2f} ms", note),
            Figure(f"{what}, p95", f"{values[18]:.2f} ms"),
        ]

    def _throughput(self, count: int, live: int) -> list[Figure]:
        played = self._play(count, live)
        note = f"{count} episodes in {played.seconds:.1f} s, a model call p50 "
        note += f"{p50(played.waits):.1f} ms; {played.spent}"
        reading = rate(count, played.reading_s)
        return [
            Figure(f"null 4-turn episodes/s, {live} live", rate(count, played.seconds), note),
            Figure("… read by the trainer afterwards", reading, "events as triplets"),
        ]

    def _play(self, count: int, live: int) -> Played:
        """Plays rollouts, and reads afterwards what the store has of them."""
        agents = min(live, len(self._agents))
        shares = [live // agents + (number < live % agents) for number in range(agents)]
        self._ask([{"rollouts": [], "live": share} for share in shares])  # They make clients.
        cpu = Cpu(self._processes)
        began = time.perf_counter()
        rollouts = self._trainer.enqueue(count)
        waits = self._ask(
            [
                {"rollouts": rollouts[number::agents], "live": share}
                for number, share in enumerate(shares)
            ]
        )
        ended = self._trainer.ended()
        seconds = time.perf_counter() - began
        spent = cpu.text(count)
        if ended != count:
            raise RuntimeError(f"{ended} of {count} rollouts have ended")
        return Played(seconds, waits, spent, self._trainer.collect(rollouts))

    def _ask(self, jobs: Sequence[Mapping[str, object]]) -> list[float]:
        """Gives each agent process a job, and waits for all."""
        agents = self._agents[: len(jobs)]
        for child, job in zip(agents, jobs, strict=True):
            assert child.stdin is not None
            child.stdin.write(json.dumps(job) + "\n")
            child.stdin.flush()
        waits: list[float] = []
        for child in agents:
            assert child.stdout is not None
            if not (line := child.stdout.readline()):
                child.wait(STOP_S)
                raise RuntimeError("an agent process has ended")
            waits += json.loads(line)
        return waits

    def _server_role(self) -> str:
        return "shipped-server" if self._options.as_shipped else "server"

    def _count(self, count: int) -> int:
        return max(4, int(count * self._options.scale))


def p50(values: Sequence[float]) -> float:
    """The median."""
    return quantiles(values, n=20)[9]


def rate(count: int, seconds: float) -> str:
    """Things a second."""
    return f"{count / seconds:,.1f}/s"


def free_port() -> int:
    """A port of this machine that nothing uses now."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def versions() -> str:
    """The packages that matter for the figures."""
    names = []
    for name in ("agentlightning", "fastapi", "uvicorn", "httpx", "uvloop", "httptools"):
        try:
            names.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            names.append(f"no {name}")
    return f"Python {platform.python_version()}, {', '.join(names)}"


def load() -> str:
    """The machine's load: others may be using it."""
    values = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{os.cpu_count()} cores; load (1, 5, 15 min) {values}"


@contextmanager
def stoppable(limit_s: int) -> Iterator[None]:
    """Lets SIGTERM, Ctrl-C and the time limit end the benchmark, and all that it has started."""

    def stop(number: int, _: object) -> None:
        for later in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(later, signal.SIG_IGN)  # Nothing interrupts the end.
        raise SystemExit(f"stopped before its end by {signal.Signals(number).name}")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, stop)
    signal.alarm(limit_s)
    yield
    signal.alarm(0)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the counts; default 1")
    parser.add_argument(
        "--agents", type=int, default=1, help="processes that play episodes; default 1"
    )
    parser.add_argument(
        "--live", type=int, nargs="+", default=[16, 256], help="episodes at once; default 16 256"
    )
    parser.add_argument(
        "--as-shipped",
        action="store_true",
        help="start the server as its command `agl-server` does, which logs each request",
    )
    parser.add_argument(
        "--no-controller",
        action="store_true",
        help="leave out its own controller, which starts a process for each episode",
    )
    parser.add_argument("--limit", type=int, default=120, help="seconds; default 120")
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--slots", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--server-url", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Runs the benchmark, or one of its processes."""
    options = parse_options()
    if options.role is not None:
        end_with_parent()
        ROLES[options.role](options)
        return
    print(versions())
    print(load())
    with (
        stoppable(options.limit),
        TemporaryDirectory(prefix="bench-agent-lightning-") as folder,
    ):
        benchmark = Benchmark(options, Processes(Path(folder)))
        figures = benchmark.run()
        if not options.no_controller:
            figures.append(benchmark.controlled())
    width = max(len(figure.what) for figure in figures)
    for figure in figures:
        print(f"{figure.what:{width}}  {figure.value:>10}  {figure.note}")
    print(load())


if __name__ == "__main__":
    main()
