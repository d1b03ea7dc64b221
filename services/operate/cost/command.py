"""`headrace cost`: shows what the workers of a run cost."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import (
    cluster_options,
    echo,
    in_namespace,
    json_option,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from headrace.services.log.event_log import EventLog
    from headrace.services.namespace.run_life import RunLife
    from headrace.services.operate.cost.cost_report import CostReport


def _price(text: str) -> tuple[str, float]:
    pool, equals, amount = text.partition("=")
    try:
        price = float(amount)
    except ValueError:
        price = math.nan
    if not (pool and equals and math.isfinite(price) and price >= 0):
        raise click.BadParameter(f"{text!r} is not POOL=PRICE, such as inference=2.5")
    return pool, price


@click.command()
@click.option(
    "--price", "prices", metavar="POOL=PRICE", multiple=True, type=_price,
    help="What a worker of a pool costs in an hour, instead of the recipe's "
    "workers.price_per_hour. Repeatable.",
)  # fmt: skip
@click.option(
    "--passing", type=float, metavar="REWARD",
    help="A task is solved if a sample has at least this reward. [default: the recipe's "
    "evaluation.passing, or 1]",
)  # fmt: skip
@json_option
@cluster_options
def cost(
    prices: tuple[tuple[str, float], ...], passing: float | None, as_json: bool, **options: Any
) -> None:
    """Show what the workers of a run cost, from the log alone.

    For each pool (a service, or a service for one policy) it prints how many workers lived, how
    many at the same time, their worker-hours and their cost, and the worker-hours of a pool that
    has had the peak's number of workers all the time. Then the cost of a task, of a solved task and
    of a version. A worker's time begins with its process. If it was killed, it counts up to its
    last record, and "unsure" is how many hours more it may have lived: at most 5 % of its life, or
    a minute. Broker, registry, blob store and commands are not counted.

    \b
    Examples:
      headrace cost
      headrace cost --price inference=2.5 --price trainer=10 --json
    """
    from headrace.errors import UsageError
    from headrace.schemas.recipe.resources.service_names import known_pools
    from headrace.services.operate.cost.cost_report import HEAD, read_cost

    async def read(log: EventLog, life: RunLife) -> CostReport:
        known = known_pools(log.topics.policies)
        for pool, _ in prices:
            if pool not in known:
                raise UsageError(f"--price {pool}: no such pool. Use one of {', '.join(known)}")
        return await read_cost(log, life, dict(prices), passing)

    report = in_namespace(options, "cost", read)
    if as_json:
        print_json(report.tree())
        return
    print_table(HEAD, [pool.cells() for pool in report.pools])
    echo("\n".join(report.lines()))
