"""`headrace track`: writes a run's curves to TensorBoard, W&B and MLflow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import cluster_of, cluster_options, say

if TYPE_CHECKING:
    from headrace.services.namespace.cluster_config import ClusterConfig
    from headrace.services.operate.track.follow_versions import MakeTracker


@click.group()
def track() -> None:
    """Write a run's curves to TensorBoard, W&B or MLflow.

    The commands read the versions of a run from the log, with all their metrics, and follow it
    until it ends. They change nothing in the run, and they work for a run that has ended, too. Each
    version is written exactly once: after Ctrl-C or a crash the same command continues where the
    output ends. A run that takes part is named by its NAMESPACE. [default: that of --namespace]

    \b
    Examples:
      headrace track tensorboard
      headrace track wandb exp-7 exp-8 --to curves
      headrace track mlflow --to http://127.0.0.1:5000
    """


@track.command()
@click.argument("namespaces", metavar="[NAMESPACE]...", nargs=-1)
@click.option(
    "--to", default="tensorboard", metavar="FOLDER", show_default=True,
    help="The folder for `tensorboard --logdir`.",
)  # fmt: skip
@cluster_options
def tensorboard(namespaces: tuple[str, ...], to: str, **options: Any) -> None:
    """Write event files of TensorBoard, one for each policy.

    Needs the extra `tensorboard`. The file of a policy is in FOLDER/NAMESPACE/POLICY.

    \b
    Examples:
      headrace track tensorboard
      headrace track tensorboard exp-7 exp-8 --to curves
    """

    def make() -> MakeTracker:
        from headrace.services.operate.track.tensorboard_tracker import TensorBoardTracker

        return lambda namespace, policy: TensorBoardTracker(Path(to) / namespace / policy)

    _follow("tensorboard", make, namespaces, options)
    say(f"see the curves with: tensorboard --logdir {to}")


@track.command()
@click.argument("namespaces", metavar="[NAMESPACE]...", nargs=-1)
@click.option(
    "--to", default="wandb", metavar="FOLDER", show_default=True, help="The folder to write into."
)
@click.option(
    "--every", metavar="SECONDS", type=click.FloatRange(min=0), default=300.0, show_default=True,
    help="Time between two parts while the run goes on. W&B needs seconds of a CPU for each.",
)  # fmt: skip
@cluster_options
def wandb(namespaces: tuple[str, ...], to: str, every: float, **options: Any) -> None:
    """Write offline runs of W&B, for `wandb sync`.

    Needs the extra `wandb`. Nothing is sent. A part of the run is a folder
    FOLDER/NAMESPACE/POLICY/versions-FIRST-LAST, and `wandb sync` makes one run of all parts of a
    policy. The last part comes when the run has ended.

    \b
    Examples:
      headrace track wandb
      headrace track wandb exp-7 exp-8 --to curves
    """

    def make() -> MakeTracker:
        from headrace.services.operate.track.wandb_tracker import WandbTracker

        return lambda namespace, policy: WandbTracker(
            Path(to) / namespace / policy, namespace, policy, every
        )

    _follow("wandb", make, namespaces, options)
    say(f"send them with: wandb sync {to}/*/*/versions-*/*")


@track.command()
@click.argument("namespaces", metavar="[NAMESPACE]...", nargs=-1)
@click.option("--to", required=True, metavar="URL", help="The address of the MLflow server.")
@cluster_options
def mlflow(namespaces: tuple[str, ...], to: str, **options: Any) -> None:
    """Write to an MLflow server: a run for each policy.

    Needs the extra `mlflow`. The experiment has the name of the namespace, and the run that of the
    policy.

    \b
    Examples:
      headrace track mlflow --to http://127.0.0.1:5000
      headrace track mlflow exp-7 exp-8 --to https://mlflow.example.com
    """

    def make() -> MakeTracker:
        from headrace.services.operate.track.mlflow_tracker import MlflowTracker

        return lambda namespace, policy: MlflowTracker(to, namespace, policy)

    _follow("mlflow", make, namespaces, options)


def _follow(
    extra: str,
    make: Callable[[], MakeTracker],
    namespaces: tuple[str, ...],
    options: dict[str, Any],
) -> None:
    """Follows the runs until they have ended. SIGTERM ends it as Ctrl-C does."""
    import asyncio
    import signal
    from dataclasses import replace

    from headrace.errors import UsageError
    from headrace.services.namespace.lookup import open_namespace
    from headrace.services.operate.run.run_stack import running_stack
    from headrace.services.operate.track.follow_versions import follow_versions

    try:
        make_tracker = make()
    except ImportError as error:
        raise UsageError(f"track {extra}: {error}. Run pip install 'headrace[{extra}]'") from None
    cluster = cluster_of(options)

    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))

    async def one(located: ClusterConfig, namespace: str | None) -> None:
        named = replace(located, namespace=namespace)
        async with open_namespace(named, "track") as (log, _):
            written = await follow_versions(log, make_tracker)
        say(f"{log.topics.namespace}: {written} versions written")

    async def follow() -> None:
        async with running_stack(cluster, say) as (_, located):
            names = namespaces or (cluster.namespace,)
            await asyncio.gather(*(one(located, name) for name in names))

    asyncio.run(follow())
