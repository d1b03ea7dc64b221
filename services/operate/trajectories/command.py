"""`headrace trajectories`: exports recorded episodes in the formats of other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import click

from headrace.services.operate.options import cluster_of, cluster_options, say

if TYPE_CHECKING:
    from headrace.services.namespace.cluster_config import ClusterConfig
    from headrace.services.operate.trajectories.recorded_episodes import RecordedEpisode

TARGETS = {
    "atif": "trajectories",
    "inspect": "trajectories.eval",
    "jsonl": "trajectories.jsonl",
    "otlp": "http://127.0.0.1:4318/v1/traces",
    "parquet": "trajectories.parquet",
    "sft": "trajectories.jsonl",
}
"""The formats, and where each goes by default."""

ROW_FORMATS = ("jsonl", "parquet")
"""The formats that have a row for each turn."""


class Writer(Protocol):
    """Writes episodes in one format. All methods block."""

    def write(self, episode: RecordedEpisode) -> None:
        """Writes an episode that has a turn."""

    def close(self) -> None:
        """Writes what is left."""


@click.command()
@click.argument("tasks", metavar="[TASK]...", nargs=-1, type=click.IntRange(min=0))
@click.option(
    "--format", "kind", type=click.Choice(sorted(TARGETS)), required=True,
    help="atif: a JSON file for each path, in the Agent Trajectory Interchange Format. inspect: a "
    "log that `inspect view` opens. jsonl, parquet: a row for each turn, with arrays and texts. "
    "otlp: traces for an OpenTelemetry collector. sft: the messages of good episodes, for "
    "supervised fine-tuning.",
)  # fmt: skip
@click.option(
    "--to", metavar="PLACE",
    help="atif: a folder. inspect: a file, .eval or .json. jsonl, parquet, sft: a file. otlp: a "
    "URL. "
    "[default: trajectories, with the ending of the format, or http://127.0.0.1:4318/v1/traces]",
)  # fmt: skip
@click.option(
    "--most", metavar="N", type=click.IntRange(min=1), default=10_000, show_default=True,
    help="Export at most so many episodes.",
)  # fmt: skip
@click.option(
    "--content", is_flag=True,
    help="With otlp: add the texts of prompts and answers to the spans.",
)  # fmt: skip
@click.option(
    "--passing", type=float, metavar="REWARD",
    help="With sft: export episodes that have at least this reward. [default: the recipe's "
    "evaluation.passing, or 1]",
)  # fmt: skip
@cluster_options
def trajectories(
    tasks: tuple[int, ...],
    kind: str,
    to: str | None,
    most: int,
    content: bool,
    passing: float | None,
    **options: Any,
) -> None:
    """Export recorded episodes in the formats of other tools.

    Exports the episodes of the numbered TASKs. [default: all that have ended] Only the attempt that
    counts is exported. Episodes whose trajectory is no longer in the log are left out, and counted.
    A second export writes the same: files have the same names, and spans the same ids. To export a
    model instead, use `headrace export`.

    A row of jsonl and parquet has the fields of the topic `turns`, whether the run writes that or
    not. The file appears when it is whole.

    A line of sft has the messages of a path from its first turn to its last trainable one, as the
    agent sent them, and the answers. Episodes of evaluations are left out.

    The formats inspect, otlp and parquet need the extras of the same names. Texts are decoded with
    the model's tokenizer; without it, prompts have no text.

    \b
    Examples:
      headrace trajectories --format atif --to my-trajectories
      headrace trajectories --format parquet --most 1000000
      headrace trajectories --format inspect 17 42 --to tasks.eval
      headrace trajectories --format sft --passing 0.5 --to good.jsonl
      headrace trajectories --format otlp --to http://collector:4318/v1/traces --content
    """
    from headrace.errors import UsageError

    if content and kind != "otlp":
        raise UsageError(f"--content is only for --format otlp: {kind} always has the texts")
    if passing is not None and kind != "sft":
        raise UsageError(f"--passing is only for --format sft: {kind} has episodes of any reward")
    wanted = _Wanted(cluster_of(options), kind, to or TARGETS[kind], frozenset(tasks), most)
    if kind in ROW_FORMATS:
        done = _export_rows(wanted)
    elif kind == "sft":
        done = _export_sft(wanted, passing)
    else:
        done = _export_episodes(wanted, content)
    without = f", and left out {done.left_out}" if done.left_out else ""
    say(f"exported {done.exported} episodes to {wanted.target}{without}")
    if done.seen == most:
        say(f"stopped after {most} episodes: --most exports more")


class _Wanted(NamedTuple):
    """What to export, and where to."""

    cluster: ClusterConfig
    kind: str
    target: str
    tasks: frozenset[int]
    most: int


class _Done(NamedTuple):
    """Numbers of episodes, and what was left out, in words."""

    exported: int
    seen: int
    left_out: str = ""


def _export_rows(wanted: _Wanted) -> _Done:
    import asyncio

    from headrace.services.operate.trajectories.export_rows import export_rows
    from headrace.services.operate.trajectories.recorded_episodes import left_unread

    cluster, kind, target, tasks, most = wanted
    rows = export_rows(cluster, kind, Path(target), tasks, most, say)
    count, unread = asyncio.run(rows)
    return _Done(count, count, left_unread(unread))


def _export_sft(wanted: _Wanted, passing: float | None) -> _Done:
    import asyncio

    from headrace.services.operate.trajectories.export_sft import export_sft
    from headrace.services.operate.trajectories.recorded_episodes import UNREAD

    cluster, _, target, tasks, most = wanted
    chosen = asyncio.run(export_sft(cluster, Path(target), tasks, most, passing, say))
    seen = chosen.counts.total() - chosen.counts[UNREAD]
    return _Done(chosen.counts["exported"], seen, chosen.report())


def _export_episodes(wanted: _Wanted, content: bool) -> _Done:
    import asyncio

    from headrace.services.log.unpacked import Texts
    from headrace.services.namespace.lookup import open_namespace
    from headrace.services.operate.run.run_stack import running_stack
    from headrace.services.operate.trajectories.recorded_episodes import EpisodeReader, left_unread

    cluster, kind, target, tasks, most = wanted

    async def export() -> _Done:
        async with (
            running_stack(cluster, say) as (_, located),
            open_namespace(located, "trajectories") as (log, life),
        ):
            writer = _writer(kind, target, log.topics.namespace, content)
            reader = EpisodeReader(log, Texts(life.recipe()), with_answers=kind == "otlp")
            written = empty = 0
            async for episode in reader.read(tasks, most):
                if episode.turns:
                    await asyncio.to_thread(writer.write, episode)
                    written += 1
                else:
                    empty += 1
            await asyncio.to_thread(writer.close)
            parts = [f"{empty} without a turn" if empty else "", left_unread(reader.unread)]
            return _Done(written, written + empty, ", ".join(filter(None, parts)))

    return asyncio.run(export())


def _writer(kind: str, target: str, namespace: str, content: bool) -> Writer:
    from headrace.errors import UsageError

    try:
        match kind:
            case "atif":
                from headrace.services.operate.trajectories.atif import AtifWriter

                return AtifWriter(Path(target))
            case "inspect":
                from headrace.services.operate.trajectories.inspect_log import InspectWriter

                return InspectWriter(Path(target), namespace)
            case _:
                from headrace.services.operate.trajectories.otlp import OtlpWriter

                return OtlpWriter(target, namespace, content=content)
    except ImportError as error:
        raise UsageError(f"--format {kind}: {error}. Run pip install 'headrace[{kind}]'") from None
