"""`headrace submit`: submits tasks from JSON lines."""

from __future__ import annotations

from typing import Any, TextIO

import click

from headrace.services.operate.options import (
    cluster_options,
    echo,
    in_namespace,
    json_option,
    print_json,
)


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
    from headrace.services.operate.submit.task_lines import read_tasks, send_tasks

    lines = file.read().splitlines()
    sent = in_namespace(
        options,
        f"submit-{source}",
        lambda log, life: send_tasks(log, read_tasks(life.recipe(), source, lines)),
        writing=True,
    )
    for number, task_id in sent:
        if as_json:
            print_json({"task": number, "source": source, "task_id": task_id}, indent=None)
        else:
            echo(f"{number}\t{task_id}")
