"""`up`, `down`, `apply`, `submit`, `cancel`: what changes a broker or a namespace."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    explain,
    json_option,
    print_json,
    set_option,
    state_option,
)

_PORT = click.IntRange(1, 65_535)


@click.command()
@state_option
@click.option("--kafka-port", type=_PORT, help="[default: the one it had, 9092, or a free one]")
@click.option("--registry-port", type=_PORT, help="[default: the one it had, 8081, or a free one]")
@json_option
def up(state: str, kafka_port: int | None, registry_port: int | None, as_json: bool) -> None:
    """Start a real Kafka and a real schema registry on this machine, on 127.0.0.1 only.

    They keep their data in --state and run until `headrace down`. Commands that are told no
    --bootstrap-servers use them.

    \b
    Examples:
      headrace up
      eval "$(headrace up)"               # sets HEADRACE_BOOTSTRAP_SERVERS, …
    """
    from headrace.infra import local

    stack = local.up(
        Path(state), on_progress=explain, kafka_port=kafka_port, registry_port=registry_port
    )
    if as_json:
        print_json(
            {"bootstrap_servers": stack.bootstrap_servers, "registry_url": stack.registry_url}
        )
        return
    click.echo(f"export HEADRACE_BOOTSTRAP_SERVERS={stack.bootstrap_servers}")
    click.echo(f"export HEADRACE_REGISTRY_URL={stack.registry_url}")


@click.command()
@state_option
@click.option("--wipe", is_flag=True, help="Delete its data too: every topic, for ever.")
def down(state: str, wipe: bool) -> None:
    """Stop the local stack of --state.

    \b
    Examples:
      headrace down
      headrace down --wipe
    """
    from headrace.infra import local

    explain("stopped" if local.down(Path(state), wipe=wipe) else f"nothing ran in {state}")


@click.command()
@click.argument("recipe")
@set_option
@json_option
@cluster_options
def apply(recipe: str, settings: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Make the namespace of a RECIPE: topics, schemas, first offsets; and start its run.

    Once done, `headrace serve` processes may join from anywhere. Idempotent: what is there stays,
    and a namespace keeps its recipe.

    \b
    Examples:
      headrace apply quickstart
      headrace apply my.toml --namespace exp-7 --bootstrap-servers broker:9092 \\
          --registry-url http://registry:8081
    """
    import asyncio

    from headrace.services.namespace.cluster_config import read_recipe

    cluster, resolved = cluster_of(options), read_recipe(recipe, settings)
    namespace, state = asyncio.run(_apply(cluster, resolved))
    if as_json:
        print_json({"namespace": namespace, "state": state, "digest": resolved.digest.hex()})
    else:
        click.echo(f"{namespace}: {state}")


async def _apply(cluster: Any, recipe: Any) -> tuple[str, str]:
    from headrace.schemas.topics import Topics
    from headrace.services.namespace.apply import apply as apply_recipe
    from headrace.services.namespace.connect import connect, locate

    cluster = locate(cluster)
    namespace = cluster.namespace or recipe.name
    topics = Topics(namespace, tuple(recipe.policies), recipe.partitions)
    async with connect(cluster, "apply") as connection:
        log = await connection.writing_log(topics)
        return namespace, (await apply_recipe(log, recipe)).state


@click.command()
@click.argument("file", type=click.File("r"))
@click.option(
    "--source", default="submit", show_default=True,
    help="Who submits: of two tasks of one source and task_id, the second is a duplicate.",
)  # fmt: skip
@json_option
@cluster_options
def submit(file: TextIO, source: str, as_json: bool, **options: Any) -> None:
    """Submit tasks from a FILE of JSON lines, or from - (stdin). Prints each task's number.

    A line is an object. `payload` is what environment and agent are told; item_id, task_id, epoch,
    seed, samples, minimum, max_turns, max_tokens, deadline_s, attempts, priority, tenant, purpose,
    labels may stand beside it. What is absent comes from the run's recipe. A file submitted twice
    is recognised: the second time its tasks are duplicates.

    \b
    Examples:
      echo '{"item_id": "map-1", "payload": {"size": 4}}' | headrace submit -
      headrace submit tasks.jsonl --namespace exp-7 --source team-search
    """
    import asyncio

    lines = file.read().splitlines()
    for number, task_id in asyncio.run(_submit(cluster_of(options), source, lines)):
        if as_json:
            print_json({"task": number, "source": source, "task_id": task_id}, indent=None)
        else:
            click.echo(f"{number}\t{task_id}")


async def _submit(cluster: Any, source: str, lines: list[str]) -> list[tuple[int, str]]:
    from headrace.services.namespace.lookup import open_namespace
    from headrace.services.operate.submit import read_tasks, send_tasks

    async with open_namespace(cluster, f"submit-{source}", writing=True) as (log, life):
        return await send_tasks(log, read_tasks(life.recipe(), source, lines))


_TOLD = {
    "queued": "cancelled before it began",
    "running": "cancelled: its episodes end now",
    "ended": "had ended already: nothing changes",
    "unknown": "not submitted: it will not run, should it come",
}


@click.command()
@click.argument("tasks", metavar="[TASK]...", nargs=-1)
@click.option("--source", help="Take TASK for the ids that this source gave them, not for numbers.")
@click.option("--all-queued", is_flag=True, help="Cancel every task that waits to be started.")
@click.option("--reason", default="", help="Why: it goes into the outcomes.")
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
    """Cancel TASKs, by the numbers that `headrace submit` printed, or by --source and its ids.

    What waits is not started, what runs ends; neither is rewarded or trained on. Prints each
    task's number, source, id, and what becomes of it. Cancelling twice is as good as once.

    \b
    Examples:
      headrace cancel 17 18 --reason "wrong image"
      headrace cancel --source team-search query-17
      headrace cancel --all-queued --namespace exp-7
    """
    import asyncio

    cluster = cluster_of(options)
    for one in asyncio.run(_cancel(cluster, tasks, source, all_queued, reason)):
        if as_json:
            tree = {"task": one.number, "source": one.source, "task_id": one.task_id}
            print_json({**tree, "state": one.state}, indent=None)
        else:
            number = "-" if one.number is None else one.number
            click.echo(f"{number}\t{one.source}\t{one.task_id}\t{_TOLD[one.state]}")


async def _cancel(
    cluster: Any, tasks: tuple[str, ...], source: str | None, all_queued: bool, reason: str
) -> list[Any]:
    from headrace.services.namespace.lookup import open_namespace
    from headrace.services.tasks.cancellation import check_named, find_tasks, send_cancellations

    check_named(tasks, source, all_queued=all_queued)
    async with open_namespace(cluster, "cancel", writing=True) as (log, _):
        statuses = await find_tasks(log, tasks, source, all_queued=all_queued)
        await send_cancellations(log, statuses, reason)
        return statuses
