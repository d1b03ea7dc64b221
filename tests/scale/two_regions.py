"""`python -m tests.scale.two_regions`: a real run whose rollout side is behind slow links.

Agent, env and inference workers reach Kafka, the schema registry and the blob store through proxies
that delay all bytes by DELAY_S one way. Trainer, scheduler, source and batch jobs are beside Kafka.
The links to Kafka and the registry let 4 Gbit/s through. The model is tiny, so the link to the blob
store is so slow that its weights take as long as a delta of 1.5 GB does at 4 Gbit/s.

Generations take 10 s in the median, and a batch 5 s (`slow_parts.py`). The run with and the run
without links alternate. It prints the trainer's wait fraction, and the time of a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

from headrace.schemas.events import PolicyPublished, TrajectoryRecorded
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import POLICIES, TRAJECTORIES
from headrace.services.namespace.cluster_config import ClusterConfig
from tests.bench.deployment import Deployment, deployed
from tests.bench.report import machine
from tests.chaos.proxy import Proxy
from tests.chaos.servers import Cluster
from tests.scale.fleet import GIGABIT

DELAY_S = 0.3
LINK_BYTES_PER_S = 4 * GIGABIT
DELTA_S = 1.5e9 / LINK_BYTES_PER_S
HOME = ("source", "scheduler", "assemble-groups", "assemble-batches", "trainer")
ROLLOUT = ("agent", "env", "inference")
SKIPPED = 4
"""The first versions, while the episodes begin."""
LIMIT_S = 400.0


def recipe() -> Recipe:
    """Episodes of two turns; 128 of them are live, and a batch has 16."""
    here = "tests.scale.slow_parts"
    return Recipe.model_validate(
        {
            "name": "two-regions",
            "tasks": {
                "use": "count",
                "samples": 4,
                "max_turns": 2,
                "max_tokens": 16,
                "deadline_s": 600,
            },
            "agents": {"default": {"use": "tests.bench.agents:timed"}},
            "environments": {
                "default": {"use": "null", "slots": 256, "options": {"turns": 2}},
            },
            "scheduler": {"live_episodes": 128},
            "policies": {
                "default": {
                    "model": "tiny-llama",
                    "engine": {"use": f"{here}:LongGenerations", "slots": 256},
                    "sampling": {"max_tokens": 8},
                    "batches": {"groups": 4, "max_staleness": 64},
                    "groups": {"advantage": f"{here}:alternating"},
                    "training": {"loss": f"{here}:LongTraining"},
                }
            },
        }
    )


@dataclass
class RegionResult:
    """What a run did, after the first versions."""

    wait_fraction: float
    version_s: float
    turn_s: float
    """Median time of a turn, generation and environment."""


@contextmanager
def blobs_over_http(folder: Path) -> Iterator[int]:
    """Serves the blob store's files. Returns the port."""
    handler = partial(_Quiet, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()


class _Quiet(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # The proxy loses what is under way when a connection ends.

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@asynccontextmanager
async def a_link(target: int, bytes_per_s: float) -> AsyncIterator[Proxy]:
    """A proxy that delays, and lets only so much through."""
    proxy = Proxy(target)
    proxy.delay_s, proxy.bytes_per_s = DELAY_S, bytes_per_s
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.close()


@asynccontextmanager
async def clusters(folder: Path, *, far: bool) -> AsyncIterator[tuple[ClusterConfig, ...]]:
    """Yields how those at home reach the cluster, and how the rollout side does."""
    servers = Cluster(folder / "cluster", 1)
    blobs = folder / "blobs"
    blobs.mkdir()
    for name in ("home", "far"):
        (folder / name).mkdir()
    try:
        await servers.start()
        home = ClusterConfig(folder / "home", blobs=str(blobs))
        home = home.connected(servers.direct, servers.registry_url)
        if not far:
            yield home, replace(home, state=folder / "far")
            return
        async with AsyncExitStack() as stack:
            port = stack.enter_context(blobs_over_http(blobs))
            size = 463_200  # tiny-llama in float32
            weights = await stack.enter_async_context(a_link(port, size / DELTA_S))
            url = urlsplit(servers.registry_url)
            assert url.port is not None
            registry = await stack.enter_async_context(a_link(url.port, LINK_BYTES_PER_S))
            kafka = servers.brokers[0].proxy
            kafka.delay_s, kafka.bytes_per_s = DELAY_S, LINK_BYTES_PER_S
            yield (
                home,
                ClusterConfig(
                    folder / "far",
                    servers.bootstrap_servers,
                    f"http://127.0.0.1:{registry.port}{url.path}",
                    f"http://127.0.0.1:{weights.port}",
                ),
            )
    finally:
        await servers.close()


async def measure(versions: int, *, far: bool) -> RegionResult:
    """Makes a run until it has so many versions."""
    with TemporaryDirectory(prefix="headrace-regions-") as folder:
        async with (
            clusters(Path(folder), far=far) as (home, away),
            deployed(home, recipe()) as deployment,
        ):
            cluster = replace(away, namespace=deployment.cluster.namespace)
            rollout = Deployment(deployment.recipe, cluster, deployment.log)
            async with deployment.serving(*HOME), rollout.serving(*ROLLOUT):
                async with asyncio.timeout(LIMIT_S):
                    return await _follow(deployment, versions)


async def _follow(deployment: Deployment, versions: int) -> RegionResult:
    published: list[PolicyPublished] = []
    moments: list[float] = []
    async with deployment.following(POLICIES) as deliveries:
        async for delivery in deliveries:
            assert isinstance(delivery.event, PolicyPublished)
            published.append(delivery.event)
            moments.append(delivery.recorded_at)
            if delivery.event.version >= versions:
                break
    turns: list[float] = []
    async with deployment.following(TRAJECTORIES) as deliveries:
        async for delivery in deliveries:
            assert isinstance(delivery.event, TrajectoryRecorded)
            turns += [ms for name, ms in delivery.event.metrics.items() if name.startswith("turn")]
            if len(turns) >= 2 * 16 * (versions - 2):
                break
    taken_s = moments[-1] - moments[SKIPPED]
    waited_s = sum(one.wait_s for one in published[SKIPPED + 1 :])
    return RegionResult(waited_s / taken_s, taken_s / (versions - SKIPPED), median(turns) / 1000)


def main() -> None:
    """Alternates the runs, and prints a table."""
    parser = argparse.ArgumentParser(prog="python -m tests.scale.two_regions", description=__doc__)
    parser.add_argument("--versions", type=int, default=16, help="of each run; default 16")
    parser.add_argument("--repeat", type=int, default=2, help="pairs of runs; default 2")
    options = parser.parse_args()
    print(
        "| rollout side | trainer's wait fraction | a version | a turn, median |\n|---|---|---|---|"
    )
    for _ in range(options.repeat):
        for far in (False, True):
            found = asyncio.run(measure(options.versions, far=far))
            name = "far" if far else "home"
            print(
                f"| {name} | {found.wait_fraction:.3f} | {found.version_s:.2f} s "
                f"| {found.turn_s:.2f} s |",
                flush=True,
            )
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
