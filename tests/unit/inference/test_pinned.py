"""Pinned versions: one at a time, in turn, every token of it, whatever becomes of who asks."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.errors import BlobError
from headrace.schemas import packed
from headrace.schemas.events import Blob, GenerationCompleted, GenerationRequested, PolicyPublished
from headrace.services.inference import pinned
from headrace.services.inference.engine import Weights
from headrace.services.inference.pinned import PinnedVersions
from headrace.services.inference.serving import ServedPolicy
from headrace.services.inference.shard import PromptShard
from tests.unit.inference.test_serving import (
    FakeContext,
    delivery,
    drive,
    empty_weights,
    request,
    serve,
)


class Bench:
    """A policy at version 7, and a second engine for the versions up to it."""

    def __init__(self, folder: Path, newest: ServedPolicy, second: ServedPolicy) -> None:
        self.context = FakeContext()
        self.loaded: list[int] = []
        self.pruned: set[int] = set()
        self.made = 0
        self.loads = asyncio.Event()
        self.loads.set()
        self._path = empty_weights(folder)
        self._second = second
        load = second.engine.load

        async def load_when_it_may(weights: Weights) -> None:
            self.loaded.append(weights.version)
            await self.loads.wait()
            await load(weights)

        second.engine.load = load_when_it_may  # type: ignore[method-assign]
        self._pinned = PinnedVersions("default", self._make, self._find, self._fetch)
        self._shard = PromptShard(self.context, newest, self._pinned)

    def _make(self) -> ServedPolicy:
        self.made += 1
        return self._second

    async def _find(self, policy: str, version: int) -> PolicyPublished | None:
        if version > 7:
            return None
        return PolicyPublished(
            policy=policy,
            version=version,
            status="trained",
            digest=bytes(32),
            full=Blob(sha256=bytes(32), size=0),
            full_version=version,
        )

    def _fetch(self, published: PolicyPublished) -> Weights:
        if published.version in self.pruned:
            raise BlobError("it was pruned")
        return Weights(published.policy, published.version, self._path)

    async def ask(self, **pinned: int) -> None:
        """Prompts pinned to versions, by call."""
        for call, version in pinned.items():
            asked: GenerationRequested = request(call, pinned=version)
            await self._shard.on_event(delivery(asked, 0))

    async def answers(self) -> dict[str, GenerationCompleted]:
        """By call, once all is answered that goes on."""
        await asyncio.gather(*self.context.spawned, return_exceptions=True)
        sent = [event for event in self.context.sent if isinstance(event, GenerationCompleted)]
        return {one.call: one for one in sent}


async def bench(folder: Path, slots: int = 4) -> Bench:
    return Bench(folder, await serve(folder), await serve(folder, slots, delay_ms=1))


def drawn_by(answer: GenerationCompleted) -> set[int]:
    return set(packed.unpack_spans(answer.versions, packed.count(answer.tokens)))


def test_one_more_engine_serves_a_version_whole_before_it_loads_another(tmp_path: Path) -> None:
    async def main() -> None:
        world = await bench(tmp_path)
        await world.ask(a=3, b=3, c=5, d=3, e=7)
        answers = await world.answers()
        assert {call: drawn_by(one) for call, one in answers.items()} == {
            "a": {3}, "b": {3}, "c": {5}, "d": {3}, "e": {7},
        }  # fmt: skip
        assert (world.made, world.loaded) == (1, [3, 5, 7])
        assert len(world.context.released) == 5

    drive(main)


@pytest.mark.parametrize(
    ("turn", "slots", "loaded"),
    [(0.0, 1, [3, 5, 3, 5, 3, 5]), (0.0, 2, [3, 5, 3, 5]), (0.0, 4, [3, 5]), (1e9, 1, [3, 5])],
)
def test_versions_take_turns_if_their_prompts_arrive_mixed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, turn: float, slots: int, loaded: list[int]
) -> None:
    monkeypatch.setattr(pinned, "TURN", turn)

    async def main() -> None:
        world = await bench(tmp_path, slots)
        await world.ask(a=3, b=5, c=3, d=5, e=3, f=5)
        answers = await world.answers()
        assert {call: drawn_by(one) for call, one in answers.items()} == {
            "a": {3}, "b": {5}, "c": {3}, "d": {5}, "e": {3}, "f": {5},
        }  # fmt: skip
        assert world.loaded == loaded

    drive(main)


def test_what_waits_for_its_version_keeps_no_other_prompt_waiting(tmp_path: Path) -> None:
    async def main() -> None:
        world = await bench(tmp_path, slots=1)
        world.loads.clear()
        await world.ask(a=3, b=5)
        await world._shard.on_event(delivery(request("newest"), 0))
        while not world.context.sent:
            await asyncio.sleep(0.001)
        assert [event.event_id[-6:] for event in world.context.sent] == ["newest"]
        world.loads.set()
        assert (await world.answers()).keys() == {"newest", "a", "b"}

    drive(main)


def test_a_version_that_is_not_to_be_had_is_a_failure_of_the_infrastructure(tmp_path: Path) -> None:
    async def main() -> None:
        world = await bench(tmp_path)
        world.pruned.add(2)
        await world.ask(never=8, pruned=2, there=3)
        answers = await world.answers()
        failures = {call: one.failure for call, one in answers.items() if one.failure is not None}
        assert {failure.origin for failure in failures.values()} == {"infrastructure"}
        assert {failure.code for failure in failures.values()} == {"version_unavailable"}
        assert {call: one.retryable for call, one in failures.items()} == {
            "never": False, "pruned": True,
        }  # fmt: skip
        assert drawn_by(answers["there"]) == {3}

    drive(main)


def test_a_prompt_cancelled_during_a_change_spoils_no_version(tmp_path: Path) -> None:
    async def main() -> None:
        world = await bench(tmp_path)
        world.loads.clear()
        await world.ask(gone=3, other=5, same=3)
        while not world.loaded:
            await asyncio.sleep(0.001)
        world.context.spawned[0].cancel()
        await asyncio.sleep(0)
        world.loads.set()
        answers = await world.answers()
        assert {call: drawn_by(one) for call, one in answers.items()} == {"other": {5}, "same": {3}}
        await world._pinned.close()

    drive(main)


def test_a_prompt_that_waits_too_long_for_its_version_is_expired(tmp_path: Path) -> None:
    async def main() -> None:
        world = await bench(tmp_path)
        world.loads.clear()
        late = request("late", pinned=3)
        soon = late.model_copy(update={"expires_at": late.expires_at - 59_950})
        await world._shard.on_event(delivery(soon, 0))
        failure = (await world.answers())["late"].failure
        assert failure is not None
        assert (failure.code, failure.retryable) == ("expired", False)
        await world._pinned.close()

    drive(main)
