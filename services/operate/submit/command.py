"""`headrace submit`: submits tasks from JSON lines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
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
    from headrace.services.tasks.per_task import TaskSettings


def _task_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options that override keys of every line."""
    options = (
        click.option("--agent", metavar="NAME", help="Agent of the recipe."),
        click.option("--environment", metavar="NAME", help="Environment of the recipe."),
        click.option(
            "--mode", type=click.Choice(["ephemeral", "persistent"]),
            help="Whether the environment is new for each attempt, or pooled.",
        ),
        click.option("--image", help="Image of the containers. The recipe must list it."),
        click.option(
            "--option", "options_of_agent", metavar="KEY=VALUE", multiple=True,
            help="Option for the agent. The value is JSON, or else text. Repeatable.",
        ),
        click.option(
            "--environment-option", metavar="KEY=VALUE", multiple=True,
            help="Option for the environment. The value is JSON, or else text. Repeatable.",
        ),
        click.option(
            "--artifact", metavar="NAME=FILE", multiple=True,
            help="File that goes in with every task. NAME is its relative path in the environment. "
            "Repeatable.",
        ),
        click.option(
            "--collect", metavar="PATTERN", multiple=True,
            help="Files that come out of every episode, such as 'out/*'. Repeatable.",
        ),
        click.option(
            "--tenant", metavar="NAME", help="Tenant whose limits the tasks count against."
        ),
        click.option(
            "--priority", type=int, help="Of prompts that wait for a slot, the highest goes first."
        ),
        click.option(
            "--label", metavar="NAME=TEXT", multiple=True,
            help="Label that comes back in the results. Repeatable.",
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@click.argument("file", type=click.File("r"))
@click.option(
    "--source", default="submit", show_default=True,
    help="Name of the submitter. A task with the same source and task_id as an earlier task is a "
    "duplicate and does not run.",
)  # fmt: skip
@_task_options
@json_option
@cluster_options
def submit(file: TextIO, source: str, as_json: bool, **options: Any) -> None:
    """Submit tasks from a FILE of JSON lines.

    If FILE is -, the command reads stdin. Each line is one JSON object. `payload` is what the
    environment and the agent receive. These keys are optional: item_id, task_id, epoch, seed,
    agent, options, environment, mode, image, environment_options, collect, artifacts, samples,
    minimum, max_turns, max_tokens, deadline_s (in seconds), attempts, priority, tenant, purpose and
    labels. The run's recipe gives the defaults, and options of this command override the lines.

    `artifacts` are files that go in with the task: an object of names and paths, relative to the
    folder of FILE. Their bytes go to the blob store, so --blobs must name the store of the run.

    Prints each task's number and task_id. If you submit a file twice, the tasks of the second time
    are duplicates: they end as failed, with the code `duplicate`, and do not run. To run them
    again, use another --source. If one line is wrong, or the run would refuse its task, nothing is
    submitted.

    \b
    Examples:
      echo '{"item_id": "map-1", "payload": {"size": 4}}' | headrace submit -
      headrace submit tasks.jsonl --namespace exp-7 --source team-search
      headrace submit tasks.jsonl --artifact in/table.csv=table.csv --collect 'out/*' --label exp=7
    """
    import asyncio

    from headrace.errors import UsageError
    from headrace.services.models.blob_owners import owner_name
    from headrace.services.operate.run_references import fetch_models
    from headrace.services.operate.submit.task_lines import read_tasks, send_tasks

    try:
        lines = file.read().splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{file.name} is not UTF-8 text ({error}). Submit JSON lines") from None
    # The name of stdin may be a number.
    named = isinstance(file.name, str) and file.name != "<stdin>"
    folder = Path(file.name).parent if named else Path()
    overriding = _overriding(options)
    cluster = cluster_of(dict(options))

    async def send(log: EventLog, life: RunLife) -> list[tuple[int, str]]:
        recipe = life.recipe()
        life.require_open(log.topics.namespace)
        await asyncio.to_thread(fetch_models, recipe, cluster, say, weights=False)
        blobs = cluster.open_blobs(owner_name(await log.broker.cluster_id(), log.topics.namespace))
        tasks = await asyncio.to_thread(
            read_tasks, recipe, source, lines, blobs, folder=folder, overriding=overriding
        )
        return await send_tasks(log, tasks)

    sent = in_namespace(options, f"submit-{source}", send, writing=True)
    if not sent:
        say(f"{file.name} has no lines with a task, so nothing was submitted")
    for number, task_id in sent:
        if as_json:
            print_json({"task": number, "source": source, "task_id": task_id}, indent=None)
        else:
            echo(f"{number}\t{task_id}")


def _overriding(options: dict[str, Any]) -> TaskSettings:
    """Takes the options that override the lines. Raises UsageError if one is wrong."""
    from headrace.services.tasks.per_task import read_settings

    keys: dict[str, Any] = {
        name: value
        for name in ("agent", "environment", "mode", "image", "tenant", "priority")
        if (value := options.pop(name)) is not None
    }
    for name, option in (
        ("options", "options_of_agent"),
        ("environment_options", "environment_option"),
    ):
        if given := options.pop(option):
            keys[name] = {key: _value(text) for key, text in _pairs(given)}
    if files := options.pop("artifact"):
        keys["artifacts"] = {name: str(Path(path).absolute()) for name, path in _pairs(files)}
    if labels := options.pop("label"):
        keys["labels"] = dict(_pairs(labels))
    if collect := options.pop("collect"):
        keys["collect"] = collect
    return read_settings(keys, "the options of this command")


def _pairs(given: Sequence[str]) -> Iterator[tuple[str, str]]:
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{text!r} is not NAME=VALUE")
        yield name, value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
