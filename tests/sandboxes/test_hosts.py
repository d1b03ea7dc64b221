"""Several engines as one pool, one of them by TLS, and the loss of one."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from headrace.errors import DependencyError, InfrastructureError, UsageError
from headrace.schemas.events import EnvironmentUse
from headrace.services.env.environment import Claim
from headrace.services.env.sandbox.docker_environment import DockerEnvironment
from headrace.services.processes.docker.docker_engine import DockerEngine
from tests.sandboxes.bench import NAMESPACE, Bench, bench, claim, view
from tests.sandboxes.docker_engine import second_engine
from tests.unit.processes.test_docker_client import certificates, serving

__all__ = ["certificates"]

USE = EnvironmentUse(use="default")


class Relay:
    """TLS in front of an engine's socket, which can be cut off."""

    def __init__(self, host: str, certificates: Path) -> None:
        self._path = host.removeprefix("unix://")
        self._certificates = certificates
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    async def open(self) -> None:
        context = serving(self._certificates)
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port, ssl=context)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inside, to_inside = await asyncio.open_unix_connection(self._path)
        self._writers |= {writer, to_inside}

        async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            try:
                while chunk := await source.read(65536):
                    target.write(chunk)
                    await target.drain()
            except (ConnectionError, ssl.SSLError):
                pass
            finally:
                target.close()

        await asyncio.gather(pump(reader, to_inside), pump(inside, writer))
        self._writers -= {writer, to_inside}


class Episodes:
    """Episodes of one worker that hold their hosts."""

    def __init__(self, made: Bench) -> None:
        self._made = made
        self._held: dict[Claim, AsyncExitStack] = {}

    async def begin(self, task: int, attempt: int = 0) -> DockerEnvironment:
        owner = claim(task, attempt=attempt, offset=task)
        held = AsyncExitStack()
        await held.enter_async_context(self._made.setup.prepared(USE, owner, False))
        self._held[owner] = held
        environment = await self._made.take(owner)
        await environment.reset(view())
        return environment

    async def end(self, environment: DockerEnvironment) -> None:
        await self._made.setup.give_back(USE, environment, False)
        await self._held.pop(environment.claim).aclose()


async def count(host: str) -> int:
    engine = DockerEngine(host)
    found = await engine.containers({"headrace.namespace": NAMESPACE})
    await engine.aclose()
    return len(found)


@pytest.mark.long
def test_a_lost_host_costs_attempts_and_others_go_on(engine: str, certificates: Path) -> None:
    async def main(other: str) -> None:
        relay = Relay(other, certificates)
        await relay.open()
        hosts = [
            {"url": engine, "slots": 2},
            {"url": f"tcp://127.0.0.1:{relay.port}", "slots": 2, "tls": str(certificates)},
        ]
        async with bench(engine, hosts=hosts) as made:
            episodes = Episodes(made)
            begun = await asyncio.gather(*map(episodes.begin, range(4)))
            assert (await count(engine), await count(other)) == (2, 2)
            by_host = {str(one.host): [e for e in begun if e.host is one.host] for one in begun}
            near = by_host.pop(engine)
            (far,) = by_host.values()
            for environment in begun:
                assert (await environment.step("echo on")).text == "on\n"
            relay.cut()
            with pytest.raises(InfrastructureError, match="engine_unreachable"):
                await far[0].step("true")
            assert (await near[0].step("echo still")).text == "still\n"
            for environment in far:
                await episodes.end(environment)
            # The new attempt waits for a slot of the host that is left.
            with pytest.raises(InfrastructureError):
                await made.setup.sweep(0, -1, lambda task, sample: None)
            again = asyncio.create_task(episodes.begin(far[0].claim.task, attempt=1))
            await asyncio.sleep(0.5)
            assert not again.done()
            await episodes.end(near[0])
            assert (await (await again).step("echo again")).text == "again\n"
            assert (await count(engine), await count(other)) == (2, 2)
            await relay.open()
            # The host answers again: what nobody needs there goes, and new episodes come.
            live = {near[1].claim.task: 0, far[0].claim.task: 1}
            await made.setup.sweep(0, 100, lambda task, sample: live.get(task))
            assert (await count(engine), await count(other)) == (2, 0)
            environment = await episodes.begin(9)
            assert await count(other) == 1
            for each in (environment, await again, near[1]):
                await episodes.end(each)
            assert (await count(engine), await count(other)) == (0, 0)
            relay.cut()

    with second_engine(Path(engine.removeprefix("unix://")).parent) as other:
        asyncio.run(asyncio.wait_for(main(other), 300))


def test_hosts_that_are_away_or_wrong_at_the_start(engine: str, tmp_path: Path) -> None:
    away = {"url": "tcp://127.0.0.1:9", "slots": 4}

    async def begin(*hosts: dict[str, object]) -> str:
        async with bench(engine, hosts=hosts) as made:
            environment = await made.fresh()
            text = (await environment.step("echo on")).text
            await environment.aclose()
            return text

    assert asyncio.run(begin(away, {"url": engine, "slots": 1})) == "on\n"
    with pytest.raises(DependencyError, match=r"tcp://127\.0\.0\.1:9 can't be used"):
        asyncio.run(begin(away))
    with pytest.raises(UsageError, match="may have no user and password"):
        asyncio.run(begin({"url": "tcp://me:secret@127.0.0.1:9", "slots": 4}))
    with pytest.raises(UsageError, match="the same url"):
        asyncio.run(begin(away, away))
    with pytest.raises(UsageError, match=r"must be a folder with ca\.pem, cert\.pem and key\.pem"):
        asyncio.run(begin({**away, "tls": str(tmp_path)}))
