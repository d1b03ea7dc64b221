"""`headrace end`: ends a run for good."""

from __future__ import annotations

from typing import Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    echo,
    json_option,
    print_json,
    quiet_option,
)


@click.command()
@click.option("--reason", default="headrace end", show_default=True, help="Why, for people.")
@quiet_option
@json_option
@cluster_options
def end(reason: str, quiet: bool, as_json: bool, **options: Any) -> None:
    """End a run for good: the one of --namespace, or the newest that has not ended.

    A run that goes on elsewhere ends as if its `stop` rule held. For a paused run, the command
    starts the local stack if needed, cancels the open tasks, and stops what it started. Everything
    that is recorded stays, and can be shown, replayed and evaluated. If the run has ended already,
    the command says so and exits with code 0. A run that has ended can't continue: the next
    `headrace run` takes the namespace <name>-2.

    \b
    Examples:
      headrace end
      headrace end --namespace exp-7 --reason 'wrong reward'
    """
    import asyncio

    from headrace.services.operate.end.end import end_run

    ended = asyncio.run(end_run(cluster_of(options), reason, quiet=quiet))
    if as_json:
        print_json({"namespace": ended.namespace, "reason": ended.reason})
    else:
        echo(f"{ended.namespace}: ended by {ended.reason}")
