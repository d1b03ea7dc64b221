"""Collects what a fine-tuning learns from: rows of files, and recorded episodes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.events import Sampling, TrajectoryRecorded, Turn
from headrace.services.base.tool_calls import Format
from headrace.services.operate.sft.sft_rows import BadRow, read_rows
from headrace.services.operate.sft.sft_tokens import RowTokens, shown_values
from headrace.services.operate.trajectories.export_sft import Selection
from headrace.services.operate.trajectories.recorded_episodes import UNREAD, EpisodeReader
from headrace.trainer.sequences import TokenSequence, UnusableBatch, token_sequences

MOST_SHOWN = 10
"""How many bad rows a message lists."""
SAY_S = 5.0
"""Seconds between two lines about the progress."""


@dataclass
class Examples:
    """The sequences to learn, and all that is not among them."""

    sequences: list[TokenSequence] = field(default_factory=list)
    """Their `sample` is their index. Sequences of one row or item have the same `group`."""
    bad: list[str] = field(default_factory=list)
    """`FILE:LINE: reason` of each row that can't be used."""
    left_out: Counter[str] = field(default_factory=Counter)
    """How many episodes were left out, by the reason."""
    ignored: set[str] = field(default_factory=set)
    """Keys of rows that were not read."""
    groups: int = 0

    def add(self, sequences: Sequence[TokenSequence]) -> None:
        """Adds the sequences of one row or item."""
        for one in sequences:
            number = len(self.sequences)
            self.sequences.append(replace(one, sample=number, group=self.groups))
        self.groups += 1

    def check(self, skip_bad: bool) -> None:
        """Raises UsageError if there is nothing to learn, or a bad row that must not be skipped."""
        if self.bad and not skip_bad:
            more = len(self.bad) - MOST_SHOWN
            shown = [*self.bad[:MOST_SHOWN], *([f"and {more} more"] if more > 0 else [])]
            raise UsageError(
                f"{len(self.bad)} rows can't be learned. Correct them, or leave them out with "
                "--skip-bad:\n  " + "\n  ".join(shown)
            )
        if not self.sequences:
            left = ", ".join(f"{count} {why}" for why, count in self.left_out.items())
            found = left and f": the episodes were {left}"
            raise UsageError(f"there is nothing to learn{found}")

    def remarks(self) -> list[str]:
        """Returns lines about what is not learned."""
        lines = [f"leaves out {one}" for one in self.bad[:MOST_SHOWN]]
        if len(self.bad) > MOST_SHOWN:
            lines.append(f"leaves out {len(self.bad) - MOST_SHOWN} more rows")
        for reason, count in self.left_out.most_common(MOST_SHOWN):
            lines.append(f"leaves out {count} episodes {reason}")
        if self.ignored:
            lines.append(f"does not read the keys {', '.join(sorted(self.ignored)[:MOST_SHOWN])}")
        return lines


async def add_rows(
    into: Examples,
    files: Sequence[Path],
    tokens: RowTokens,
    form: Format,
    say: Callable[[str], None],
) -> None:
    """Adds the rows of files. Can be cancelled after each row.

    `say` receives lines about the progress. Raises UsageError if a file can't be read.
    """
    said = time.monotonic()
    for path in files:
        for number, row in read_rows(path, form):
            where = f"{path}:{number}"
            try:
                if isinstance(row, BadRow):
                    raise row
                into.add([tokens.sequence(row, len(into.sequences), where)])
                into.ignored.update(row.ignored)
            except ValueError as error:
                into.bad.append(f"{where}: {error}")
            if time.monotonic() - said >= SAY_S:
                said = time.monotonic()
                say(f"read {len(into.sequences) + len(into.bad):,} rows")
            await asyncio.sleep(0)


async def add_recorded(
    into: Examples,
    selection: Selection,
    reader: EpisodeReader,
    policy: str,
    sampling: Sampling,
    tokenizer: str,
) -> None:
    """Adds the selected episodes of a namespace, with the token ids that its log has.

    `tokenizer` is the digest of the model's tokenizer. What a policy sampled is learned as if it
    had been demonstrated, with `sampling`. The episodes of an item are one group, because each
    epoch makes another task of it. Leaves out episodes whose trajectory can't be read any more.
    Raises RecordsLost if that leaves none.
    """
    tasks: dict[int, tuple[str, list[TokenSequence]]] = {}
    async with aclosing(reader.read((), 1 << 62)) as episodes:
        async for episode in episodes:
            recorded = episode.recorded
            reason = selection.reason(recorded)
            if not reason and recorded.tokenizer != tokenizer:
                reason = "of another tokenizer than the model's"
            if not reason:
                made = _sequences(recorded, policy, sampling)
                if not isinstance(made, str):
                    tasks.setdefault(recorded.task, (recorded.item_id, []))[1].extend(made)
                    continue
                reason = made
            into.left_out[reason] += 1
    if reader.unread:
        into.left_out[UNREAD] = reader.unread
    items: dict[str, list[TokenSequence]] = {}
    for task in sorted(tasks):
        item, sequences = tasks[task]
        items.setdefault(item, []).extend(sequences)
    for sequences in items.values():
        into.add(sequences)


def _sequences(
    recorded: TrajectoryRecorded, policy: str, sampling: Sampling
) -> list[TokenSequence] | str:
    """Returns the sequences of an episode, or the reason if it has no sequence to learn."""
    shown: dict[str, Any] = {
        "demonstrated": True, "logprobs": b"", "versions": b"", "teacher": b"", "sampling": 0,
    }  # fmt: skip
    turns: Collection[Turn] = tuple(one.model_copy(update=shown) for one in recorded.turns)
    trajectory = recorded.model_copy(update={"turns": turns, "samplings": (sampling,)})
    try:
        found = token_sequences(trajectory, policy, (1.0,), 1.0, 1 << 31)
    except UnusableBatch as error:
        return f"that can't be learned ({error})"
    if not found:
        return f"without a turn of policy {policy} to learn"
    return [replace(one, **shown_values(len(one.positions))) for one in found]
