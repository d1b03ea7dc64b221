"""Answers that are read before the start of their episode, and ends that are known."""

from __future__ import annotations

import asyncio

import pytest

from headrace.schemas.events import ActionRequested, EpisodeEnded
from headrace.services.agent.early_answers import EARLY, ENDED, START_S, EarlyEnds
from tests.unit.agent.test_shard import Bench, answered, observed, on_a_bench, result, started


def test_an_answer_that_is_read_before_its_start_counts() -> None:
    async def test(bench: Bench) -> None:
        await bench.catch_up()
        await bench.feed(observed(8))  # a zombie that reads starts sooner has asked
        assert bench.sent == []
        await bench.feed(started(8))
        # It is the answer to the reset, which this owner need not send; that it is to another
        # meaning shows that it was looked at.
        resets = [one for one in bench.sent if isinstance(one, ActionRequested)]
        assert [(reset.kind, reset.attempt) for reset in resets] == [("close", 0), ("reset", 1)]

    on_a_bench(test)


def test_an_answer_counts_if_a_later_task_started_before() -> None:
    async def test(bench: Bench) -> None:
        await bench.catch_up()
        await bench.feed(started(1_000_001))
        # A tenant's older task starts, and this shard reads the answer to its former owner first.
        await bench.feed(answered(bench, 6).model_copy(update={"task": 500}))
        await bench.feed(started(1_000_002))
        assert bench.closed() == []
        await bench.feed(started(500))
        actions = [one for one in bench.sent if isinstance(one, ActionRequested)]
        assert [one.kind for one in actions if one.task == 500] == ["close"]
        (ended,) = [event for event in bench.sent if isinstance(event, EpisodeEnded)]
        assert (ended.task, ended.ending, ended.attempts) == (500, "finished", 1)

    on_a_bench(test)


def test_a_start_that_is_read_after_its_result_runs_nothing() -> None:
    async def test(bench: Bench) -> None:
        await bench.catch_up()
        await bench.feed(result(3), started(3))
        assert bench.sent == []

    on_a_bench(test)


def test_the_tasks_that_ended_last_are_known() -> None:
    ends = EarlyEnds()
    for number in range(ENDED + 2):
        ends.add_result(number)
    assert ends.has_ended(0)
    ends.trim()
    assert [ends.has_ended(number) for number in (0, 1, 2, ENDED + 1)] == [False, False, True, True]


def test_answers_to_starts_that_never_come_take_bounded_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(bench: Bench) -> None:
        await bench.catch_up()
        await bench.feed(*(observed(number) for number in range(3 * EARLY)))
        assert len(bench.shard._early_answers._kept) == EARLY
        await bench.feed(started(0))
        assert len(bench.shard._early_answers._kept) == EARLY
        # If another task starts after that time, they are over.
        loop = asyncio.get_running_loop()
        later_s = loop.time() + START_S
        monkeypatch.setattr(loop, "time", lambda: later_s)
        await bench.feed(started(1))
        assert len(bench.shard._early_answers._kept) == 0
        assert len(bench.closed()) >= EARLY

    on_a_bench(test)
