"""Shows a run to people: a live view on a terminal, otherwise one line every 5 s. To stderr."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from headrace.services.operate.gateway_watch import GatewayWatch
from headrace.services.operate.options import visible
from headrace.services.operate.run.endings import without_numbers
from headrace.services.operate.run.progress import Progress
from headrace.services.operate.run.training_health import HealthRow

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 48
PLAIN_INTERVAL_S = 5.0


@dataclass
class Status:
    """What the view shows. The run keeps it up to date."""

    name: str
    began: float = field(default_factory=time.monotonic)
    """When the command began, in monotonic seconds."""
    phase: str = "starting"
    logs: Path | None = None
    progress: Progress | None = None
    lags: Mapping[str, int] = field(default_factory=dict)
    """Records that each service has not processed yet."""
    restarts: int = 0
    processes: int = 0
    gateway: GatewayWatch | None = None
    """None if the run has no gateway."""

    def elapsed_s(self) -> float:
        """Returns the seconds since the command began."""
        return time.monotonic() - self.began

    def began_at(self) -> float:
        """Returns when the command began, in epoch seconds."""
        return time.time() - self.elapsed_s()

    def since_start_s(self, at: float | None) -> float | None:
        """Returns the seconds from the command's start to an epoch time.

        None for None, and for a time before the start.
        """
        if at is None:
            return None
        since = at - self.began_at()
        return since if since >= 0 else None


class LiveView:
    """Draws a few lines again twice a second."""

    def __init__(self, status: Status, console: Console) -> None:
        self._live = Live(
            console=console,
            refresh_per_second=2,
            transient=True,  # The summary replaces it.
            get_renderable=lambda: panel(status),
        )
        self._live.start()

    def say(self, line: str) -> None:
        """Shows a line that stays on the screen."""
        self._live.console.print(Text(visible(line), style="dim"))

    def refresh(self) -> None:
        """Does nothing, because the live view draws itself."""

    def close(self) -> None:
        """Removes the live view from the screen."""
        self._live.stop()


class PlainView:
    """Prints a line of progress every 5 s, each kind of hint once, and each line that is said."""

    def __init__(self, status: Status, console: Console) -> None:
        self._status = status
        self._console = console
        self._shown = 0.0
        self._hinted: set[str] = set()

    def say(self, line: str) -> None:
        """Prints a line with the time."""
        self._print(f"{self._status.elapsed_s():6.1f} s  {line}")

    def refresh(self) -> None:
        """Prints the status if the last line of progress is 5 s old."""
        if self._status.progress is None or self._status.phase != "running":
            return
        elapsed = self._status.elapsed_s()
        if elapsed - self._shown >= PLAIN_INTERVAL_S:
            self._shown = elapsed
            self._print(progress_line(self._status))
            for hint in self._status.progress.hints():
                if (kind := without_numbers(hint)) not in self._hinted:
                    self._hinted.add(kind)
                    self.say(f"hint: {hint}")

    def close(self) -> None:
        """Does nothing."""

    def _print(self, line: str) -> None:
        self._console.print(visible(line), markup=False, highlight=False, soft_wrap=True)


View = LiveView | PlainView


def make_view(status: Status, console: Console) -> View:
    """Returns the live view for a terminal. Otherwise, or for a quiet console, the plain view."""
    live = console.is_terminal and not console.quiet
    return LiveView(status, console) if live else PlainView(status, console)


def sparkline(values: Sequence[float], width: int = CURVE_WIDTH) -> str:
    """Returns a curve with one character per point.

    The scale goes from 0 or the lowest value to 1 or the highest. If there are more than `width`
    values, neighbours are averaged.
    """
    if not values:
        return ""
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[first:last]) / (last - first) for first, last in pairwise(edges)]
    low, high = min(0.0, *values), max(1.0, *values)
    return "".join(BARS[round((value - low) / (high - low) * (len(BARS) - 1))] for value in values)


def published(version: int) -> str:
    """Returns a version as text, and "-" for -1, which means that no version is published."""
    return "-" if version < 0 else str(version)


def policy_line(name: str, version: int, reward: float | None, curve: Sequence[float]) -> str:
    """Returns a policy's newest version, reward and reward curve as one line."""
    shown = "-" if reward is None else f"{reward:.3f}"
    return (
        f"  policy {name:<12} version {published(version)}   reward {shown}  {sparkline(curve, 32)}"
    )


def progress_line(status: Status) -> str:
    """Returns the run's progress as one line."""
    progress = status.progress
    assert progress is not None
    reward = progress.reward()
    parts = [
        f"{status.elapsed_s():6.1f} s",
        f"version {published(progress.version())}",
        f"reward {'-' if reward is None else f'{reward:.3f}'}",
        f"episodes {progress.episodes} ({progress.episodes_per_s(time.time()):.0f}/s)",
        f"staleness {max((p.staleness for p in progress.policies.values()), default=0)}",
        f"lag {sum(status.lags.values())}",
        f"failures {progress.failures}",
        f"restarts {status.restarts}",
    ]
    if status.gateway is not None and status.gateway.answered:
        parts.append(f"clients {status.gateway.clients}")
    for name, policy in progress.policies.items():
        if policy.cross_entropy is not None:
            parts.append(f"cross-entropy {policy.cross_entropy:.3f}")
        for version, evaluation in list(progress.evaluations.of(name).items())[-1:]:
            parts.append(f"evaluated {evaluation.brief()} at {version}")
    return "  ".join(parts)


def empty_panel(name: str, phase: str, elapsed_s: float, *, labels: int) -> tuple[Text, Table]:
    """Returns a panel's title and its table without rows, whose labels are that wide at least."""
    minutes, seconds = divmod(int(elapsed_s), 60)
    title = Text.assemble(
        (f" {name} ", "bold reverse cyan"),
        f"  {phase}  ",
        (f"{minutes}:{seconds:02d}", "bold"),
    )
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", min_width=labels)
    rows.add_column()
    return title, rows


def panel(status: Status) -> RenderableType:
    """Returns the run's progress as a few lines."""
    title, rows = empty_panel(status.name, status.phase, status.elapsed_s(), labels=10)
    if status.progress is not None:
        _add_progress(rows, status.progress)
        rows.add_row("lag", "  ".join(f"{name} {lag:,}" for name, lag in status.lags.items()))
    if status.gateway is not None and status.gateway.answered:
        rows.add_row("clients", str(status.gateway))
    restarts = Text(f"{status.restarts}", style="bold yellow" if status.restarts else "")
    rows.add_row("processes", Text.assemble(f"{status.processes}   restarts ", restarts))
    if status.logs is not None:
        rows.add_row("logs", Text(str(status.logs), style="dim"))
    return Group(title, rows)


def _figures(row: HealthRow) -> Text:
    return Text("   ").join(
        Text(one.text, style="bold yellow" if one.warned else "") for one in row.figures
    )


def _add_progress(rows: Table, progress: Progress) -> None:
    aim, versions = progress.recipe.stop.reward, progress.recipe.stop.reward_versions
    several = len(progress.policies) > 1
    for name, policy in progress.policies.items():
        reward = policy.reward(versions)
        rows.add_row(
            f"reward {name}" if several else "reward",
            Text.assemble(
                (sparkline(policy.curve()), "green"),
                "  ",
                ("-" if reward is None else f"{reward:.3f}", "bold"),
                "" if aim is None else f" of {aim:g}",
            ),
        )
        skipped = f"   skipped {policy.skipped}" if policy.skipped else ""
        rows.add_row(
            "version", f"{published(policy.version)}   batch {policy.newest_batch}{skipped}"
        )
        for row in policy.health.rows():
            rows.add_row(row.label, _figures(row))
        if policy.cross_entropy is not None:
            rows.add_row("warm start", f"cross-entropy {policy.cross_entropy:.3f} nats per token")
        for version, evaluation in list(progress.evaluations.of(name).items())[-1:]:
            rows.add_row("evaluated", f"version {version}   {evaluation}")
    failures = Text(f"{progress.failures}", style="bold red" if progress.failures else "")
    rows.add_row(
        "episodes",
        Text.assemble(
            f"{progress.episodes:,}   {progress.episodes_per_s(time.time()):.0f}/s   failed ",
            failures,
        ),
    )
    rows.add_row("tasks", f"{progress.tasks_ended:,} ended of {progress.submitted:,} submitted")
    for kind in progress.endings.top():
        rows.add_row("failed", Text(visible(str(kind)), style="red"))
    for hint in progress.hints():
        rows.add_row("hint", Text(hint, style="yellow"))
