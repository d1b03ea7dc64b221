"""Shows a fine-tuning to people: a live view on a terminal, otherwise one line every 5 s."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.live import Live
from rich.text import Text

from headrace.services.operate.options import visible
from headrace.services.operate.run.live_view import (
    PLAIN_INTERVAL_S,
    empty_panel,
    sparkline,
)
from headrace.services.operate.sft.fine_tuning import SftProgress


@dataclass
class SftStatus:
    """What the view shows."""

    name: str
    phase: str = "loading the model"
    progress: SftProgress | None = None
    began: float = field(default_factory=time.monotonic)
    """In monotonic seconds."""
    trained_from: float | None = None
    """When the first update began, in monotonic seconds."""

    def begin(self, progress: SftProgress) -> None:
        """Notes that the first update begins."""
        self.progress, self.phase, self.trained_from = progress, "learning", time.monotonic()

    def elapsed_s(self) -> float:
        """Returns the seconds since the command began."""
        return time.monotonic() - self.began

    def speed(self) -> tuple[float, float]:
        """Returns the learned tokens per second, and the seconds that are left; 0 if unknown."""
        one = self.progress
        if one is None or self.trained_from is None or one.done == one.continued:
            return 0.0, 0.0
        seconds = max(time.monotonic() - self.trained_from, 1e-9)
        each = seconds / (one.done - one.continued)
        return (one.tokens - one.tokens_before) / seconds, each * (one.updates - one.done)


class SftView:
    """Draws the status again and again on a terminal, and prints lines elsewhere."""

    def __init__(self, status: SftStatus, console: Console) -> None:
        self._status = status
        self._console = console
        self._shown = 0.0
        self._live: Live | None = None
        if console.is_terminal and not console.quiet:
            self._live = Live(
                console=console,
                refresh_per_second=2,
                transient=True,
                get_renderable=lambda: sft_panel(status),
            )

    def open(self) -> None:
        """Begins to draw, and hides the cursor until `close`."""
        if self._live is not None:
            self._live.start()

    def say(self, line: str) -> None:
        """Shows a line that stays."""
        if self._live is not None:
            self._live.console.print(Text(visible(line), style="dim"))
        else:
            self._print(f"{self._status.elapsed_s():6.1f} s  {line}")

    def refresh(self) -> None:
        """Prints the progress if there is no live view and the last line is 5 s old."""
        elapsed = self._status.elapsed_s()
        if self._live is None and elapsed - self._shown >= PLAIN_INTERVAL_S:
            self._shown = elapsed
            self._print(sft_line(self._status))

    def close(self) -> None:
        """Removes the live view."""
        if self._live is not None:
            self._live.stop()

    def _print(self, line: str) -> None:
        self._console.print(visible(line), markup=False, highlight=False, soft_wrap=True)


def sft_line(status: SftStatus) -> str:
    """Returns the progress as one line."""
    one = status.progress
    parts = [f"{status.elapsed_s():6.1f} s"]
    if one is None or not one.losses:
        return "  ".join([*parts, status.phase])
    tokens, left = status.speed()
    parts += [
        f"update {one.done} of {one.updates}",
        f"epoch {one.epoch} of {len(one.epoch_ends)}",
        f"cross-entropy {one.losses[-1]:.3f}",
        *([f"held out {one.held_out[-1][1]:.3f}"] if one.held_out else []),
        f"learning rate {one.rate:.2g}",
        f"{tokens:,.0f} tokens/s",
        f"{left:.0f} s left",
    ]
    return "  ".join(parts)


def sft_panel(status: SftStatus) -> RenderableType:
    """Returns the progress as a few lines."""
    title, rows = empty_panel(visible(status.name), status.phase, status.elapsed_s(), labels=13)
    if (one := status.progress) is not None:
        tokens, left = status.speed()
        rows.add_row(
            "update",
            f"{one.done:,} of {one.updates:,}   epoch {one.epoch} of {len(one.epoch_ends)}",
        )
        if one.losses:
            curve = sparkline(one.losses)
            rows.add_row("cross-entropy", f"{one.losses[-1]:.3f} nats per token  {curve}")
        if one.held_out:
            text = "  ".join(f"{value:.3f} at {at:,}" for at, value in one.held_out[-4:])
            rows.add_row("held out", text)
        rows.add_row("speed", f"{tokens:,.0f} tokens/s   {left:,.0f} s left")
        rows.add_row("learning rate", f"{one.rate:.3g}")
    hint = Text("Ctrl-C writes a checkpoint and stops; the same command continues", style="dim")
    return Lines(title, rows, hint)
