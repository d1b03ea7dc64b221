"""`headrace apply`: creates the namespace of a recipe."""

from __future__ import annotations

from typing import Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    explain,
    json_option,
    print_json,
    set_option,
)


@click.command()
@click.argument("recipe")
@set_option
@json_option
@cluster_options
def apply(recipe: str, settings: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Create the namespace of a RECIPE and start its run.

    This creates the topics, registers the schemas and commits the first offset of every consumer
    group. Afterwards `headrace serve` processes can join from any machine. If you apply the same
    recipe again, nothing changes. A namespace keeps its recipe, so another recipe is refused.

    \b
    Examples:
      headrace apply quickstart
      headrace apply my.toml --namespace exp-7 --bootstrap-servers broker:9092 \\
          --registry-url http://registry:8081
    """
    import asyncio

    from headrace.schemas.topics import Topics
    from headrace.services.namespace.apply import apply as apply_recipe
    from headrace.services.namespace.cluster_config import read_recipe
    from headrace.services.namespace.connect import connect, locate
    from headrace.services.operate.find_versions import resolve

    cluster = cluster_of(options)
    resolved = resolve(read_recipe(recipe, settings), cluster, explain)
    namespace = cluster.namespace or resolved.name
    topics = Topics(namespace, tuple(resolved.policies), resolved.partitions)

    async def run() -> str:
        async with connect(locate(cluster), "apply") as connection:
            log = await connection.writing_log(topics)
            return (await apply_recipe(log, resolved)).state

    state = asyncio.run(run())
    if as_json:
        print_json({"namespace": namespace, "state": state, "digest": resolved.digest.hex()})
    else:
        click.echo(f"{namespace}: {state}")
