"""`headrace autoscale`: says how many inference workers a run needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import (
    cluster_options,
    echo,
    in_namespace,
    json_option,
    metrics_options,
    print_json,
)

if TYPE_CHECKING:
    from headrace.services.log.event_log import EventLog
    from headrace.services.namespace.run_life import RunLife


@click.command()
@click.option(
    "--least", type=click.IntRange(1), metavar="NUMBER",
    help="Least number of workers. [default: the recipe's workers.autoscale.least, or 1]",
)  # fmt: skip
@click.option(
    "--most", type=click.IntRange(1), metavar="NUMBER",
    help="Largest number of workers. [default: the recipe's workers.autoscale.most, or "
    "pool_partitions]",
)  # fmt: skip
@click.option(
    "--window", "window_s", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
    help="Training from which a decision follows. [default: workers.autoscale.window_s, or 300]",
)  # fmt: skip
@click.option(
    "--hook", metavar="COMMAND",
    help="Shell command that is run if another number is wanted, and again until it exits with 0. "
    "It gets HEADRACE_WANTED, HEADRACE_WORKERS, HEADRACE_NAMESPACE and HEADRACE_REASON.",
)  # fmt: skip
@metrics_options
@json_option
@cluster_options
def autoscale(
    least: int | None,
    most: int | None,
    window_s: float | None,
    hook: str | None,
    metrics_port: int,
    metrics_address: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Say how many inference workers a run needs, until it ends.

    It follows the log and prints a line when another number is wanted, or for another reason.
    Above 10 % of waiting of the trainer, it wants more workers; below 5 %, it wants those whose
    work is used, and a tenth more. It starts and ends nothing itself: give the number to a
    Kubernetes autoscaler by the metric headrace_workers_wanted, or to a command of yours by
    --hook. Run inference workers with `headrace serve inference --drain`, so that SIGTERM loses no
    work. Only one process of it is needed; it keeps no state.

    \b
    Examples:
      headrace autoscale
      headrace autoscale --least 2 --most 12 --metrics-port 9200
      headrace autoscale --hook 'kubectl scale deployment inference --replicas $HEADRACE_WANTED'
    """
    from headrace.errors import UsageError
    from headrace.schemas.recipe.resources.worker_settings import Autoscale
    from headrace.services.operate.autoscale.advise import Advice, advise

    def settings(life: RunLife) -> Autoscale:
        recipe = life.recipe()
        given = {"least": least, "most": most, "window_s": window_s}
        own = recipe.workers.autoscale
        base = {"most": recipe.pool_partitions} if own is None else own.model_dump()
        scale = Autoscale(**{**base, **{key: one for key, one in given.items() if one is not None}})
        if scale.least > scale.most:
            raise UsageError(f"the least number, {scale.least}, is above the most, {scale.most}")
        if recipe.mode == "sync":
            raise UsageError("a run with mode = 'sync' can't be scaled by its trainers' waiting")
        return scale

    def show(advice: Advice) -> None:
        if as_json:
            print_json(advice.tree(), indent=None)
        else:
            echo(str(advice))

    async def follow(log: EventLog, life: RunLife) -> None:
        await advise(log, life.recipe(), settings(life), hook, show)

    if metrics_port:
        from headrace.services.operate.metrics_server import serve_metrics

        serve_metrics(metrics_address, metrics_port)
    in_namespace(options, "autoscale", follow)
