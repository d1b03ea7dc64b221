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
    print_table,
)


@click.command()
@click.option(
    "--metrics",
    is_flag=True,
    help="Print every metric of each policy's newest version, with a curve of the last 64.",
)
@json_option
@cluster_options
def status(metrics: bool, as_json: bool, **options: Any) -> None:
    """Show the status of a run.

    Prints its state, versions, rewards, the figures to steer training by, tasks, lag and dead
    letters, and the workers with their slots and what waits. Lag is the number of
    records that a service has not processed yet. A version of -1 or "-" means that no version has
    been published. docs/algorithms.md explains the metrics. The command only reads, so it is safe
    at any time.

    \b
    Examples:
      headrace status
      headrace status --metrics
      headrace status --namespace quickstart --json
    """
    from dataclasses import asdict

    from headrace.services.operate.status.run_status import run_status_of

    found = in_namespace(options, "status", run_status_of)
    tree = asdict(found)
    if not metrics:
        del tree["metrics"]
    if as_json:
        print_json(tree)
    elif metrics:
        print_table(("policy", "metric", "newest", "last 64 versions"), found.metric_rows())
    else:
        echo("\n".join(found.lines()))
