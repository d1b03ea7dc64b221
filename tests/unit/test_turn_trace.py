"""The profiler of turns: how stamps become legs and stages, and what threads cost."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.bench.turn_trace.legs import POINTS, STAGES, medians, read_stamps, turns_of
from tests.bench.turn_trace.stamps import KINDS, StampBook
from tests.bench.turn_trace.thread_cpu import ThreadCost, since, thread_costs, total

POINT_US = (10, 20, 300, 50, 30, 40, 100)
"""Microseconds of the stages of each leg."""


def write_turns(folder: Path, turns: int) -> list[Path]:
    """The stamps of an episode, as its sender and its reader would write them."""
    sender, reader = StampBook(), StampBook()
    at_us = 1_000
    for turn in range(turns):
        for kind, call in zip(KINDS, (2, 2, 3, 3), strict=True):
            headers = [
                ("ce_id", f"7/0/0/{2 * turn + call}".encode()),
                ("ce_type", f"headrace.{kind}".encode()),
            ]
            for point, spent_us in zip(POINTS, POINT_US, strict=True):
                book = sender if point in POINTS[:3] else reader
                book.add(point, headers, at_us * 1000)
                at_us += spent_us
            sender.add("sent", headers, (at_us - 100) * 1000)
    for name, book in (("sender", sender), ("reader", reader)):
        book.write(folder / name)
    return [folder / "sender", folder / "reader"]


def test_stages_of_a_turn_add_up_to_the_time_until_the_next_prompt(tmp_path: Path) -> None:
    # The second turn is the last one: no prompt follows it.
    (turn,) = turns_of(read_stamps(write_turns(tmp_path, 2)))

    assert turn.legs == (tuple(spent * 1000 for spent in POINT_US),) * 4
    assert turn.total == 4 * sum(POINT_US) * 1000
    assert turn.acknowledged == ((sum(POINT_US[2:]) - 100) * 1000,) * 4


def test_a_record_that_is_read_twice_counts_from_the_first_time(tmp_path: Path) -> None:
    files = write_turns(tmp_path, 2)
    late = [line.replace("]", "0]") for line in files[1].read_text().splitlines(keepends=True)]
    (tmp_path / "again").write_text("".join(late))

    (turn,) = turns_of(read_stamps([*files, tmp_path / "again"]))

    assert turn.total == 4 * sum(POINT_US) * 1000


def test_a_turn_with_a_missing_stamp_is_left_out(tmp_path: Path) -> None:
    times = read_stamps(write_turns(tmp_path, 2))

    del times["decoded", "ActionRequested", "7/0/0/3"]

    assert list(turns_of(times)) == []


def test_the_table_has_a_row_for_each_stage_and_one_for_the_sum(tmp_path: Path) -> None:
    rows = medians(turns_of(read_stamps(write_turns(tmp_path, 3))))

    assert len(rows) == len(STAGES) + 1
    assert rows[0] == [10, 10, 10, 10, 40]
    assert rows[-1] == [sum(POINT_US)] * 4 + [4 * sum(POINT_US)]


def test_other_records_than_those_of_a_turn_are_not_kept() -> None:
    book = StampBook()

    book.add("fetched", [("ce_id", b"1"), ("ce_type", b"headrace.TaskEnded")])
    book.add("fetched", [])

    assert book.stamps == []


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only on Linux")
def test_a_thread_that_works_costs_cpu() -> None:
    go, done = threading.Event(), threading.Event()

    def work() -> None:
        go.wait()
        sum(range(3_000_000))
        done.set()
        go.clear()
        go.wait()

    thread = threading.Thread(target=work)
    thread.start()
    before = thread_costs({"own": os.getpid()})
    go.set()
    done.wait()
    spent = since(before, thread_costs({"own": os.getpid()}))
    go.set()
    thread.join()

    assert total(spent.values()).cpu_ns > 1_000_000
    assert min(cost.runs for cost in spent.values()) >= 0
    assert ThreadCost(3, 2, 1).plus(ThreadCost(1, 1, 1), -1) == ThreadCost(2, 1, 0)
