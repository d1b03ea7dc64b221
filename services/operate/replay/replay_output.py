"""Prints the progress and the result of a replay."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import click

from headrace.services.operate.options import echo, print_json, print_table, say, visible
from headrace.services.operate.replay.recorded_answers import END, Divergence
from headrace.services.operate.replay.replay_batches import BatchesReplayed
from headrace.services.operate.replay.replay_episodes import EpisodesReplayed
from headrace.services.operate.replay.replay_trajectories import TrajectoriesReplayed
from headrace.services.operate.show.pages import number

PROGRESS_S = 5.0
"""Seconds between two lines of progress. A terminal shows one line that changes more often."""
TERMINAL_PROGRESS_S = 0.2
SHOWN = 20
"""Most divergences that are shown without --json."""
TEXT = 100
"""Most characters of a value that are shown without --json."""
METRICS = ("loss", "grad_norm", "kl", "importance_mean")
"""The columns of metrics in the table of trained versions."""


class ReplayProgress:
    """Shows on stderr how far a replay is."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._interval_s = TERMINAL_PROGRESS_S if self._terminal else PROGRESS_S
        self._shown_at = time.monotonic()
        self._line_open = False

    def __call__(self, what: str, done: int, total: int) -> None:
        """Shows that `done` of `total` are done, unless it showed progress a moment ago."""
        if time.monotonic() - self._shown_at < self._interval_s:
            return
        self._shown_at = time.monotonic()
        line = f"{what} {done:,} of {total:,}"
        self._line_open = self._terminal
        line = f"\r\x1b[K{visible(line)}" if self._terminal else visible(line)
        click.echo(line, err=True, nl=not self._terminal)

    def close(self) -> None:
        """Clears the line of progress on a terminal."""
        if self._line_open:
            click.echo("\r\x1b[K", err=True, nl=False)


def print_versions(replayed: BatchesReplayed, as_json: bool) -> None:
    """Prints which versions came out the same as in the recorded run."""
    rows: list[dict[str, Any]] = [
        {
            "version": one.recorded.version,
            "batch": one.batch,
            "recorded": one.recorded.digest.hex(),
            "replayed": one.replayed.digest.hex() if one.replayed else None,
            "same": one.same,
        }
        for one in replayed.versions
    ]
    if as_json:
        print_json({"namespace": replayed.namespace, "policy": replayed.policy, "versions": rows})
        return
    for row in rows:
        row["recorded"] = row["recorded"][:16]
        row["replayed"] = (row["replayed"] or "-")[:16]
        row["same"] = "same" if row["same"] else "differs"
    head = ("version", "batch", "recorded", "replayed", "weights")
    print_table(head, [[str(value) for value in row.values()] for row in rows])
    _suggest_comparison(replayed.namespace)


def print_trained(replayed: TrajectoriesReplayed, as_json: bool) -> None:
    """Prints the versions that were trained on recorded trajectories."""
    if as_json:
        print_json({"namespace": replayed.namespace, "policies": replayed.to_tree()})
        return
    for name, one in replayed.policies.items():
        dropped = ", ".join(f"{count} {reason}" for reason, count in one.dropped.most_common())
        say(
            f"policy {name}: {one.groups:,} groups, {one.scored:,} scored; {len(one.sizes):,} "
            f"batches with {sum(one.sizes):,} samples; dropped: {dropped or 'nothing'}"
        )
        print_table(
            ("version", "status", "samples", *METRICS, "digest"),
            [
                [
                    str(version.version),
                    version.status,
                    str(samples),
                    *(number(version.metrics.get(metric)) for metric in METRICS),
                    version.digest.hex()[:16],
                ]
                for version, samples in one.trained()
            ],
        )
    _suggest_comparison(replayed.namespace)


def _suggest_comparison(namespace: str) -> None:
    say(f"`headrace compare {namespace}` shows the metrics beside those of the recorded run")


def print_episodes(replayed: EpisodesReplayed, as_json: bool) -> None:
    """Prints how many episodes were replayed, and where agents diverged."""
    if as_json:
        print_json(asdict(replayed))
        return
    for one in replayed.divergences[:SHOWN]:
        _print_divergence(one)
    if (more := len(replayed.divergences) - SHOWN) > 0:
        click.echo(f"… and {more:,} more: --json shows them all")
    counts = {
        "have not ended": replayed.unfinished,
        "left out because part of their record is no longer kept": replayed.no_longer_kept,
        "left out by --limit": replayed.beyond_limit,
    }
    click.echo(
        f"{replayed.episodes:,} episodes, {len(replayed.divergences):,} divergences"
        + "".join(f"; {count:,} {what}" for what, count in counts.items() if count)
    )


def _print_divergence(one: Divergence) -> None:
    call = "at its end" if one.call == END else f"call {one.call}"
    echo(f"task {one.task}, sample {one.sample}, attempt {one.attempt}, {call}", bold=True)
    for name in dict.fromkeys([*one.then, *one.now]):
        then, now = one.then.get(name), one.now.get(name)
        if then != now or name == "ask":
            shown = _shown(then) if then == now else f"{_shown(then)}  ->  {_shown(now)}"
            echo(f"  {name:<12}{shown}")


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        value = ", ".join(f"{key}={part}" for key, part in value.items())
    text = "-" if value is None else repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= TEXT else f"{text[:TEXT]}… ({len(text):,} characters)"
