"""`headrace run`: runs a whole recipe on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    echo,
    json_option,
    print_json,
    quiet_option,
    say_unless,
    set_option,
    warn_of_secrets,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from headrace.schemas.recipe.recipe import Recipe
    from headrace.services.namespace.cluster_config import ClusterConfig
    from headrace.services.operate.run.progress import Check


def _check(text: str) -> Check:
    from headrace.services.operate.run.progress import Check

    try:
        return Check.parse(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _ready(
    name: str, settings: tuple[str, ...], cluster: ClusterConfig, say: Callable[[str], None]
) -> Recipe:
    """Returns the recipe with all names resolved, and downloads what no process shall wait for."""
    from headrace.errors import UsageError
    from headrace.services.log.request_signatures import RequestSigner
    from headrace.services.models.weights import model_folder
    from headrace.services.namespace.cluster_config import read_recipe
    from headrace.services.operate.find_versions import resolve
    from headrace.services.operate.run_references import fetch_models

    read = read_recipe(name, settings)
    key = RequestSigner.of_environment().public_key
    if why := read.scheduler.trusted.refusal(read.tasks.tenant, key):
        raise UsageError(f"this run could not submit its own tasks: {why}")
    recipe = resolve(read, cluster, say, new_run=True)
    warn_of_secrets(recipe)
    fetch_models(recipe, cluster, say)
    for policy in recipe.policies.values():
        model_folder(policy.model, weights=True)
    return recipe


@click.command()
@click.argument("recipe", default="quickstart")
@set_option
@click.option(
    "--check", "checks", metavar="'reward>=0.95'", multiple=True, type=_check,
    help="Exit with code 3 unless this holds at the end. Give reward, versions, episodes, seconds, "
    "failures or restarts, then >=, <=, ==, > or <, then a number. If stop.reward or "
    "stop.versions ended the run, reward and versions are those at which the rule held. All other "
    "figures count until the last task has ended. Repeatable.",
)  # fmt: skip
@click.option(
    "--no-check", is_flag=True, help="Don't try the recipe's parts before the namespace is created."
)
@click.option(
    "--dashboard", is_flag=True,
    help="Show the run in a browser, too: print the address of `headrace dashboard` to stderr.",
)  # fmt: skip
@click.option(
    "--secure", is_flag=True,
    help="Start the local stack as `headrace up --secure` does, with credentials of its own for "
    "each service.",
)  # fmt: skip
@quiet_option
@json_option
@click.option(
    "--metrics-port", metavar="PORT", type=click.IntRange(0, 65_535), default=0, show_default=True,
    help="Serve Prometheus metrics: the first process at /metrics on this port, each further "
    "process on the next port. 0 disables them.",
)  # fmt: skip
@cluster_options
def run(
    recipe: str,
    settings: tuple[str, ...],
    checks: tuple[Check, ...],
    no_check: bool,
    dashboard: bool,
    secure: bool,
    quiet: bool,
    as_json: bool,
    metrics_port: int,
    **options: Any,
) -> None:
    """Run a whole RECIPE on this machine.

    RECIPE is the name of a shipped recipe or a .toml file. [default: quickstart]

    The command starts the local stack (or uses --bootstrap-servers), creates the namespace, starts
    all services and keeps them alive until the recipe's `stop` rule holds. If the namespace has an
    unfinished run, the command continues it. If that run has ended, the new one uses the namespace
    <name>-2, and so on. Ctrl-C pauses the run: the same command continues it, and `headrace end`
    ends it for good.

    \b
    Examples:
      headrace run
      headrace run quickstart --check 'reward>=0.95' --check 'seconds<90'
      headrace run my.toml --dashboard
      headrace run my.toml --set stop.versions=10 --set workers.agent=2
      headrace run my.toml --bootstrap-servers broker:9092 --registry-url http://registry:8081
    """
    import asyncio
    from dataclasses import asdict

    from headrace.services.namespace.access_table import ACCESS
    from headrace.services.operate.run.report import command_line
    from headrace.services.operate.run.run import LocalRun

    cluster = cluster_of(options)
    if secure and cluster.bootstrap_servers is not None:
        raise click.UsageError(
            "--secure is for the local stack: leave it out with --bootstrap-servers, and give "
            "the credentials of your cluster with --credentials"
        )
    whole = LocalRun(
        _ready(recipe, settings, cluster, say_unless(quiet)),
        cluster,
        quiet=quiet,
        checks=checks,
        metrics_port=metrics_port,
        check=not no_check,
        dashboard=dashboard,
        roles=tuple(ACCESS) if secure else (),
        on_interrupt=f"pausing the run; `{command_line()}` continues it",
    )
    summary = asyncio.run(whole.execute())
    if as_json:
        print_json(asdict(summary))
    else:
        echo("\n".join(summary.lines()))
    whole.judge(summary)
