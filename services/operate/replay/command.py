"""`replay`: a part of a recorded run again, from its log."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    explain,
    json_option,
    print_json,
    print_table,
    set_option,
)

if TYPE_CHECKING:
    from headrace.services.operate.replay.replay_batches import BatchesReplayed
    from headrace.services.operate.replay.replay_episodes import EpisodeDivergence, EpisodesReplayed
    from headrace.services.operate.replay.replay_trajectories import TrajectoriesReplayed

PROGRESS_S = 5.0
"""Between two lines of progress; on a terminal one line is written over, more often."""
SHOWN = 20
"""Divergences that are shown without --json."""
TEXT = 100
"""Characters of a value that are shown without --json."""

_INTO = click.option(
    "--into", metavar="NAME",
    help="The fresh namespace. [default: <namespace>-replay, -replay-2, …]",
)  # fmt: skip
_POLICY = click.option("--policy", metavar="NAME", help="Which policy. [default: the only one]")
_RECIPE = click.option(
    "--recipe", "path", metavar="NAME|FILE",
    help="Instead of the recorded recipe, before --set. What is recorded must be the same.",
)  # fmt: skip


def _parse_range(_: click.Context, __: click.Parameter, text: str) -> tuple[int, int | None]:
    match = re.fullmatch(r"(\d+)(-(\d*))?", text)
    if match is None:
        raise click.BadParameter(f"{text!r}: give a task's number, as 12, or a range, as 12-40")
    first = int(match[1])
    if match[2] is None:
        return first, first
    return first, int(match[3]) if match[3] else None


_TASKS = click.option(
    "--tasks", "--task", "tasks", metavar="FIRST-LAST", default="0-", show_default=True,
    callback=_parse_range, help="Which tasks: 12, or 12-40, or 12- for all from 12 on.",
)  # fmt: skip


class ReplayProgress:
    """Tells on stderr how far long work is."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._told = time.monotonic()
        self._open = False

    def __call__(self, what: str, done: int, total: int) -> None:
        """Tells it, if the last time is a while ago."""
        if time.monotonic() - self._told < (0.2 if self._terminal else PROGRESS_S):
            return
        self._told = time.monotonic()
        line = f"{what} {done:,} of {total:,}"
        self._open = self._terminal
        click.echo(f"\r\x1b[K{line}" if self._terminal else line, err=True, nl=not self._terminal)

    def close(self) -> None:
        """Makes room for what is printed next."""
        if self._open:
            click.echo("\r\x1b[K", err=True, nl=False)


@click.group()
def replay() -> None:
    """Run a part of a recorded run again, from its log alone.

    What a run recorded is only read. What a replay makes goes into a fresh namespace beside it, to
    be looked at with `status`, `tail` and `topics` like any other.

    \b
      replay batches        train again on the same batches: are the weights the same, bit by bit?
      replay trajectories   train on the same trajectories by other advantages, filters or losses
      replay episodes       run agents against the recorded answers: does changed code ask the same?

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
    """Train again on recorded batches, and compare the weights' digests.

    Each batch is first rebuilt from the recorded results and compared, then copied byte by byte
    into the fresh namespace; the trainer reads the recorded trajectories by reference. On a CPU,
    with the same packages, every version comes out the same, bit by bit. Exit code 1 where one
    does not. Without --namespace, the run that started last.

    \b
    Examples:
      headrace replay batches
      headrace replay batches --namespace exp-7 --until 20 --into exp-7-again
    """
    import asyncio

    from headrace.errors import HeadraceError
    from headrace.services.operate.replay.recording import open_recording
    from headrace.services.operate.replay.replay_batches import replay_batches

    cluster, progress = cluster_of(options), ReplayProgress()

    async def run() -> BatchesReplayed:
        async with open_recording(cluster) as recording:
            return await replay_batches(
                recording, policy, until=until, into=into, say=explain, progress=progress
            )

    try:
        replayed = asyncio.run(run())
    finally:
        progress.close()
    _print_versions(replayed, as_json)
    if replayed.differing:
        raise HeadraceError(
            f"{len(replayed.differing)} of {len(replayed.versions)} versions came out otherwise, "
            f"the first is {replayed.differing[0].version}: other packages, another device, or "
            "changed code"
        )


def _print_versions(replayed: BatchesReplayed, as_json: bool) -> None:
    if as_json:
        rows = [
            {
                "version": one.version,
                "batch": one.batch,
                "recorded": one.recorded.digest.hex(),
                "replayed": one.replayed.digest.hex() if one.replayed else None,
                "same": one.same,
            }
            for one in replayed.versions
        ]
        print_json({"namespace": replayed.namespace, "policy": replayed.policy, "versions": rows})
        return
    print_table(
        ("version", "batch", "recorded", "replayed", "weights"),
        [
            [
                str(one.version),
                one.batch,
                one.recorded.digest.hex()[:16],
                one.replayed.digest.hex()[:16] if one.replayed else "-",
                "same" if one.same else "differs",
            ]
            for one in replayed.versions
        ],
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
    tasks: tuple[int, int | None],
    into: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Train anew on recorded trajectories, by another algorithm.

    Results go through the recipe's estimators and filters into new groups and batches, in the
    order in which they were recorded, and a policy is trained on them from version 0. Nothing is
    generated: rewards are the recorded policy's, and say nothing of the new one. A sample is as
    stale as it was when it was recorded. Without --namespace, the run that started last.

    \b
    Examples:
      headrace replay trajectories --set policies.default.groups.advantage=rloo
      headrace replay trajectories --set 'policies.default.groups.filters=["zero_advantage"]' \\
          --set policies.default.batches.groups=8 --tasks 100-
      headrace replay trajectories --recipe my.toml --into exp-7-my-loss
    """
    import asyncio

    from headrace.services.operate.replay.recording import change_recorded, open_recording
    from headrace.services.operate.replay.replay_trajectories import CHANGEABLE, replay_trajectories

    cluster, progress = cluster_of(options), ReplayProgress()

    async def run() -> TrajectoriesReplayed:
        async with open_recording(cluster) as recording:
            recipe = change_recorded(recording.recipe, path, settings, CHANGEABLE)
            return await replay_trajectories(
                recording, recipe, policy, tasks=tasks, into=into, say=explain, progress=progress
            )

    try:
        replayed = asyncio.run(run())
    finally:
        progress.close()
    _print_trained(replayed, as_json)


def _print_trained(replayed: TrajectoriesReplayed, as_json: bool) -> None:
    if as_json:
        print_json({"namespace": replayed.namespace, "policies": replayed.to_tree()})
        return
    for name, one in replayed.policies.items():
        dropped = ", ".join(f"{number} {reason}" for reason, number in one.dropped.most_common())
        explain(
            f"policy {name}: {one.groups:,} groups, {one.scored:,} scored; {len(one.sizes):,} "
            f"batches of {sum(one.sizes):,} samples; dropped: {dropped or 'none'}"
        )
        metrics = ("loss", "grad_norm", "kl", "importance_mean")
        print_table(
            ("version", "status", "samples", *metrics, "digest"),
            [
                [
                    str(version.version),
                    version.status,
                    str(samples),
                    *(_number(version.metrics.get(name)) for name in metrics),
                    version.digest.hex()[:16],
                ]
                for version, samples in zip(one.versions, [0, *one.sizes], strict=True)
            ],
        )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


@replay.command()
@_RECIPE
@set_option
@_TASKS
@click.option(
    "--limit", type=click.IntRange(min=1), default=1_000, show_default=True,
    help="Most episodes: their records are held in memory.",
)  # fmt: skip
@json_option
@cluster_options
def episodes(
    path: str | None,
    settings: tuple[str, ...],
    tasks: tuple[int, int | None],
    limit: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Run agents against recorded answers, and show where they ask otherwise.

    The agents' coroutines are run as they stand now, or as --set says. No environment, no model,
    nothing is written. Of each episode the first divergence is shown: what was asked then, and
    now. Exit code 1 where there is one. Requests and answers are kept for 7 days. Without
    --namespace, the run that started last.

    \b
    Examples:
      headrace replay episodes
      headrace replay episodes --task 12 --json
      headrace replay episodes --set agents.default.use=my_agents:solve --limit 100
    """
    import asyncio

    from headrace.errors import HeadraceError
    from headrace.services.operate.replay.recording import change_recorded, open_recording
    from headrace.services.operate.replay.replay_episodes import CHANGEABLE, replay_episodes

    cluster, progress = cluster_of(options), ReplayProgress()

    async def run() -> EpisodesReplayed:
        async with open_recording(cluster) as recording:
            recipe = change_recorded(recording.recipe, path, settings, CHANGEABLE)
            return await replay_episodes(
                recording, recipe, tasks=tasks, limit=limit, progress=progress
            )

    try:
        replayed = asyncio.run(run())
    finally:
        progress.close()
    _print_episodes(replayed, as_json)
    if replayed.divergences:
        raise HeadraceError(f"{len(replayed.divergences)} of {replayed.episodes} episodes diverge")


def _print_episodes(replayed: EpisodesReplayed, as_json: bool) -> None:
    if as_json:
        print_json(replayed.to_tree())
        return
    for one in replayed.divergences[:SHOWN]:
        _print_divergence(one)
    if (more := len(replayed.divergences) - SHOWN) > 0:
        click.echo(f"… and {more:,} more: --json has them all")
    left_out = {"whose record is no longer whole": replayed.past, "by --limit": replayed.more}
    click.echo(
        f"{replayed.episodes:,} episodes, {len(replayed.divergences):,} divergences"
        + (f"; {replayed.unfinished:,} have not ended" if replayed.unfinished else "")
        + "".join(f"; {number:,} left out, {why}" for why, number in left_out.items() if number)
    )


def _print_divergence(one: EpisodeDivergence) -> None:
    found = one.divergence
    call = "at its end" if found.call == "end" else f"call {found.call}"
    click.secho(f"task {one.task}, sample {one.sample}, attempt {one.attempt}, {call}", bold=True)
    for name in dict.fromkeys([*found.then, *found.now]):
        then, now = found.then.get(name), found.now.get(name)
        if then != now or name == "ask":
            shown = _shown(then) if then == now else f"{_shown(then)}  ->  {_shown(now)}"
            click.echo(f"  {name:<12}{shown}")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        value = ", ".join(f"{key}={part}" for key, part in value.items())
    text = "-" if value is None else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= TEXT else f"{text[:TEXT]}… ({len(text):,} characters)"
