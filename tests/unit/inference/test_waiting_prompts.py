"""The prompts of several partitions that wait for the slots of one worker."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from headrace.schemas.events import GenerationCompleted
from headrace.services.inference import engine_slots, shard
from headrace.services.inference.serving import ServedPolicy
from headrace.services.inference.shard import PromptShard
from tests.unit.inference.test_serving import FakeContext, delivery, drive, request, serve


async def settle() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


def answered(context: FakeContext) -> list[str]:
    """The calls that were answered, in that order."""
    return [event.call for event in context.sent if isinstance(event, GenerationCompleted)]


def assert_nothing_left(policy: ServedPolicy) -> None:
    slots = policy.slots
    assert (slots.waiting, slots.busy, slots.starting) == (0, 0, 0)


def test_the_highest_priority_goes_first_whatever_its_partition(tmp_path: Path) -> None:
    async def main() -> None:
        context = FakeContext()
        policy = await serve(tmp_path, slots=2, delay_ms=1)
        shards = [PromptShard(context, policy) for _ in range(3)]
        for number, one in enumerate(shards):
            for place in range(20):
                await one.on_event(delivery(request(f"{number}.{place}"), place))
            await one.on_event(delivery(request(f"high.{number}", priority=5), 20))
            await one.on_event(delivery(request(f"low.{number}", priority=-5), 21))
        await settle()
        await asyncio.gather(*context.spawned)
        calls = answered(context)
        assert set(calls[:5]) == {"0.0", "0.1", "high.0", "high.1", "high.2"}
        assert [call[:3] for call in calls[-3:]] == ["low"] * 3
        usual = [call for call in calls if call[0].isdigit()]
        assert all(usual.index(f"{n}.3") < usual.index(f"{n}.15") for n in range(3))
        assert len(context.released) == 66
        assert_nothing_left(policy)

    drive(main)


def test_what_is_passed_stays_open_until_it_is_answered(tmp_path: Path) -> None:
    async def main() -> None:
        context = FakeContext()
        policy = await serve(tmp_path, slots=1, delay_ms=20)
        one = PromptShard(context, policy)
        for offset, priority in enumerate((0, 0, 7)):
            await one.on_event(delivery(request(str(offset), priority=priority), offset))
        while len(context.released) < 2:
            await asyncio.sleep(0.001)
        assert [held.rsplit("@")[1] for held in context.released] == ["0", "2"]
        await asyncio.gather(*context.spawned)
        assert answered(context) == ["0", "2", "1"]

    drive(main)


def test_the_intake_waits_if_too_many_prompts_wait_for_a_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr(shard, "LOOK_AHEAD", 3)
        context = FakeContext()
        policy = await serve(tmp_path, slots=2, delay_ms=200)
        one = PromptShard(context, policy)
        for offset in range(5):
            await one.on_event(delivery(request(str(offset)), offset))
        last = asyncio.create_task(one.on_event(delivery(request("5", priority=9), 5)))
        await settle()
        assert not last.done()
        assert policy.slots.waiting == 3
        context.spawned[0].cancel()
        await last
        await asyncio.gather(*context.spawned, return_exceptions=True)
        assert sorted(answered(context)) == ["1", "2", "3", "4", "5"]
        assert_nothing_left(policy)

    drive(main)


def test_a_partition_that_is_given_away_leaves_the_slots_to_the_others(tmp_path: Path) -> None:
    async def main() -> None:
        given, kept = FakeContext(), FakeContext()
        policy = await serve(tmp_path, slots=2, delay_ms=20)
        for context, prefix in ((given, "g"), (kept, "k")):
            one = PromptShard(context, policy)
            for offset in range(6):
                await one.on_event(delivery(request(f"{prefix}{offset}"), offset))
        await settle()
        for task in given.spawned:
            task.cancel()
        await asyncio.gather(*kept.spawned)
        assert answered(kept) == [f"k{offset}" for offset in range(6)]
        assert (given.sent, given.released) == ([], [])
        assert_nothing_left(policy)

    drive(main)


def test_a_prompt_that_expires_in_the_queue_is_answered_without_a_slot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        monkeypatch.setattr(engine_slots, "RECHECK_S", 0.01)
        context = FakeContext()
        policy = await serve(tmp_path, slots=1, delay_ms=60_000)
        one = PromptShard(context, policy)
        await one.on_event(delivery(request("0"), 0))
        soon = int(time.time() * 1000) + 50
        await one.on_event(delivery(request("1", expires_at=soon), 1))
        await context.spawned[1]
        (answer,) = context.sent
        assert isinstance(answer, GenerationCompleted)
        assert answer.failure is not None
        assert (answer.call, answer.failure.code) == ("1", "expired")
        assert len(context.released) == 1
        assert (policy.slots.waiting, policy.slots.busy) == (0, 1)
        context.spawned[0].cancel()
        await asyncio.wait(context.spawned)

    drive(main)
