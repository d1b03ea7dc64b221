"""`prune`: frees what nothing needs any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    explain,
    json_option,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from headrace.services.operate.prune.needs import Prunable


@click.command()
@click.option("--yes", is_flag=True, help="Do it. Without it, only what would go is shown.")
@click.option(
    "--keep", type=click.IntRange(min=1), default=3, show_default=True,
    help="Newest versions of each policy whose weights stay.",
)  # fmt: skip
@click.option(
    "--unnamed", is_flag=True,
    help="Also blobs older than a day that no event of this broker names. Only where no other "
    "broker's runs share the blob store.",
)  # fmt: skip
@click.option(
    "--forget", metavar="NAMESPACE", multiple=True,
    help="Also an ended namespace whole: its topics, its folder, its weights. Repeatable.",
)  # fmt: skip
@json_option
@cluster_options
def prune(
    yes: bool, keep: int, unnamed: bool, forget: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Free the weights and checkpoints that no run of this broker needs any more.

    Looks at all namespaces, since they share the blob store. Kept are, of each policy, the newest
    versions, those of its checkpoints on this machine, and whatever a running episode may still
    need. Records are never cut. Shows what would go, and its size, until --yes is given.

    \b
    Examples:
      headrace prune
      headrace prune --keep 1 --yes
      headrace prune --forget exp-7 --yes
    """
    import asyncio

    items = asyncio.run(_prune(cluster_of(options), yes, keep, unnamed, forget))
    if as_json:
        print_json({"removed": yes, "items": [item.to_tree() for item in items]})
        return
    if items:
        rows = [[item.kind, item.what, f"{item.size:,}", item.why] for item in items]
        print_table(("kind", "what", "bytes", "why"), rows)
    size = sum(item.size for item in items)
    if not items:
        explain("nothing to free")
    elif yes:
        explain(f"freed {size:,} bytes")
    else:
        explain(f"would free {size:,} bytes: give --yes to do it")


async def _prune(
    cluster: Any, yes: bool, keep: int, unnamed: bool, forget: tuple[str, ...]
) -> list[Prunable]:
    from headrace.services.log.log_reader import Patience
    from headrace.services.namespace.connect import connect, locate
    from headrace.services.operate.prune.pruner import Pruner

    cluster = locate(cluster)
    async with connect(cluster, "prune") as connection:
        blobs = cluster.open_blobs()
        pruner = Pruner(connection, blobs, cluster, Patience(explain))
        items = await pruner.plan(keep, unnamed, forget)
        return await pruner.carry_out(items) if yes else items
