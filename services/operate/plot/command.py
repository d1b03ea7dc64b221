"""`headrace plot`: draws a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import cluster_of, cluster_options, policy_option, say

if TYPE_CHECKING:
    from headrace.services.operate.plot.run_curves import RunCurves


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), default="run.svg")
@policy_option
@cluster_options
def plot(file: Path, policy: str | None, **options: Any) -> None:
    """Draw a run into FILE, an .svg or a .png.

    FILE is run.svg unless you name another one. The panels show, over the versions of a policy, the
    mean reward, the evaluation with 95 % intervals (or, if there was no evaluation, the share of
    its time that the trainer waited), the staleness, and the trained tokens per second. The run may
    still be going on. Needs the extra `plot`.

    \b
    Examples:
      headrace plot
      headrace plot exp-7.png --namespace exp-7
    """
    import asyncio

    from headrace.errors import UsageError
    from headrace.services.namespace.lookup import open_namespace
    from headrace.services.operate.plot.figure_file import empty_figure
    from headrace.services.operate.plot.run_curves import read_curves
    from headrace.services.operate.plot.run_plot import draw_run
    from headrace.services.operate.replay.recording import sole_policy
    from headrace.services.operate.run.run_stack import running_stack

    figure = empty_figure(file, "FILE")
    cluster = cluster_of(options)

    async def read() -> RunCurves:
        async with (
            running_stack(cluster, say) as (_, located),
            open_namespace(located, "plot") as (log, life),
        ):
            recipe = life.recipe()
            name = sole_policy(log.topics.namespace, recipe, policy)
            passing = 1.0 if recipe.evaluation is None else recipe.evaluation.passing
            return await read_curves(log, name, passing)

    curves = asyncio.run(read())
    if not curves.published:
        raise UsageError(
            f"policy {curves.policy} of {curves.namespace} has published no version yet: "
            "`headrace status` shows how far the run is"
        )
    draw_run(curves, figure, file)
    say(f"drawn into {file}")
