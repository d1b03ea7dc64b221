"""`headrace quota`: shows and changes the limits of tenants."""

from __future__ import annotations

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
    from headrace.schemas.events import QuotaSet
    from headrace.services.log.event_log import EventLog
    from headrace.services.namespace.run_life import RunLife
    from headrace.services.operate.quota.quota import TenantRow


@click.command()
@click.argument("tenant", required=False)
@click.option(
    "--weight", type=click.FloatRange(0, 1e6, min_open=True), metavar="NUMBER",
    help="Its share of the live episodes, compared with other tenants that have tasks.",
)  # fmt: skip
@click.option(
    "--live-episodes", type=click.IntRange(0, 2**31 - 1), metavar="NUMBER",
    help="Maximum number of its episodes that run at the same time. With 0 its tasks wait.",
)  # fmt: skip
@click.option("--unlimited", is_flag=True, help="Remove its limit of live episodes.")
@click.option("--reason", default="", help="Text that is recorded with the change.")
@json_option
@cluster_options
def quota(
    tenant: str | None,
    weight: float | None,
    live_episodes: int | None,
    unlimited: bool,
    reason: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Show the limits of tenants, or change those of TENANT.

    A task names its tenant. The next task to start is the oldest one of the tenant that has the
    fewest live episodes for its weight, unless the tenant is at its limit. A change holds from now
    on instead of the recipe, also for tasks that wait. Episodes that run go on. Without TENANT it
    prints each tenant's weight, limit, live episodes and tasks that wait.

    \b
    Examples:
      headrace quota
      headrace quota search --weight 3
      headrace quota search --live-episodes 64 --reason "their tasks are slow"
      headrace quota search --unlimited
    """
    from dataclasses import asdict

    from headrace.errors import UsageError
    from headrace.services.operate.quota.quota import read_tenants, set_quota

    async def show(log: EventLog, life: RunLife) -> list[TenantRow]:
        return await read_tenants(log, life.recipe())

    async def change(log: EventLog, life: RunLife) -> QuotaSet:
        assert tenant is not None
        return await set_quota(
            log,
            life.recipe(),
            tenant,
            weight=weight,
            live_episodes=live_episodes,
            unlimited=unlimited,
            reason=reason,
        )

    if tenant is not None:
        changed = in_namespace(options, "quota", change, writing=True)
        if as_json:
            print_json(changed.model_dump(mode="json"), indent=None)
        else:
            most = "unlimited" if changed.live_episodes is None else f"{changed.live_episodes:,}"
            echo(f"{tenant}: weight {changed.weight:g}, live episodes {most}")
        return
    if weight is not None or live_episodes is not None or unlimited:
        raise UsageError("name the tenant to change: headrace quota TENANT")
    rows = in_namespace(options, "quota", show)
    if as_json:
        print_json([asdict(row) for row in rows])
    else:
        head = ("tenant", "weight", "most live", "live", "queued tasks")
        print_table(head, [row.cells() for row in rows])
