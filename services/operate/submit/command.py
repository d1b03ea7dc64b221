"""`headrace submit`: submits tasks from JSON lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TextIO

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    echo,
    in_namespace,
    json_option,
    print_json,
    say,
)

if TYPE_CHECKING:
    from headrace.services.log.event_log import EventLog
    from headrace.services.namespace.run_life import RunLife


@click.command()
@click.argument("file", type=click.File("r"))
@click.option(
    "--source", default="submit", show_default=True,
    help="Name of the submitter. A task with the same source and task_id as an earlier task is a "
    "duplicate and does not run.",
)  # fmt: skip
@json_option
@cluster_options
def submit(file: TextIO, source: str, as_json: bool, **options: Any) -> None:
    """Submit tasks from a FILE of JSON lines.

    If FILE is -, the command reads stdin. Each line is one JSON object. `payload` is what the
    environment and the agent receive. Optional keys are item_id, task_id, epoch, seed, samples,
    minimum, max_turns, max_tokens, deadline_s (in seconds), attempts, priority, tenant, purpose and
    labels; the run's recipe gives the defaults. Prints each task's number and task_id. If you
    submit a file twice, the tasks of the second time are duplicates. If one line is wrong, nothing
    is submitted.

    \b
    Examples:
      echo '{"item_id": "map-1", "payload": {"size": 4}}' | headrace submit -
      headrace submit tasks.jsonl --namespace exp-7 --source team-search
    """
    import asyncio

    from headrace.services.operate.run_references import fetch_models
    from headrace.services.operate.submit.task_lines import read_tasks, send_tasks

    lines = file.read().splitlines()
    cluster = cluster_of(dict(options))

    async def send(log: EventLog, life: RunLife) -> list[tuple[int, str]]:
        recipe = life.recipe()
        await asyncio.to_thread(fetch_models, recipe, cluster, say, weights=False)
        return await send_tasks(log, read_tasks(recipe, source, lines))

    sent = in_namespace(options, f"submit-{source}", send, writing=True)
    for number, task_id in sent:
        if as_json:
            print_json({"task": number, "source": source, "task_id": task_id}, indent=None)
        else:
            echo(f"{number}\t{task_id}")
