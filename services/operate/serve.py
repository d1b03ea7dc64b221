"""The composition root: one service of a run, as one process.

Heavy imports come first, then the place: a child of `run` loads torch while the broker is still
starting, and is told over its pipe where to connect. The process ends in order when it is told to
(SIGTERM, Ctrl-C, the run's end, its parent's death), and by force 10 s later.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import Topics
from headrace.services.kafka.broker import Broker
from headrace.services.namespace.apply import require_same
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import connect, locate
from headrace.services.namespace.run_life import RunLife, follow_life
from headrace.services.worker.service_context import ServiceContext

logger = logging.getLogger(__name__)

DRAIN_S = 10.0
"""From the order to stop to the end by force."""
SERVICES = {
    "source": "headrace.services.tasks.source",
    "evaluation": "headrace.services.tasks.evaluation_source",
    "scheduler": "headrace.services.scheduler.service",
    "agent": "headrace.services.agent.service",
    "gateway": "headrace.services.agent.gateway.service",
    "env": "headrace.services.env.service",
    "inference": "headrace.services.inference.service",
    "assemble-groups": "headrace.stream_jobs.assemble_groups",
    "assemble-batches": "headrace.stream_jobs.assemble_batches",
    "trainer": "headrace.trainer.service",
}
"""Service to the module whose `run` it is. Its `prepare`, if any, imports what the recipe needs."""
GC_THRESHOLD = 10_000
"""Allocations between two collections. Live episodes are many small objects, none of them garbage,
and Python's 700 has them looked through several times a second."""
OF_A_POLICY = ("inference", "assemble-batches", "trainer")
"""Services that take `--policy`: inference serves all without it, the others the only one."""
THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS",
)  # fmt: skip


@dataclass(frozen=True)
class ServeOptions:
    """How one process serves."""

    service: str
    policy: str | None = None
    """For services that take one (`OF_A_POLICY`)."""
    parent_fd: int | None = None
    """The pipe from `run`: a line that is the place, and its end when `run` is gone."""
    metrics_port: int = 0
    """Where `/metrics` is served; 0 serves none."""
    metrics_address: str = "127.0.0.1"
    listen: str = "127.0.0.1:8100"
    """Where the gateway's clients come in."""


def serve(options: ServeOptions, recipe: Recipe, cluster: ClusterConfig) -> None:
    """Runs a service to its end. HeadraceError where it failed."""
    check_policy(options, recipe)
    set_threads(recipe, options)
    if options.metrics_port:
        from prometheus_client import start_http_server

        start_http_server(options.metrics_port, addr=options.metrics_address)
    module = importlib.import_module(SERVICES[options.service])
    prepare: Callable[[Recipe], None] | None = getattr(module, "prepare", None)
    if prepare is not None:
        prepare(recipe)
    if options.parent_fd is None:
        cluster = locate(cluster)
    else:
        line = read_line(options.parent_fd)
        if not line:
            logger.info("the parent is gone before it said where to connect")
            return
        cluster = ClusterConfig.from_json(line)
        hold_local_stack(cluster)
    spare_the_collector()
    try:
        asyncio.run(_serve(module.run, options, recipe, cluster))
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def hold_local_stack(cluster: ClusterConfig) -> None:
    """Has the run's own broker outlive this process, should `run` be killed: see `local.hold`."""
    from headrace.infra import local

    cluster.state.mkdir(parents=True, exist_ok=True)
    local.hold(cluster.state)


def spare_the_collector() -> None:
    """Has the cyclic collector leave alone what is imported, and come more rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD)


def check_policy(options: ServeOptions, recipe: Recipe) -> None:
    """UsageError where `--policy` names none of the recipe, or the service takes none."""
    if options.policy is None:
        return
    if options.service not in OF_A_POLICY:
        raise UsageError(f"--policy goes with {', '.join(OF_A_POLICY)}, not {options.service}")
    if options.policy not in recipe.policies:
        raise UsageError(f"no policy {options.policy!r} among {', '.join(recipe.policies)}")


def set_threads(recipe: Recipe, options: ServeOptions) -> None:
    """Bounds the numerical libraries' threads: they read it once, when they are imported."""
    policies = [
        policy
        for name, policy in recipe.policies.items()
        if options.policy is None or name == options.policy
    ]
    threads = 1
    if options.service == "inference":
        threads = max(policy.engine.threads for policy in policies)
    elif options.service == "trainer":
        threads = max((p.training.threads for p in policies if p.training is not None), default=1)
    for variable in THREAD_VARIABLES:
        os.environ.setdefault(variable, str(threads))


def read_line(descriptor: int) -> str:
    """One line from a pipe, unbuffered; empty at its end."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(descriptor, 1)
        if not byte:
            return ""
        line += byte
    return line.decode()


class _Stopper:
    """Everything that ends the process, and the bound on how long that may take."""

    def __init__(self, stopping: asyncio.Event) -> None:
        self._stopping = stopping
        self._loop = asyncio.get_running_loop()

    def stop(self, reason: str) -> None:
        """Orders the service to stop. A second Ctrl-C ends the process at once."""
        if self._stopping.is_set():
            if reason == "SIGINT":
                os._exit(130)
            return
        logger.info("stopping: %s", reason)
        self._stopping.set()
        # A thread: the loop itself may be what hangs.
        timer = threading.Timer(DRAIN_S, _end_by_force)
        timer.daemon = True
        timer.start()

    def on_signals(self) -> None:
        """SIGTERM and Ctrl-C stop the service."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self.stop, number.name)

    def on_parents_death(self, descriptor: int) -> None:
        """The pipe's end stops the service; a thread waits for it, whatever the loop does."""

        def wait() -> None:
            while os.read(descriptor, 1024):
                pass
            with suppress(RuntimeError):  # the loop is closed: the service has ended already
                self._loop.call_soon_threadsafe(self.stop, "the parent is gone")

        threading.Thread(target=wait, name="parent", daemon=True).start()


def _end_by_force() -> None:
    logger.critical("still not ended %g s after the order to stop: ending by force", DRAIN_S)
    logging.shutdown()
    os._exit(1)


async def _serve(
    run: Callable[..., Any], options: ServeOptions, recipe: Recipe, cluster: ClusterConfig
) -> None:
    stopping, ending = asyncio.Event(), asyncio.Event()
    stopper = _Stopper(stopping)
    stopper.on_signals()
    if options.parent_fd is not None:
        stopper.on_parents_death(options.parent_fd)
    namespace = cluster.namespace or recipe.name
    worker_id = f"{options.service}-{socket.gethostname()}-{os.getpid()}"

    async with connect(cluster, worker_id) as connection:
        topics = Topics(namespace, tuple(recipe.policies), recipe.partitions)
        await require_topics(connection.broker, topics)
        log = await connection.writing_log(topics)
        folder = cluster.folder(namespace)
        folder.mkdir(parents=True, exist_ok=True)
        context = ServiceContext(
            log, recipe, cluster.open_blobs(), worker_id, folder, stopping, ending
        )
        await _run_beside_life(run, options, context, cluster, stopper)


async def require_topics(broker: Broker, topics: Topics) -> None:
    """UsageError where the namespace was never applied, or with other numbers of partitions."""
    existing = await broker.list_topics()
    for placed in topics:
        found = existing.get(placed.name)
        if found is None:
            raise UsageError(
                f"the broker has no topic {placed.name}: `headrace apply RECIPE` makes the "
                "namespace (see --namespace)"
            )
        if found != placed.partitions:
            raise UsageError(
                f"topic {placed.name} has {found} partitions, and the recipe says "
                f"{placed.partitions}: a namespace keeps its partitions; use another --namespace"
            )


async def _run_beside_life(
    run: Callable[..., Any],
    options: ServeOptions,
    context: ServiceContext,
    cluster: ClusterConfig,
    stopper: _Stopper,
) -> None:
    """Runs the service while following the run's life. Returns as the service ends."""
    known: asyncio.Future[RunLife] = asyncio.get_running_loop().create_future()
    follower = asyncio.create_task(_follow(context, stopper, known))
    try:
        first: tuple[asyncio.Future[Any], ...] = (follower, known)
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        if follower.done():
            follower.result()
        check_run(known.result(), context.recipe, context.namespace)
        if context.stopping.is_set():
            return
        logger.info("serving %s in namespace %s", options.service, context.namespace)
        service: asyncio.Task[None] = asyncio.create_task(
            run(context, **_arguments(run, options, cluster))
        )
        await asyncio.wait({service, follower}, return_when=asyncio.FIRST_COMPLETED)
        if not service.done():
            stopper.stop("the run's life can't be followed any more")
        await service
        if follower.done():
            follower.result()
        logger.info("ended in order")
    finally:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)


async def _follow(
    context: ServiceContext, stopper: _Stopper, known: asyncio.Future[RunLife]
) -> None:
    async with aclosing(follow_life(context.log)) as lives:
        async for life in lives:
            if life.ending is not None:
                context.ending.set()
            if life.ended is not None:
                stopper.stop("the run has ended")
            if not known.done():
                known.set_result(life)


def check_run(life: RunLife, recipe: Recipe, namespace: str) -> None:
    """UsageError where the run has not started, or is one of another recipe."""
    if life.started is None:
        raise UsageError(
            f"no run has started in namespace {namespace}: `headrace apply RECIPE` first"
        )
    require_same(life, recipe, namespace)


def _arguments(
    run: Callable[..., Any], options: ServeOptions, cluster: ClusterConfig
) -> dict[str, Any]:
    """What the service's `run` takes beside its context."""
    offered = {
        "policy": options.policy,
        "listen": options.listen,
        "bootstrap_servers": cluster.bootstrap_servers,
        "properties": cluster.kafka_properties,
    }
    return {name: offered[name] for name in inspect.signature(run).parameters if name in offered}


def configure_logging(service: str, *, debug: bool = False) -> None:
    """One line a message to stderr: time, level, service, message. UTC."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(
        f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {service} %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    logging.getLogger("headrace.services.kafka.librdkafka").setLevel(logging.NOTSET)
    root.setLevel(logging.DEBUG if debug else logging.INFO)
    for loud in ("aiokafka", "faust", "httpx", "httpx2", "mode", "urllib3", "vllm"):
        logging.getLogger(loud).setLevel(logging.WARNING)
