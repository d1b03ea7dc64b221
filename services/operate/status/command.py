"""`headrace status`: shows the status of a run."""

from __future__ import annotations

from typing import Any

import click

from headrace.services.operate.options import (
    cluster_options,
    echo,
    in_namespace,
    json_option,
    print_json,
)


@click.command()
@json_option
@cluster_options
def status(as_json: bool, **options: Any) -> None:
    """Show the status of a run.

    Prints its state, versions, rewards, tasks, lag and dead letters. Lag is the number of records
    that a service has not processed yet. A version of -1 or "-" means that no version has been
    published. The command only reads, so it is safe at any time.

    \b
    Examples:
      headrace status
      headrace status --namespace quickstart --json
    """
    from dataclasses import asdict

    from headrace.services.operate.status.run_status import run_status_of

    found = in_namespace(options, "status", run_status_of)
    if as_json:
        print_json(asdict(found))
    else:
        echo("\n".join(found.lines()))
