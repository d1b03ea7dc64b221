"""Many messages in several processes."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import as_completed
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.fuzz.consuming import fuzz_consumers
from tests.fuzz.decoding import fuzz_decoder
from tests.pool import processes

DECODED_AT_ONCE = 20_000
CONSUMED_AT_ONCE = 200
CONSUMED_SHARE = 0.05
"""Of all messages: those that go through the services. Each costs some hundred times as much."""

Failure = tuple[str, str]
"""The command that repeats it, and what happened."""


def decode_some(seed: int, messages: int) -> None:
    """A part of the work, in a process of its own: the decoder."""
    fuzz_decoder(seed, messages)


def consume_some(seed: int, messages: int) -> None:
    """A part of the work, in a process of its own: the services."""
    logging.disable(logging.CRITICAL)  # each dead letter would be told of
    with TemporaryDirectory(prefix="headrace-fuzz-") as folder:
        fuzz_consumers(Path(folder), seed, messages)


PARTS: dict[str, tuple[Callable[[int, int], None], int]] = {
    "decode": (decode_some, DECODED_AT_ONCE),
    "consume": (consume_some, CONSUMED_AT_ONCE),
}


def fuzz(messages: int, seed: int, jobs: int, only: Iterable[str] = PARTS) -> Iterator[Failure]:
    """Spreads so many messages over so many processes. Yields what failed, as it fails."""
    parts = dict.fromkeys(only)
    shares = {"decode": messages, "consume": int(messages * CONSUMED_SHARE)}
    if len(parts) == 1:
        shares = dict.fromkeys(parts, messages)
    with processes(jobs) as pool:
        running = {}
        for part in parts:
            work, at_once = PARTS[part]
            for index, first in enumerate(range(0, shares[part], at_once)):
                count = min(at_once, shares[part] - first)
                command = f"--only {part} --seed {seed + index} --messages {count}"
                running[pool.submit(work, seed + index, count)] = (command, count)
        done = 0
        for finished in as_completed(running):
            command, count = running[finished]
            done += count
            print(f"\r{done:,} of {sum(shares[p] for p in parts):,} messages", end="", flush=True)
            if (error := finished.exception()) is not None:
                text = "".join(traceback.format_exception(error, limit=-8))
                yield f"python -m tests.fuzz --jobs 1 {command}", text
    print()
