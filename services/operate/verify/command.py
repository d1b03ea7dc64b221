"""`headrace verify`: checks that nothing was lost or doubled."""

from __future__ import annotations

from typing import Any

import click

from headrace.services.operate.options import (
    cluster_options,
    echo,
    in_namespace,
    json_option,
    print_json,
    quiet_option,
    say_unless,
)


@click.command()
@quiet_option
@json_option
@cluster_options
def verify(quiet: bool, as_json: bool, **options: Any) -> None:
    """Check the invariants of a run: that nothing was lost or doubled.

    Reads all records of the namespace, and judges them by rules that are written apart from the
    services: each task and each episode ends once, each trajectory holds what was asked for and
    generated, each sample is trained on once or dropped with a reason, each version names its
    batch, and no failure of the infrastructure became a reward. Prints how many tasks and episodes
    were lost or doubled, how many episodes another worker has taken over, and each violation.

    While a run goes on, what is under way does not count. The command only reads, but it keeps the
    whole log in memory: docs/waiting.md says how much. It exits with 1 if something was found, and
    with 4 if retention has deleted records that it needs.

    \b
    Examples:
      headrace verify
      headrace verify --namespace quickstart --json
    """
    from headrace.services.operate.verify.verify import verify as check

    say = say_unless(quiet)
    found = in_namespace(options, "verify", lambda log, life: check(log, life, say))
    if as_json:
        counts = found.counts
        print_json(
            {
                "namespace": found.namespace,
                "ended": found.ended,
                "lost": counts.lost,
                "doubled": counts.doubled,
                "taken_over": found.taken_over,
                "tasks": counts.tasks,
                "episodes": counts.episodes,
                "under_way": counts.under_way,
                **vars(found.report),  # `asdict` breaks counters in Python 3.11.
            }
        )
    else:
        echo("\n".join(found.lines()))
    if not found.holds:
        click.get_current_context().exit(1)
