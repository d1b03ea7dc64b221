"""`headrace apply`: creates the namespace of a recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    json_option,
    print_json,
    set_option,
)

if TYPE_CHECKING:
    from headrace.schemas.recipe.recipe import Recipe
    from headrace.services.namespace.cluster_config import ClusterConfig


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

    from headrace.services.namespace.cluster_config import read_recipe

    cluster, resolved = cluster_of(options), read_recipe(recipe, settings)
    namespace, state = asyncio.run(_apply(cluster, resolved))
    if as_json:
        print_json({"namespace": namespace, "state": state, "digest": resolved.digest.hex()})
    else:
        click.echo(f"{namespace}: {state}")


async def _apply(cluster: ClusterConfig, recipe: Recipe) -> tuple[str, str]:
    """Returns the namespace and the state of its run."""
    from headrace.schemas.topics import Topics
    from headrace.services.namespace.apply import apply as apply_recipe
    from headrace.services.namespace.connect import connect, locate

    cluster = locate(cluster)
    namespace = cluster.namespace or recipe.name
    topics = Topics(namespace, tuple(recipe.policies), recipe.partitions)
    async with connect(cluster, "apply") as connection:
        log = await connection.writing_log(topics)
        return namespace, (await apply_recipe(log, recipe)).state
