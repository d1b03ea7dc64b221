"""`headrace serve`: runs one service."""

from __future__ import annotations

from typing import Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    metrics_options,
    set_option,
)
from headrace.services.operate.serve.services import LISTEN, LISTEN_VARIABLE, SERVICES


@click.command()
@click.argument("service", type=click.Choice(SERVICES))
@click.argument("recipe")
@set_option
@click.option(
    "--policy", metavar="NAME",
    help="Policy of an assemble-batches, item-statistics, trainer or inference process. [default: "
    "the only one, or all policies for inference]",
)  # fmt: skip
@metrics_options
@click.option(
    "--listen", metavar="HOST:PORT", envvar=LISTEN_VARIABLE, default=LISTEN,
    show_default=True, show_envvar=True, help="Address of the gateway, for clients.",
)  # fmt: skip
@click.option(
    "--drain", is_flag=True,
    help="On the first SIGTERM, an inference process finishes the prompts that it has begun, hands "
    "the others to other processes, and then ends, after at most workers.drain_s seconds. The "
    "second SIGTERM stops it within 10 s.",
)  # fmt: skip
@click.option("--parent-fd", type=int, hidden=True, help="The pipe of `headrace run`.")
@cluster_options
@click.pass_obj
def serve(
    debug: bool,
    /,
    service: str,
    recipe: str,
    settings: tuple[str, ...],
    policy: str | None,
    metrics_port: int,
    metrics_address: str,
    listen: str,
    drain: bool,
    parent_fd: int | None,
    **options: Any,
) -> None:
    """Run one SERVICE of a RECIPE's run as one process.

    First create the namespace with `headrace apply` and the same recipe. You can start any number
    of agent, gateway, env, inference and assemble-groups processes: they share the work. Of each
    other service one process is active; a second one waits, or replaces the first. A gateway is an
    agent that clients of the OpenAI API can reach. SIGTERM, Ctrl-C and the end of the run stop the
    process cleanly; if that takes more than 10 s, it exits by force. SIGUSR1 drains an inference
    process, as --drain says.

    \b
    Examples:
      headrace serve agent quickstart
      headrace serve inference my.toml --bootstrap-servers broker:9092 \\
          --registry-url http://registry:8081 --metrics-port 9100
      headrace serve trainer my.toml --policy solver
    """
    from headrace.services.namespace.cluster_config import read_recipe
    from headrace.services.operate.serve.process_setup import configure_logging
    from headrace.services.operate.serve.serve import serve as serve_service

    configure_logging(service, debug=debug)
    cluster, resolved = cluster_of(options), read_recipe(recipe, settings)
    metrics = (metrics_address, metrics_port)
    serve_service(
        service, resolved, cluster,
        policy=policy, listen=listen, metrics=metrics, parent_fd=parent_fd,
        drain=drain,
    )  # fmt: skip
