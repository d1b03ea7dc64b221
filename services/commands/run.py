"""`run` and `serve`: what makes a run go."""

from __future__ import annotations

from typing import Any

import click

from services.commands.options import (
    json_option,
    print_json,
    set_option,
    where_of,
    where_options,
)

SERVICES = (
    "source", "evaluation", "scheduler", "agent", "gateway", "env", "inference",
    "assemble-groups", "assemble-batches", "trainer",
)  # fmt: skip


def _checks(_: click.Context, __: click.Parameter, texts: tuple[str, ...]) -> list[Any]:
    if not texts:
        return []
    from services.run.progress import Check

    try:
        return [Check.parse(text) for text in texts]
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


@click.command()
@click.argument("recipe", default="quickstart")
@set_option
@click.option(
    "--check", "checks", metavar="'reward>=0.95'", multiple=True, callback=_checks,
    help="Exit code 3 unless this holds at the end: reward, versions, episodes, seconds, failures "
    "or restarts, then >=, <=, ==, > or <, then a number. If `stop.reward` or `stop.versions` "
    "ended the run, reward and versions are those at which it held. All else counts until the last "
    "task has ended. Repeatable.",
)  # fmt: skip
@click.option("--quiet", is_flag=True, help="No live view.")
@json_option
@click.option(
    "--metrics-port", type=click.IntRange(0, 65_535), default=0, show_default=True,
    help="The first process serves /metrics here, each next one port higher; 0: none.",
)  # fmt: skip
@where_options
def run(
    recipe: str,
    settings: tuple[str, ...],
    checks: list[Any],
    quiet: bool,
    as_json: bool,
    metrics_port: int,
    **options: Any,
) -> None:
    """Run a whole RECIPE on this machine: a shipped one by name, or a .toml file.

    Starts the local stack (or uses --bootstrap-servers), makes the namespace, starts all services
    and keeps them alive until the recipe's `stop` holds. A run that was broken off goes on where
    it stood; one that has ended is left alone, and the next is named <name>-2, and so on. Ctrl-C
    ends the run in order, twice at once.

    \b
    Examples:
      headrace run
      headrace run quickstart --check 'reward>=0.95' --check 'seconds<90'
      headrace run my.toml --set stop.versions=10 --set workers.agent=2
      headrace run my.toml --bootstrap-servers broker:9092 --registry-url http://registry:8081
    """
    import asyncio

    from rich.console import Console

    from services.run.run import Run, RunOptions
    from services.run.view import Status, make_view
    from services.settings import read_recipe
    from services.weights import model_folder

    where, resolved = where_of(options), read_recipe(recipe, settings)
    for policy in resolved.policies.values():
        model_folder(policy.model, weights=True)  # fetched before anything waits for it
    status = Status(where.namespace or resolved.name)
    view = make_view(status, Console(stderr=True), quiet=quiet)
    whole = Run(resolved, where, RunOptions(checks, metrics_port), status, view)
    try:
        summary = asyncio.run(whole.execute())
    finally:
        view.close()
    if as_json:
        print_json(summary.to_tree())
    else:
        click.echo("\n".join(summary.lines()))
    whole.judge(summary)


@click.command()
@click.argument("service", type=click.Choice(SERVICES))
@click.argument("recipe")
@set_option
@click.option(
    "--policy", metavar="NAME",
    help="For assemble-batches and trainer [default: the only one], and inference [default: all].",
)  # fmt: skip
@click.option(
    "--metrics-port", type=click.IntRange(0, 65_535), default=0, show_default=True,
    help="Serves Prometheus metrics at /metrics; 0: none.",
)  # fmt: skip
@click.option("--metrics-address", default="127.0.0.1", show_default=True, help="Where it listens.")
@click.option(
    "--listen", metavar="HOST:PORT", envvar="HEADRACE_GATEWAY_LISTEN", default="127.0.0.1:8100",
    show_default=True, show_envvar=True, help="Where the gateway's clients come in.",
)  # fmt: skip
@click.option("--parent-fd", type=int, hidden=True, help="The pipe of `headrace run`.")
@where_options
@click.pass_obj
def serve(
    debug: bool,
    /,
    service: str,
    recipe: str,
    settings: tuple[str, ...],
    policy: str | None,
    metrics_port: int,
    metrics_address: str,
    listen: str,
    parent_fd: int | None,
    **options: Any,
) -> None:
    """Run one SERVICE of a RECIPE's run, as a process of its own.

    The run must have been applied, with this very recipe. Any number of agent, env, inference and
    assemble-groups processes share the work; of the others one is active, and a second takes over.
    A gateway is an agent that clients of OpenAI's API can reach.
    SIGTERM, Ctrl-C and the run's end stop it in order, within 10 s.

    \b
    Examples:
      headrace serve agent quickstart
      headrace serve inference my.toml --bootstrap-servers broker:9092 \\
          --registry-url http://registry:8081 --metrics-port 9100
      headrace serve trainer my.toml --policy solver
    """
    from services.serve import ServeOptions, configure_logging
    from services.serve import serve as serve_service
    from services.settings import read_recipe

    configure_logging(service, debug=debug)
    where, resolved = where_of(options), read_recipe(recipe, settings)
    serve_service(
        ServeOptions(service, policy, parent_fd, metrics_port, metrics_address, listen),
        resolved,
        where,
    )
