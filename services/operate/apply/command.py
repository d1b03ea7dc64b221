"""`headrace apply`: creates the namespace of a recipe."""

from __future__ import annotations

from typing import Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    json_option,
    print_json,
    say,
    set_option,
    warn_of_secrets,
)


@click.command()
@click.argument("recipe")
@set_option
@click.option(
    "--no-check", is_flag=True, help="Don't try the recipe's parts before the namespace is created."
)
@json_option
@cluster_options
def apply(
    recipe: str, settings: tuple[str, ...], no_check: bool, as_json: bool, **options: Any
) -> None:
    """Create the namespace of a RECIPE and start its run.

    This creates the topics, registers the schemas and commits the first offset of every consumer
    group. Afterwards `headrace serve` processes can join from any machine. If you apply the same
    recipe again, nothing changes. A namespace keeps its recipe, so another recipe is refused.
    Before a namespace is created, the recipe's parts are tried, as `headrace check` does. Give
    --no-check if this machine lacks what the workers have.

    \b
    Examples:
      headrace apply quickstart
      headrace apply my.toml --namespace exp-7 --bootstrap-servers broker:9092 \\
          --registry-url http://registry:8081
    """
    import asyncio
    from functools import partial

    from headrace.services.namespace.apply import find_run, open_and_apply
    from headrace.services.namespace.cluster_config import read_recipe, write_resolved
    from headrace.services.namespace.connect import connect, locate
    from headrace.services.namespace.lookup import topics_of
    from headrace.services.operate.acls.grant import grant_access
    from headrace.services.operate.check.checking import check_in_child
    from headrace.services.operate.find_versions import resolve
    from headrace.services.operate.processes import spawn
    from headrace.services.operate.run_references import fetch_models

    cluster = cluster_of(options)
    resolved = resolve(read_recipe(recipe, settings), cluster, say)
    warn_of_secrets(resolved)
    namespace = cluster.namespace or resolved.name
    topics = topics_of(resolved, namespace)

    async def run() -> str:
        located = locate(cluster)
        async with connect(located, "apply") as connection:
            fetch = partial(fetch_models, resolved, cluster, say, weights=False)
            await asyncio.to_thread(fetch)
            if not no_check and await find_run(connection.log(topics)) is None:
                await check_in_child(write_resolved(resolved, cluster.state), spawn, say)
            await grant_access(located, topics)
            _, life = await open_and_apply(connection, resolved, namespace)
            return life.state

    state = asyncio.run(run())
    if as_json:
        print_json({"namespace": namespace, "state": state, "digest": resolved.digest.hex()})
    else:
        click.echo(f"{namespace}: {state}")
