"""The command `prune`: removes what nothing needs any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    json_option,
    print_json,
    print_table,
    say,
)

if TYPE_CHECKING:
    from headrace.services.operate.prune.needs import Prunable


@click.command()
@click.option(
    "--yes", is_flag=True, help="Remove it. Without --yes, prune only shows what it would remove."
)
@click.option(
    "--keep", type=click.IntRange(min=1), default=3, show_default=True,
    help="Keep the weights of this many newest versions of each policy.",
)  # fmt: skip
@click.option(
    "--unnamed", is_flag=True,
    help="Also remove blobs older than a day that no event on this broker names, unless another "
    "owner has marked them. You need the right to see all topics.",
)  # fmt: skip
@click.option(
    "--forget", metavar="NAMESPACE", multiple=True,
    help="Also remove this whole ended namespace: its topics, its folder, its weights. "
    "CLUSTER_ID.NAMESPACE removes the weights and this machine's checkpoints of a cluster that is "
    "gone. Repeatable.",
)  # fmt: skip
@json_option
@cluster_options
def prune(
    yes: bool, keep: int, unnamed: bool, forget: tuple[str, ...], as_json: bool, **options: Any
) -> None:
    """Remove the weights and checkpoints that no run on this broker needs any more.

    Prune reads all namespaces that it can see, since they share the blob store. For each policy it
    keeps the newest versions, the versions of its checkpoints on this machine, and the versions
    that a running episode may still need. It also keeps what namespaces need that it can't see. It
    never removes single records. Without --yes it only shows what it would remove, and the sizes.

    \b
    Examples:
      headrace prune
      headrace prune --keep 1 --yes
      headrace prune --forget exp-7 --yes
    """
    import asyncio

    from headrace.services.log.log_reader import Patience
    from headrace.services.namespace.connect import connect, locate
    from headrace.services.operate.prune.pruner import Pruner

    async def run() -> list[Prunable]:
        cluster = locate(cluster_of(options))
        async with connect(cluster, "prune") as connection:
            pruner = Pruner(connection, cluster.open_blobs(None), cluster, Patience(say))
            items = await pruner.plan(keep, unnamed, forget)
            return await pruner.carry_out(items) if yes else items

    items = asyncio.run(run())
    if as_json:
        print_json({"removed": yes, "items": [item.to_tree() for item in items]})
        return
    if items:
        rows = [[item.kind, item.what, f"{item.size:,}", item.why] for item in items]
        print_table(("kind", "what", "bytes", "why"), rows)
    size = sum(item.size for item in items)
    if not items:
        say("nothing to remove")
    elif yes:
        say(f"removed {size:,} bytes")
    else:
        say(f"would remove {size:,} bytes: give --yes to remove them")
