"""The parts of the chaos harness that could hide a fault by being wrong themselves."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO

import pytest

from headrace.schemas.events import BatchAssembled, EpisodeEnded, EpisodeStarted, GroupClosed
from tests.chaos.proxy import Proxy
from tests.chaos.report import GapFigures, losses
from tests.chaos.watch import Gap
from tests.unit.checker.logs import whole_log

Writer = asyncio.StreamWriter
SITE = Path(__file__).parents[1] / "chaos" / "site"


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


@asynccontextmanager
async def a_client_of(proxy: Proxy) -> AsyncIterator[tuple[asyncio.StreamReader, Writer]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@asynccontextmanager
async def an_echo_behind_a_proxy() -> AsyncIterator[Proxy]:
    """A server that says again what it hears; the proxy before it."""

    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", 0)
    proxy = Proxy(server.sockets[0].getsockname()[1])
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()
        server.close()


async def said(reader: asyncio.StreamReader, count: int) -> bytes:
    return await asyncio.wait_for(reader.readexactly(count), 5)


def test_a_proxy_forwards_in_order_whatever_its_delay_is_changed_to() -> None:
    async def main() -> None:
        async with an_echo_behind_a_proxy() as proxy, a_client_of(proxy) as (reader, writer):
            for number, delay_s in enumerate((0.0, 0.05, 0.01, 0.0)):
                proxy.delay_s = delay_s
                writer.write(bytes([number]))
                await asyncio.sleep(0.005)
            assert await said(reader, 4) == bytes(range(4))

    asyncio.run(main())


def test_a_cut_ends_the_connection_and_the_next_one_works() -> None:
    async def main() -> None:
        async with an_echo_behind_a_proxy() as proxy:
            async with a_client_of(proxy) as (reader, writer):
                writer.write(b"a")
                assert await said(reader, 1) == b"a"
                assert proxy.cut() == 1
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await said(reader, 1)
            async with a_client_of(proxy) as (reader, writer):
                writer.write(b"b")
                assert await said(reader, 1) == b"b"

    asyncio.run(main())


def test_a_muted_proxy_loses_the_reply_and_then_the_connection() -> None:
    async def main() -> None:
        async with an_echo_behind_a_proxy() as proxy, a_client_of(proxy) as (reader, writer):
            writer.write(b"a")
            assert await said(reader, 1) == b"a"
            proxy.mute()
            writer.write(b"b")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.readexactly(1), 0.1)
            proxy.unmute()
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await said(reader, 1)

    asyncio.run(main())


def test_a_gap_is_that_of_its_slowest_partition() -> None:
    gap = Gap("env", 7, 100.0, alone=True, moved={0: 1.5, 1: None})
    assert gap.lasts
    assert gap.seconds is None
    gap.moved[1] = 4.0
    assert not gap.lasts
    assert gap.seconds == 4.0


def test_a_kill_of_an_idle_process_has_no_gap() -> None:
    idle = Gap("env", 7, 100.0, alone=True, moved={})
    assert not idle.lasts
    figures = GapFigures.of("env", [idle, *(Gap("env", 7, 0.0, True, {0: s}) for s in (3.0, 1.0))])
    assert (figures.kills, figures.measured, figures.unended) == (3, 2, 0)
    assert (figures.p50, figures.p99, figures.longest) == (1.0, 3.0, 3.0)


def test_a_whole_log_has_lost_and_doubled_nothing_whoever_sent_again() -> None:
    log = whole_log()
    for kind in (EpisodeEnded, GroupClosed):
        log.again(kind)
    assert losses(log.deliveries) == ([], [])


def test_a_sample_in_no_batch_and_an_episode_without_an_end_are_lost() -> None:
    log = whole_log()
    log.without(BatchAssembled)
    log.without(EpisodeEnded, task=1, sample=0)
    lost, doubled = losses(log.deliveries)
    assert lost[0] == "episode 1/0 never ended"
    assert lost[1:] == ["sample 0/0 is in no batch", "sample 0/1 is in no batch"]
    assert doubled == []


def test_a_sample_in_two_batches_and_a_start_written_twice_are_doubled() -> None:
    log = whole_log()
    log.again(BatchAssembled, version=2)
    log.again(EpisodeStarted)
    lost, doubled = losses(log.deliveries)
    assert lost == []
    assert doubled[:2] == ["sample 0/0 is in 2 batches", "sample 0/1 is in 2 batches"]
    assert doubled[2].startswith("EpisodeStarted 1/1 at 0@")


def test_a_skewed_clock_jumps_and_comes_back(tmp_path: Path) -> None:
    program = (
        "import time, sys\nfor _ in sys.stdin: print(time.time(), flush=True); time.sleep(0.12)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(SITE), "HEADRACE_CHAOS_CLOCKS": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def skew(asked: IO[str], said: IO[str]) -> float:
            asked.write("\n")
            asked.flush()
            return float(said.readline()) - time.time()

        assert abs(skew(child.stdin, child.stdout)) < 60
        (tmp_path / "all").write_text("3600")
        skew(child.stdin, child.stdout)
        assert skew(child.stdin, child.stdout) > 3000
        (tmp_path / "all").unlink()
        skew(child.stdin, child.stdout)
        assert abs(skew(child.stdin, child.stdout)) < 60
        child.stdin.close()
