"""`headrace check`: tries the parts of a recipe."""

from __future__ import annotations

import click

from headrace.services.operate.options import echo, set_option


@click.command()
@click.argument("recipe", default="quickstart")
@set_option
@click.option(
    "--offline", is_flag=True, help="Do not contact the Docker engines and clusters of containers."
)
@click.option("--parent-fd", type=int, hidden=True, help="The pipe of `headrace run`.")
@click.option("--here", is_flag=True, hidden=True, help="Check in this process.")
@click.pass_context
def check(
    context: click.Context,
    recipe: str,
    settings: tuple[str, ...],
    offline: bool,
    parent_fd: int | None,
    here: bool,
) -> None:
    """Try the parts of a RECIPE, without Kafka and without a model's answers.

    This imports everything that the recipe names, and uses it once: it reads the first item of each
    data set, looks up the allowed tokens, makes the agents and environments, resets and steps the
    environment of the tasks, and calls advantages, filters and losses with numbers. It starts no
    container.

    The hosts of containers must answer within 12 s: the Docker engine that the command `docker`
    would use here, or the `hosts` of the environment. Use --offline if only the machines of the env
    workers can reach them. `headrace run` and `headrace apply` do the same first, with --offline.

    \b
    Examples:
      headrace check my.toml
      headrace check quickstart --set environments.default.options.id=FrozenLake-v2
    """
    import asyncio

    from headrace.services.operate.check.checking import check_apart, end_with_parent

    if parent_fd is not None:
        end_with_parent(parent_fd)
    elif not here:
        flags = [f"--set={one}" for one in settings] + ["--offline"] * offline
        debug = ["--debug"] if context.obj else []
        context.exit(check_apart([*debug, "check", "--here", *flags, "--", recipe]))

    from headrace.services.namespace.cluster_config import read_recipe
    from headrace.services.operate.check.check import try_recipe
    from headrace.services.operate.check.host_contact import require_hosts

    resolved = read_recipe(recipe, settings)
    asyncio.run(try_recipe(resolved, echo))
    if not offline:
        asyncio.run(require_hosts(resolved, echo))
    echo(f"{resolved.name}: every part of the recipe can be used")
