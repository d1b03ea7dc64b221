"""`headrace dashboard`: shows a run in a browser."""

from __future__ import annotations

from typing import Any

import click

from headrace.services.operate.options import cluster_of, cluster_options, echo, say


@click.command()
@click.option(
    "--port", metavar="PORT", type=click.IntRange(0, 65_535), default=0, show_default=True,
    help="Port of the address. 0 takes a free one.",
)  # fmt: skip
@click.option(
    "--host", metavar="HOST", default="127.0.0.1", show_default=True,
    help="Address on which the dashboard listens. Traffic is not encrypted: for another machine, "
    "use a tunnel such as ssh -L.",
)  # fmt: skip
@click.option(
    "--allowed-host", "allowed_hosts", metavar="NAME", multiple=True,
    help="A further name by which browsers reach the dashboard. Repeatable.",
)  # fmt: skip
@click.option(
    "--read-only", is_flag=True, help="Offer no actions: nothing can be changed from the page."
)
@click.option("--parent-fd", type=int, hidden=True, help="The pipe of `headrace run`.")
@cluster_options
@click.pass_obj
def dashboard(
    debug: bool,
    /,
    port: int,
    host: str,
    allowed_hosts: tuple[str, ...],
    read_only: bool,
    parent_fd: int | None,
    **options: Any,
) -> None:
    """Show a run in a browser: curves, versions, groups, trajectories and workers.

    Prints an address with a token, and serves until Ctrl-C. Whoever has the address can read the
    whole run, and can cancel tasks unless --read-only is given. The run may be live, paused or
    ended; without --namespace it is the run that started last. If its local stack rests, the
    command starts it and stops it again. The dashboard only reads the log: it joins no consumer
    group, writes nothing unless you ask for an action, and a run does not notice it.

    \b
    Examples:
      headrace dashboard
      headrace dashboard --namespace exp-7 --port 8080 --read-only
      headrace dashboard --bootstrap-servers broker:9092 --registry-url http://registry:8081
    """
    import asyncio
    import sys

    from headrace.services.operate.dashboard.dashboard import (
        Address,
        serve_dashboard,
    )
    from headrace.services.operate.serve.process_setup import configure_logging
    from headrace.services.operate.serve.stopper import Stopper

    cluster = cluster_of(options)
    if parent_fd is not None:
        configure_logging("dashboard", debug=debug)

    async def serve() -> str:
        stopping = asyncio.Event()
        stopper = Stopper(stopping, asyncio.Event(), None)
        stopper.stop_on_signals()
        if parent_fd is not None:
            stopper.stop_with_parent(parent_fd)
        await serve_dashboard(
            cluster,
            Address(host, port, allowed_hosts),
            read_only=read_only,
            say=say,
            on_url=echo,
            stopping=stopping,
        )
        return stopper.reason

    if asyncio.run(serve()) == "SIGINT":
        sys.exit(130)
