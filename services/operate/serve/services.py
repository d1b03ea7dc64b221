"""The services that `headrace serve` can run.

This module itself imports nothing heavy. Each loader imports its service, and what the recipe's
models and engines need, when it is called. That takes seconds if it imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.schemas.recipe.recipe import Recipe
    from headrace.services.namespace.cluster_config import ClusterConfig
    from headrace.services.worker.service_context import ServiceContext


@dataclass(frozen=True)
class ServeOptions:
    """How one process serves."""

    service: str
    policy: str | None = None
    """The policy to serve, for `POLICY_SERVICES`. None means all for inference, and the only one
    of the recipe for the others."""
    parent_fd: int | None = None
    """Reading end of the pipe from `headrace run`. It carries one line with the cluster's
    configuration, and it ends when `headrace run` does."""
    metrics_port: int = 0
    """Port of `/metrics`. 0 disables metrics."""
    metrics_address: str = "127.0.0.1"
    listen: str = "127.0.0.1:8100"
    """HOST:PORT of the gateway."""


Serve = Callable[["ServiceContext", ServeOptions, "ClusterConfig"], Coroutine[Any, Any, None]]
"""Runs a service until it has ended."""


def _source(_: Recipe) -> Serve:
    from headrace.services.tasks import source

    return lambda context, options, cluster: source.run(context)


def _evaluation(_: Recipe) -> Serve:
    from headrace.services.tasks import evaluation_source

    return lambda context, options, cluster: evaluation_source.run(context)


def _scheduler(_: Recipe) -> Serve:
    from headrace.services.scheduler import service

    return lambda context, options, cluster: service.run(context)


def _agent(_: Recipe) -> Serve:
    from headrace.services.agent import service

    return lambda context, options, cluster: service.run(context)


def _gateway(_: Recipe) -> Serve:
    from headrace.services.agent.gateway import service

    return lambda context, options, cluster: service.run(context, options.listen)


def _env(_: Recipe) -> Serve:
    from headrace.services.env import service

    return lambda context, options, cluster: service.run(context)


def _inference(recipe: Recipe) -> Serve:
    from headrace.services.inference import service

    service.prepare(recipe)
    return lambda context, options, cluster: service.run(context, options.policy)


def _assemble_groups(_: Recipe) -> Serve:
    from headrace.stream_jobs import assemble_groups

    def serve(
        context: ServiceContext, _: ServeOptions, cluster: ClusterConfig
    ) -> Coroutine[Any, Any, None]:
        assert cluster.bootstrap_servers is not None
        return assemble_groups.run(context, cluster.bootstrap_servers, cluster.kafka_properties)

    return serve


def _assemble_batches(_: Recipe) -> Serve:
    from headrace.stream_jobs import assemble_batches

    return lambda context, options, cluster: assemble_batches.run(context, options.policy)


def _trainer(recipe: Recipe) -> Serve:
    from headrace.trainer import service

    service.prepare(recipe)
    return lambda context, options, cluster: service.run(context, options.policy)


SERVICES: dict[str, Callable[[Recipe], Serve]] = {
    "source": _source,
    "evaluation": _evaluation,
    "scheduler": _scheduler,
    "agent": _agent,
    "gateway": _gateway,
    "env": _env,
    "inference": _inference,
    "assemble-groups": _assemble_groups,
    "assemble-batches": _assemble_batches,
    "trainer": _trainer,
}
POLICY_SERVICES = ("inference", "assemble-batches", "trainer")
"""Services that take `--policy`."""
