"""The command `replay`: runs a part of a recorded run again, from its log."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

import click

from headrace.errors import HeadraceError
from headrace.services.operate.options import cluster_of, cluster_options, json_option, set_option

if TYPE_CHECKING:
    from headrace.services.operate.replay.recording import Recording, TaskRange

T = TypeVar("T")

_INTO = click.option(
    "--into", metavar="NAME",
    help="Name of the new namespace. [default: <namespace>-replay, -replay-2, …]",
)  # fmt: skip
_POLICY = click.option("--policy", metavar="NAME", help="The policy. [default: the only one]")
_RECIPE = click.option(
    "--recipe", "path", metavar="NAME|FILE",
    help="Use this recipe instead of the recorded one; --set is applied to it. It may differ only "
    "in what this replay does again.",
)  # fmt: skip


def _parse_range(_: click.Context, __: click.Parameter, text: str) -> TaskRange:
    from headrace.services.operate.replay.recording import TaskRange

    if not re.fullmatch(r"\d+(-\d*)?", text):
        raise click.BadParameter(f"{text!r}: give a task number such as 12, or a range like 12-40")
    first, dash, last = text.partition("-")
    if not dash:
        last = first
    return TaskRange(int(first), int(last) if last else None)


_TASKS = click.option(
    "--tasks", "--task", "tasks", metavar="FIRST-LAST", default="0-", show_default=True,
    callback=_parse_range, help="The tasks: 12, or 12-40, or 12- for task 12 and all later ones.",
)  # fmt: skip


def _replay(options: dict[str, Any], work: Callable[[Recording], Awaitable[T]]) -> T:
    """Runs `work` on the recording that the options name, and shows its progress on stderr."""
    import asyncio

    from headrace.services.operate.replay.recording import open_recording
    from headrace.services.operate.replay.replay_output import ReplayProgress

    async def run() -> T:
        async with open_recording(cluster_of(options), progress) as recording:
            return await work(recording)

    with closing(ReplayProgress()) as progress:
        return asyncio.run(run())


@click.group()
def replay() -> None:
    """Run a part of a recorded run again, using only its log.

    A replay only reads the recorded namespace. It writes into a new namespace, which `status`,
    `tail` and `topics` can show like any other.

    \b
      replay batches        train again on the same batches and check that the weights are the same
      replay trajectories   train on the same trajectories with other advantages, filters or losses
      replay episodes       run agents against the recorded answers and check what they ask

    \b
    Examples:
      headrace replay batches
      headrace replay trajectories --set policies.default.groups.advantage=rloo
      headrace replay episodes --task 12
    """


@replay.command()
@_POLICY
@click.option("--until", type=click.IntRange(min=1), metavar="VERSION", help="The last version.")
@_INTO
@json_option
@cluster_options
def batches(
    policy: str | None, until: int | None, into: str | None, as_json: bool, **options: Any
) -> None:
    """Train again on recorded batches, and compare the digests of the weights.

    The command first assembles each batch again from the recorded results and compares it. Then it
    copies the recorded batches byte by byte into the new namespace, where the trainer reads the
    recorded trajectories by reference. On a CPU, with the same packages, every version has exactly
    the same weights. Exits 1 if a batch or a version differs. Without --namespace, this replays
    the run that started last.

    \b
    Examples:
      headrace replay batches
      headrace replay batches --namespace exp-7 --until 20 --into exp-7-again
    """
    from headrace.services.operate.replay.replay_batches import replay_batches
    from headrace.services.operate.replay.replay_output import print_versions

    replayed = _replay(
        options, lambda recording: replay_batches(recording, policy, until=until, into=into)
    )
    print_versions(replayed, as_json)
    if differing := [one for one in replayed.versions if not one.same or one.batch == "differs"]:
        raise HeadraceError(
            f"{len(differing)} of {len(replayed.versions)} versions differ from the recorded ones, "
            f"the first is version {differing[0].recorded.version}. Check whether the packages, "
            "the device or your code have changed since the run"
        )


@replay.command()
@_RECIPE
@set_option
@_POLICY
@_TASKS
@_INTO
@json_option
@cluster_options
def trajectories(
    path: str | None,
    settings: tuple[str, ...],
    policy: str | None,
    tasks: TaskRange,
    into: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train on recorded trajectories with another algorithm.

    The recorded results go through the recipe's estimators and filters into new groups and
    batches, in the order in which they were recorded. The policy is trained on them from version
    0. Nothing is generated: the rewards are those of the recorded policy, and don't measure the
    new one. Each sample is as stale as it was when it was recorded. Without --namespace, this
    replays the run that started last.

    \b
    Examples:
      headrace replay trajectories --set policies.default.groups.advantage=rloo
      headrace replay trajectories --set 'policies.default.groups.filters=["zero_advantage"]' \\
          --set policies.default.batches.groups=8 --tasks 100-
      headrace replay trajectories --recipe my.toml --into exp-7-my-loss
    """
    from headrace.services.operate.replay.recording import change_recorded
    from headrace.services.operate.replay.replay_output import print_trained
    from headrace.services.operate.replay.replay_trajectories import CHANGEABLE, replay_trajectories

    replayed = _replay(
        options,
        lambda recording: replay_trajectories(
            recording,
            change_recorded(recording.recipe, path, settings, CHANGEABLE),
            policy,
            tasks=tasks,
            into=into,
        ),
    )
    print_trained(replayed, as_json)


@replay.command()
@_RECIPE
@set_option
@_TASKS
@click.option(
    "--limit", type=click.IntRange(min=1), default=1_000, show_default=True,
    help="Replay at most this many episodes. Their records are kept in memory.",
)  # fmt: skip
@json_option
@cluster_options
def episodes(
    path: str | None,
    settings: tuple[str, ...],
    tasks: TaskRange,
    limit: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Run agents against recorded answers, and show where they ask something else.

    This runs the agents' present code, or the agents that --set names. It uses no environment and
    no model, and it writes nothing. For each episode that diverges it shows the first request that
    differs: what the agent asked then, and what it asks now. Exits 1 if an episode diverges.
    Requests and answers are kept for 7 days. Without --namespace, this replays the run that
    started last.

    \b
    Examples:
      headrace replay episodes
      headrace replay episodes --task 12 --json
      headrace replay episodes --set agents.default.use=my_agents:solve --limit 100
    """
    from headrace.services.operate.replay.recording import change_recorded
    from headrace.services.operate.replay.replay_episodes import CHANGEABLE, replay_episodes
    from headrace.services.operate.replay.replay_output import print_episodes

    replayed = _replay(
        options,
        lambda recording: replay_episodes(
            recording,
            change_recorded(recording.recipe, path, settings, CHANGEABLE),
            tasks=tasks,
            limit=limit,
        ),
    )
    print_episodes(replayed, as_json)
    if replayed.divergences:
        raise HeadraceError(f"{len(replayed.divergences)} of {replayed.episodes} episodes diverge")
