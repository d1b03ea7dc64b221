"""The command `show`: shows the whole story of one thing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    json_option,
    print_json,
    print_page,
    say,
)


@click.command()
@click.argument("identity", metavar="ID")
@click.option(
    "--fetch", "folder", metavar="FOLDER", type=click.Path(file_okay=False, path_type=Path),
    help="Write the files of a task to FOLDER: those that went in with it to FOLDER/in, and those "
    "that came out of sample 3 to FOLDER/3.",
)  # fmt: skip
@json_option
@cluster_options
def show(identity: str, folder: Path | None, as_json: bool, **options: Any) -> None:
    """Show the whole story of a task, an episode, a batch or a version, from the log.

    A task: who submitted it, its labels and files, its episodes with their attempts, turns and
    failures, its group and advantages, and the batch that trained on it or dropped it. A batch or a
    version: its samples with their trajectories, versions, rewards and advantages, what the batch
    dropped and why, the digest of the weights, the metrics, and whether the weights are in the blob
    store.

    \b
    These are the ids:
      42                     task number 42, which is its offset in `tasks`
      42/3                   the episode of sample 3 of task 42, with every exchange in full
      task:SOURCE/TASK_ID    a task by its submitter's name for it
      label:NAME=TEXT        the tasks with this label
      batch:POLICY/7         batch 7, which trains version 7
      version:POLICY/7       version 7, what it was trained on, and how it was evaluated
      TOPIC/2@17             the record at offset 17 of partition 2
      If there is only one policy, leave it out: batch:7, version:7.

    \b
    Examples:
      headrace show 42
      headrace show 42/3
      headrace show 42 --fetch files
      headrace show task:submit/map-1 --json
      headrace show batch:default/7
      headrace show version:7
      headrace show trajectories/2@17
    """
    import asyncio

    from headrace.services.operate.show.show import find_story

    story = asyncio.run(find_story(cluster_of(options), identity, folder))
    for path in story.fetched:
        say(f"wrote {path}")
    if as_json:
        print_json(story.to_tree())
    else:
        print_page(story.page())
