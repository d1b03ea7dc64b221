"""`headrace doctor`: finds out what is wrong, and what a run waits for."""

from __future__ import annotations

from typing import Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    echo,
    json_option,
    print_json,
    set_option,
)


@click.command()
@click.argument("recipe", required=False)
@set_option
@json_option
@cluster_options
def doctor(recipe: str | None, settings: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Find out what is wrong, and what a run waits for.

    Checks whether Kafka, the schema registry and the blob store answer, and looks at versions,
    permissions, disks, memory, GPUs, clocks and the retention of topics. Each line is ok, a warning
    or a problem, and says what to do. Then it prints who waits for whom: the trainer for a batch,
    the batch for groups, these for episodes, and so on, since when, and the likely cause.

    RECIPE is needed only for a run that has not begun yet. The command only reads, so it is safe
    at any time. It exits with 1 if it found a problem. docs/waiting.md explains what it prints.

    \b
    Examples:
      headrace doctor
      headrace doctor my.toml
      headrace doctor --namespace quickstart --json
    """
    import asyncio

    from headrace.services.namespace.cluster_config import read_recipe
    from headrace.services.operate.doctor.doctor import diagnose

    resolved = None if recipe is None else read_recipe(recipe, settings)
    found = asyncio.run(diagnose(cluster_of(options), resolved))
    if as_json:
        print_json(found.to_tree())
    else:
        for one in found.findings:
            echo(one.line())
        for line in found.lines:
            echo(line)
    if found.has_problem:
        click.get_current_context().exit(1)
