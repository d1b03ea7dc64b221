"""No bytes that anyone writes end a consumer, take long, or take much memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fuzz.consuming import fuzz_consumers
from tests.fuzz.decoding import fuzz_decoder
from tests.fuzz.fuzz import fuzz

LONG = 1_000_000


def test_any_bytes_decode_to_an_event_or_an_error_in_little_time_and_memory() -> None:
    decoded = fuzz_decoder(seed=0, messages=10_000)
    assert 0 < decoded.events < decoded.messages


@pytest.mark.parametrize("seed", range(4))
def test_strange_records_end_no_service_and_hold_no_task_up(tmp_path: Path, seed: int) -> None:
    fuzz_consumers(tmp_path, seed, messages=150)


@pytest.mark.long
def test_a_million_messages() -> None:
    assert list(fuzz(LONG, seed=1_000, jobs=os.cpu_count() or 1)) == []
