"""Real brokers and a real registry, as processes to be killed, stopped and started again.

Jars, Java runtime and settings are the local stack's (`infra/local`). A broker has two doors: one
that the services know, behind a proxy, and one for the harness and the other brokers.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import signal
import subprocess
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headrace.infra.local import jars
from headrace.infra.local import java_runtime as runtime
from headrace.infra.local import kafka_server as kafka
from headrace.infra.local import registry_server as registry
from headrace.infra.local.detached import free_port
from headrace.services.base.files import describe_log
from tests.chaos.proxy import Proxy

READY_S = 120.0
POLL_S = 0.05
STOP_S = 20.0


@dataclass
class Server:
    """A process that serves once its log says so."""

    name: str
    command: Sequence[str]
    folder: Path
    is_ready: Callable[[Path], bool]
    process: asyncio.subprocess.Process | None = None

    @property
    def log(self) -> Path:
        """What its present life says."""
        return self.folder / "logs" / f"{self.name}.log"

    @property
    def runs(self) -> bool:
        """Whether its process is there, stopped or not."""
        return self.process is not None and self.process.returncode is None

    async def start(self) -> None:
        """Starts it and waits until it serves. AssertionError where it does not in time."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists():
            self.log.replace(self.log.with_suffix(".previous.log"))
        with self.log.open("ab") as output:
            self.process = await asyncio.create_subprocess_exec(
                *self.command,
                cwd=self.folder,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            async with asyncio.timeout(READY_S):
                while not await asyncio.to_thread(self.is_ready, self.log):
                    if not self.runs:
                        raise AssertionError(f"{self.name} ended; {describe_log(self.log)}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise AssertionError(f"{self.name} does not serve; {describe_log(self.log)}") from None

    def send(self, number: signal.Signals) -> None:
        """Sends it a signal, if it is there."""
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    async def end(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Ends it, by force where it doesn't heed in time."""
        if self.process is None:
            return
        self.send(number)
        try:
            await asyncio.wait_for(self.process.wait(), STOP_S)
        except TimeoutError:
            self.send(signal.SIGKILL)
            await self.process.wait()


@dataclass
class Broker(Server):
    """One Kafka broker, which is a controller too."""

    proxy: Proxy = field(default_factory=lambda: Proxy(0))
    direct: str = ""
    """Its address that no proxy troubles."""

    @property
    def front(self) -> str:
        """Its address as the services know it."""
        return f"127.0.0.1:{self.proxy.port}"


class Cluster:
    """One broker or three, each in a folder of its own, and a registry."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.brokers: list[Broker] = []
        self._count = count
        self.cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        self._registry_port = free_port()
        cancelled = threading.Event()
        pins, cache, java = jars.load_pins(), jars.cache_folder(), jars.java()
        kafka_jars = jars.kafka_jars(pins, cache, print, cancelled)
        self._runtime = runtime.prepare(
            "kafka", java, kafka_jars.class_path, kafka.HEAP, cache, may_record=False
        )
        found = jars.registry_jars(pins, cache, print, cancelled)
        run = runtime.prepare(
            "registry", java, found.class_path, registry.HEAP, cache, may_record=False
        )
        home = folder / "registry"
        (home / "tmp" / "registry").mkdir(parents=True)
        port = self._registry_port
        self.registry = Server(
            "registry",
            registry.command(run, home, port),
            home,
            lambda log: registry.is_ready(log, port),
        )

    @property
    def bootstrap_servers(self) -> str:
        """As the services know it."""
        return ",".join(broker.front for broker in self.brokers)

    @property
    def direct(self) -> str:
        """As the harness knows it."""
        return ",".join(broker.direct for broker in self.brokers)

    @property
    def registry_url(self) -> str:
        """The registry's root."""
        return f"http://127.0.0.1:{self._registry_port}{registry.PATH}"

    def data(self, number: int) -> Path:
        """The folder of a broker's log: it must be there, empty, before `start`."""
        return self.folder / f"broker-{number}" / "kafka"

    async def start(self) -> None:
        """Makes the brokers and starts everything."""
        controllers = [free_port() for _ in range(self._count)]
        voters = ",".join(f"{at}@127.0.0.1:{port}" for at, port in enumerate(controllers, 1))
        for number in range(1, self._count + 1):
            self.brokers.append(await self._broker(number, controllers[number - 1], voters))
        await asyncio.gather(
            *(asyncio.to_thread(_format, one, self.cluster_id) for one in self.brokers)
        )
        await asyncio.gather(*(one.start() for one in (*self.brokers, self.registry)))

    async def _broker(self, number: int, controller: int, voters: str) -> Broker:
        home = self.folder / f"broker-{number}"
        for folder in (home / "tmp" / "kafka", home / "logs", self.data(number)):
            folder.mkdir(parents=True, exist_ok=True)
        behind, direct = free_port(), free_port()
        proxy = Proxy(behind)
        await proxy.start()
        command = kafka.command(self._runtime, home, behind, controller)
        properties = home / "kafka.properties"
        # Of two lines with one key Java takes the last.
        more = self._settings(number, behind, direct, controller, proxy.port, voters)
        text = "".join(f"{key}={value}\n" for key, value in more.items())
        properties.write_text(properties.read_text() + text)
        name = f"broker-{number}"
        address = f"127.0.0.1:{direct}"
        return Broker(name, command, home, kafka.is_ready, proxy=proxy, direct=address)

    def _settings(
        self, number: int, behind: int, direct: int, controller: int, front: int, voters: str
    ) -> dict[str, object]:
        host = "127.0.0.1"
        copies = {
            "offsets.topic.replication.factor": self._count,
            "transaction.state.log.replication.factor": self._count,
            "transaction.state.log.min.isr": min(2, self._count),
            "min.insync.replicas": min(2, self._count),
        }
        return copies | {
            "node.id": number,
            "listeners": f"PLAINTEXT://{host}:{behind},DIRECT://{host}:{direct},"
            f"CONTROLLER://{host}:{controller}",
            "advertised.listeners": f"PLAINTEXT://{host}:{front},DIRECT://{host}:{direct}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,DIRECT:PLAINTEXT,"
            "CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "DIRECT",
            "controller.quorum.voters": voters,
            "controller.quorum.fetch.timeout.ms": 2_000,
            "controller.quorum.election.timeout.ms": 1_000,
        }

    async def mend(self) -> None:
        """Every broker runs, and every proxy only forwards."""
        for broker in self.brokers:
            broker.proxy.delay_s = 0.0
            broker.send(signal.SIGCONT)
        await asyncio.gather(*(broker.start() for broker in self.brokers if not broker.runs))

    async def close(self) -> None:
        """Ends everything."""
        for broker in self.brokers:
            broker.send(signal.SIGCONT)
        await asyncio.gather(*(one.end() for one in (*self.brokers, self.registry)))
        for broker in self.brokers:
            await broker.proxy.close()


def _format(broker: Broker, cluster: str) -> None:
    """Makes a broker's empty log."""
    tool = ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster}"]
    properties = str(broker.folder / "kafka.properties")
    done = subprocess.run(
        [*broker.command[:-2], *tool, "-c", properties],
        cwd=broker.folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=READY_S,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, f"formatting {broker.name}: {done.stdout}{done.stderr}"
