"""`headrace compare`: shows a run and its replays side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    json_option,
    policy_option,
    print_json,
    say,
)


@click.command()
@click.argument("replays", metavar="[REPLAY]...", nargs=-1)
@policy_option
@click.option(
    "--plot", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path),
    help="Also draw the metrics into this file: .svg or .png. Needs the extra `plot`.",
)  # fmt: skip
@click.option(
    "--evaluate", is_flag=True,
    help="Also evaluate the newest version that all runs have, as `headrace evaluate` does, on the "
    "evaluation tasks of the first run's recipe.",
)  # fmt: skip
@json_option
@cluster_options
def compare(
    replays: tuple[str, ...],
    policy: str | None,
    plot: Path | None,
    evaluate: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare a run with its replays, version by version.

    REPLAY is the namespace of a replay, which may still be going on. [default: the newest one] The
    first run is that of --namespace. [default: the run that the first REPLAY replays] Prints the
    metrics of each version side by side, and the first version whose weights differ.

    In a replay, the rewards are those of the recorded episodes: only --evaluate measures the
    replayed policy. It runs an evaluation of each run, one after the other. The command also
    compares runs that are not replays, if both are named.

    \b
    Examples:
      headrace compare
      headrace compare exp-7-replay exp-7-replay-2 --plot exp-7.svg
      headrace compare --evaluate --json
      headrace compare --namespace exp-7 exp-8
    """
    import asyncio

    from headrace.services.operate.compare.compare import compare as compare_runs
    from headrace.services.operate.compare.comparison_output import print_comparison
    from headrace.services.operate.compare.comparison_plot import draw
    from headrace.services.operate.plot.figure_file import empty_figure

    figure = None if plot is None else empty_figure(plot, "--plot")
    cluster = cluster_of(options)
    found = asyncio.run(compare_runs(cluster, replays, policy, say, evaluate=evaluate))
    if as_json:
        print_json(found.to_tree())
    else:
        print_comparison(found)
    if plot is not None and figure is not None:
        draw(found, figure, plot)
        say(f"drawn into {plot}")
