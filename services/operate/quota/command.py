"""`headrace quota`: shows and changes the limits of tenants, and those that workers share."""

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
    say,
)

if TYPE_CHECKING:
    from headrace.schemas.events import LimitSet, QuotaSet
    from headrace.services.log.event_log import EventLog
    from headrace.services.namespace.run_life import RunLife
    from headrace.services.operate.quota.limits import LimitRow
    from headrace.services.operate.quota.quota import TenantRow


@click.command()
@click.argument("name", required=False)
@click.option(
    "--weight", type=click.FloatRange(0, 1e6, min_open=True), metavar="NUMBER",
    help="Its share of the live episodes, compared with other tenants that have tasks.",
)  # fmt: skip
@click.option(
    "--live-episodes", type=click.IntRange(0, 2**31 - 1), metavar="NUMBER",
    help="Maximum number of its episodes that run at the same time. With 0 its tasks wait.",
)  # fmt: skip
@click.option("--unlimited", is_flag=True, help="Remove its limit of live episodes.")
@click.option(
    "--units", type=click.IntRange(0, 2**31 - 1), metavar="NUMBER",
    help="The new value of the limit NAME. With 0 nothing new begins.",
)  # fmt: skip
@click.option(
    "--period-s", type=click.FloatRange(0, 1e6, min_open=True), metavar="SECONDS",
    help="With --units: the time that a limit of calls counts for. Absent: as it is.",
)  # fmt: skip
@click.option("--reason", default="", help="Text that is recorded with the change.")
@json_option
@cluster_options
def quota(
    name: str | None,
    weight: float | None,
    live_episodes: int | None,
    unlimited: bool,
    units: int | None,
    period_s: float | None,
    reason: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Show limits, or change those of the tenant NAME, or with --units the limit NAME.

    A task names its tenant. The next task to start is the oldest one of the tenant that has the
    fewest live episodes for its weight, unless the tenant is at its limit. A change holds from now
    on instead of the recipe, also for tasks that wait. Episodes that run go on.

    Other limits are named by their keys in the recipe, which must set them. A lower value takes
    effect as the calls or the episodes end that run.

    Without NAME it prints each tenant's weight, limit, live episodes and tasks that wait, and the
    use of each other limit.

    \b
    Examples:
      headrace quota
      headrace quota search --weight 3
      headrace quota search --live-episodes 64 --reason "their tasks are slow"
      headrace quota search --unlimited
      headrace quota policies.default.limits.in_flight --units 16
    """
    from headrace.errors import UsageError

    of_tenant = weight is not None or live_episodes is not None or unlimited
    if units is not None and of_tenant:
        raise UsageError("--units changes a limit, and the other options change a tenant")
    if period_s is not None and units is None:
        raise UsageError("give --units together with --period-s")
    if name is None:
        if of_tenant or units is not None:
            kind = "limit" if units is not None else "tenant"
            raise UsageError(f"name the {kind} to change: headrace quota {kind.upper()} ...")
        _show(options, as_json)
    elif units is not None:
        _change_limit(options, name, units, period_s, reason, as_json)
    elif name.startswith(("policies.", "scheduler.")):
        raise UsageError(f"{name} is a limit and not a tenant. Say what to change: give --units")
    else:
        _change_tenant(options, name, (weight, live_episodes, unlimited), reason, as_json)


def _show(options: dict[str, Any], as_json: bool) -> None:
    from dataclasses import asdict

    from headrace.services.operate.quota.limits import read_limits
    from headrace.services.operate.quota.quota import read_tenants

    async def read(log: EventLog, life: RunLife) -> tuple[list[TenantRow], list[LimitRow]]:
        recipe = life.recipe()
        return await read_tenants(log, recipe), await read_limits(log, recipe)

    tenants, limits = in_namespace(options, "quota", read)
    if as_json:
        print_json([*map(asdict, tenants), *map(asdict, limits)])
        return
    head = ("tenant", "weight", "most live", "live", "queued tasks")
    print_table(head, [row.cells() for row in tenants])
    if limits:
        echo("")
        head_of_limits = ("limit", "units", "", "in use", "waiting", "workers", "")
        print_table(head_of_limits, [row.cells() for row in limits])


def _change_tenant(
    options: dict[str, Any],
    tenant: str,
    limits: tuple[float | None, int | None, bool],
    reason: str,
    as_json: bool,
) -> None:
    from headrace.services.operate.quota.quota import set_quota

    weight, live_episodes, unlimited = limits

    async def change(log: EventLog, life: RunLife) -> QuotaSet:
        recipe = life.recipe()
        if tenant not in recipe.scheduler.tenants:
            say(f"the recipe does not name the tenant {tenant}: the limits hold for tasks that do")
        return await set_quota(
            log,
            recipe,
            tenant,
            weight=weight,
            live_episodes=live_episodes,
            unlimited=unlimited,
            reason=reason,
        )

    changed = in_namespace(options, "quota", change, writing=True)
    if as_json:
        print_json(changed.model_dump(mode="json"), indent=None)
    else:
        most = "unlimited" if changed.live_episodes is None else f"{changed.live_episodes:,}"
        echo(f"{tenant}: weight {changed.weight:g}, live episodes {most}")


def _change_limit(
    options: dict[str, Any],
    limit: str,
    units: int,
    period_s: float | None,
    reason: str,
    as_json: bool,
) -> None:
    from headrace.services.operate.quota.limits import set_limit

    async def change(log: EventLog, life: RunLife) -> LimitSet:
        return await set_limit(
            log, life.recipe(), limit, units=units, period_s=period_s, reason=reason
        )

    changed = in_namespace(options, "quota", change, writing=True)
    if as_json:
        print_json(changed.model_dump(mode="json"), indent=None)
    else:
        echo(f"{limit}: {changed.units:,}")
