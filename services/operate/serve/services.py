"""The services that `headrace serve` can run. At module level this imports nothing heavy.

`load_service` also imports the engines and models of the recipe. Importing torch takes seconds. It
raises UsageError if an engine or a model is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from importlib import import_module
from typing import TYPE_CHECKING, Any

from headrace.schemas.recipe.resources.service_names import POLICY_SERVICES as POLICY_SERVICES
from headrace.schemas.recipe.resources.service_names import SERVICES as SERVICES

if TYPE_CHECKING:
    from headrace.schemas.recipe.recipe import Recipe
    from headrace.services.namespace.cluster_config import ClusterConfig
    from headrace.services.worker.service_context import ServiceContext

LISTEN, LISTEN_VARIABLE = "127.0.0.1:8100", "HEADRACE_GATEWAY_LISTEN"
"""HOST:PORT of the gateway, and the environment variable that has another one."""
_PLAIN = {
    "source": "headrace.services.tasks.source",
    "evaluation": "headrace.services.tasks.evaluation_source",
    "scheduler": "headrace.services.scheduler.service",
    "agent": "headrace.services.agent.service",
    "env": "headrace.services.env.service",
    "project-turns": "headrace.stream_jobs.turn_rows.project_turns",
}
"""The modules of services that need nothing but their context."""
Serve = Callable[["ServiceContext", "ClusterConfig"], Coroutine[Any, Any, None]]
"""Runs a service until it ends."""


def load_service(name: str, recipe: Recipe, policy: str | None = None, listen: str = "") -> Serve:
    """Imports a service. `listen` is HOST:PORT of the gateway."""
    if name in _PLAIN:
        run = import_module(_PLAIN[name]).run
        return lambda context, cluster: run(context)
    match name:
        case "gateway":
            from headrace.services.agent.gateway import service as gateway

            return lambda context, cluster: gateway.run(context, listen)
        case "inference":
            from headrace.services.inference import service as inference

            inference.prepare(recipe)
            return lambda context, cluster: inference.run(context, policy)
        case "assemble-groups":
            from headrace.stream_jobs import assemble_groups

            return lambda context, cluster: assemble_groups.run(
                context, str(cluster.bootstrap_servers), cluster.broker_properties()
            )
        case "assemble-batches":
            from headrace.stream_jobs import assemble_batches

            return lambda context, cluster: assemble_batches.run(context, policy)
        case "item-statistics":
            from headrace.stream_jobs import measure_items

            return lambda context, cluster: measure_items.run(context, policy)
        case "trainer":
            from headrace.trainer import service as trainer

            trainer.prepare(recipe)
            return lambda context, cluster: trainer.run(context, policy)
        case _:
            raise ValueError(f"{name!r} is not a service: choose from {', '.join(SERVICES)}")
