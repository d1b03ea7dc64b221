"""`headrace cancel`: cancels tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import (
    cluster_options,
    echo,
    in_namespace,
    json_option,
    print_json,
)

if TYPE_CHECKING:
    from headrace.services.log.event_log import EventLog
    from headrace.services.namespace.run_life import RunLife
    from headrace.services.tasks.cancellation import TaskStatus

_EFFECTS = {
    "queued": "cancelled before it started",
    "running": "cancelled: its episodes end now",
    "ended": "had already ended: nothing changes",
    "unknown": "not submitted yet: it will not run if it is submitted later",
    "refused": "no key of its tenant has signed it, so it does not run: nothing changes",
}
"""What a cancellation does, by the state of the task."""


@click.command()
@click.argument("tasks", metavar="[TASK]...", nargs=-1)
@click.option(
    "--source", metavar="NAME",
    help="Treat each TASK as a task_id of this source instead of as a task number.",
)  # fmt: skip
@click.option("--all-queued", is_flag=True, help="Cancel every task that has not started.")
@click.option("--reason", default="", help="Text that is recorded with the cancelled episodes.")
@json_option
@cluster_options
def cancel(
    tasks: tuple[str, ...],
    source: str | None,
    all_queued: bool,
    reason: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Cancel TASKs by number, or by source and task_id.

    The number of a task is what `headrace submit` printed. A queued task does not start, and a
    running task ends. Cancelled tasks get no reward and are not trained on. Prints each task's
    number, source, task_id and what happens to it. Cancelling a task twice has no further effect.

    \b
    Examples:
      headrace cancel 17 18 --reason "wrong image"
      headrace cancel --source team-search query-17
      headrace cancel --all-queued --namespace exp-7
    """
    from headrace.services.tasks.cancellation import check_named, find_tasks, send_cancellations

    async def work(log: EventLog, _: RunLife) -> list[TaskStatus]:
        statuses = await find_tasks(log, tasks, source, all_queued=all_queued)
        await send_cancellations(log, statuses, reason)
        return statuses

    check_named(tasks, source, all_queued=all_queued)
    left = 0
    for one in in_namespace(options, "cancel", work, writing=True):
        if one.state == "left":
            left += 1
        elif as_json:
            tree = {"task": one.number, "source": one.source, "task_id": one.task_id}
            print_json({**tree, "state": one.state}, indent=None)
        else:
            number = "-" if one.number is None else one.number
            limited = f" for {one.counts_for}" if one.counts_for else ""
            effect = f"{_EFFECTS[one.state]}{limited}"
            echo(f"{number}\t{one.source}\t{one.task_id}\t{effect}")
    if left:
        echo(f"{left:,} queued tasks are not cancelled: your key may not act for them", err=True)
