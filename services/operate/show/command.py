"""`show`: the whole story of one thing."""

from __future__ import annotations

from typing import Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    explain,
    json_option,
    print_json,
    print_page,
)


@click.command()
@click.argument("identity", metavar="ID")
@json_option
@cluster_options
def show(identity: str, as_json: bool, **options: Any) -> None:
    """Tell the whole story of a task, an episode, a batch or a version, from the log.

    A task: who submitted it, its episodes and their attempts, every turn, what failed and whose
    doing that was, its group and advantages, and the batch that trained or dropped it. A batch or
    version: the samples with their trajectories, versions, rewards and advantages, what was dropped
    and why, the digest, the metrics, and whether the weights are there.

    \b
    An ID is written so:
      42                     task number 42: its place in `tasks`
      42/3                   the episode of its sample 3, every exchange in full
      task:SOURCE/TASK_ID    a task by who submitted it
      batch:POLICY/7         batch 7, which trains version 7
      version:POLICY/7       version 7, and what it was trained on
      TOPIC/2@17             the record at offset 17 of partition 2

    \b
    Examples:
      headrace show 42
      headrace show 42/3
      headrace show task:submit/map-1 --json
      headrace show batch:default/7
      headrace show version:7               # where there is only one policy
      headrace show trajectories/2@17
    """
    import asyncio

    from headrace.services.operate.show.show import find_story

    story = asyncio.run(find_story(cluster_of(options), identity, explain))
    if as_json:
        print_json(story.to_tree())
    else:
        print_page(story.page())
