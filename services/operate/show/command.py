"""The command `show`: shows the whole story of one thing."""

from __future__ import annotations

from typing import Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    json_option,
    print_json,
    print_page,
)


@click.command()
@click.argument("identity", metavar="ID")
@json_option
@cluster_options
def show(identity: str, as_json: bool, **options: Any) -> None:
    """Show the whole story of a task, an episode, a batch or a version, from the log.

    A task: who submitted it, its episodes with their attempts, turns and failures, its group and
    advantages, and the batch that trained on it or dropped it. A batch or a version: its samples
    with their trajectories, versions, rewards and advantages, what the batch dropped and why, the
    digest of the weights, the metrics, and whether the weights are in the blob store.

    \b
    These are the ids:
      42                     task number 42, which is its offset in `tasks`
      42/3                   the episode of sample 3 of task 42, with every exchange in full
      task:SOURCE/TASK_ID    a task by its submitter's name for it
      batch:POLICY/7         batch 7, which trains version 7
      version:POLICY/7       version 7, what it was trained on, and how it was evaluated
      TOPIC/2@17             the record at offset 17 of partition 2
      If there is only one policy, leave it out: batch:7, version:7.

    \b
    Examples:
      headrace show 42
      headrace show 42/3
      headrace show task:submit/map-1 --json
      headrace show batch:default/7
      headrace show version:7
      headrace show trajectories/2@17
    """
    import asyncio

    from headrace.services.operate.show.show import find_story

    story = asyncio.run(find_story(cluster_of(options), identity))
    if as_json:
        print_json(story.to_tree())
    else:
        print_page(story.page())
