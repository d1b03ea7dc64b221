"""From a request to its answer, and a partition's prompts, on the scripted engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextvars import Context
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas import packed
from headrace.schemas.events import (
    Event,
    GenerationCompleted,
    GenerationRequested,
    Ref,
    Sampling,
    ScoredTokens,
)
from headrace.services.inference.engine import Capacity, EngineSetup, Weights
from headrace.services.inference.engine_slots import Slots
from headrace.services.inference.engines.scripted import ScriptedEngine
from headrace.services.inference.serving import ServedPolicy
from headrace.services.inference.shard import PromptShard
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery
from headrace.services.models.weights import model_folder
from headrace.services.worker.shard import ShardContext

MODEL = model_folder("tiny-llama")
TOKENIZER = Tokenizer(MODEL)
VOCABULARY, CONTEXT = 258, 512


def request(call: str = "0", **fields: Any) -> GenerationRequested:
    sampling = {"max_tokens": 3} | fields.pop("sampling", {})
    request = GenerationRequested(
        task=5,
        sample=1,
        attempt=2,
        call=call,
        policy="default",
        tokens=packed.pack_i32([1, 2]),
        text="go",
        sampling=Sampling(**sampling),
        expires_at=int(time.time() * 1000) + 60_000,
        digest=b"d" * 16,
    )
    return request.model_copy(update=fields)


def empty_weights(folder: Path) -> Path:
    """The smallest sound safetensors file."""
    path = folder / "weights.safetensors"
    path.write_bytes((2).to_bytes(8, "little") + b"{}")
    return path


async def serve(folder: Path, slots: int = 4, **options: Any) -> ServedPolicy:
    """A policy at version 7."""
    engine = ScriptedEngine(EngineSetup(MODEL, slots, options={"text": "abc"} | options))
    await engine.load(Weights("default", 7, empty_weights(folder)))
    return ServedPolicy("default", engine, Slots(engine), TOKENIZER, "inference-1", version=7)


def complete(folder: Path, asked: GenerationRequested, **options: Any) -> GenerationCompleted:
    async def main() -> GenerationCompleted:
        policy = await serve(folder, **options)
        answer = await policy.complete(asked, await policy.slots.take(), queue_s=0.25)
        assert answer is not None
        unasked = answer.failure is not None or asked.demonstration is not None
        assert policy.slots.starting == 0 or unasked
        return answer

    return asyncio.run(main())


def test_a_demonstration_is_answered_without_the_engine(tmp_path: Path) -> None:
    asked = request(demonstration="ab", sampling={"stop": ("\n",)})
    answer = complete(tmp_path, asked, fail_every=1)
    assert (answer.finish, answer.text, answer.failure) == ("stop", "ab", None)
    assert packed.unpack_i32(answer.prompt_added) == TOKENIZER.encode("go")
    assert packed.unpack_i32(answer.tokens) == TOKENIZER.encode("ab\n")
    assert (answer.logprobs, answer.versions) == (b"", b"")


def test_a_demonstration_that_could_not_be_drawn_is_the_operators_failure(tmp_path: Path) -> None:
    answer = complete(tmp_path, request(demonstration="far too long"))
    assert answer.failure is not None
    assert (answer.failure.origin, answer.failure.code) == ("operator", "bad_tokens")
    assert "its sampling allows 3" in answer.failure.message


def test_an_answer_carries_all_that_training_needs(tmp_path: Path) -> None:
    answer = complete(tmp_path, request())
    assert answer.event_id == request().event_id
    assert (answer.digest, answer.worker, answer.finish) == (b"d" * 16, "inference-1", "length")
    assert packed.unpack_i32(answer.prompt_added) == TOKENIZER.encode("go")
    assert packed.unpack_i32(answer.tokens) == TOKENIZER.encode("abc")
    assert (answer.text, answer.kv, answer.queue_ms) == ("abc", "fresh", 250)
    assert packed.unpack_f32(answer.logprobs) == [0.0] * 3
    assert packed.unpack_spans(answer.versions, 3) == [7] * 3
    assert answer.prompt_tokens == 2 + len(TOKENIZER.encode("go"))
    assert answer.failure is None


def test_what_stopped_a_generation_is_among_its_tokens_and_not_in_its_text(tmp_path: Path) -> None:
    stops = [
        {"stop_ids": packed.pack_i32(TOKENIZER.encode("b"))},
        {"stop": ("b",)},
    ]
    for stop in stops:
        answer = complete(tmp_path, request(sampling=stop))
        assert packed.unpack_i32(answer.tokens) == TOKENIZER.encode("ab")
        assert (answer.text, answer.finish) == ("a", "stop")


def scoring(**fields: Any) -> GenerationRequested:
    given = {
        "kind": "score",
        "text": "",
        "tokens": packed.pack_i32([1, 2, 3, 4]),
        "scored": (ScoredTokens(first=1, count=2, sampling=0),),
        "samplings": (Sampling(max_tokens=1, allowed=packed.pack_i32([2, 3])),),
    }
    return request(**(given | fields))


def test_a_score_has_logprobs_and_versions_and_no_tokens(tmp_path: Path) -> None:
    answer = complete(tmp_path, scoring())
    assert (answer.finish, answer.tokens, answer.text) == ("stop", b"", "")
    assert packed.unpack_f32(answer.logprobs) == [0.0] * 2
    assert packed.unpack_spans(answer.versions, 2) == [7] * 2
    assert (answer.prompt_added, answer.prompt_tokens, answer.failure) == (b"", 4, None)


@pytest.mark.parametrize(
    ("fields", "origin", "message"),
    [
        ({"samplings": ()}, "operator", "names sampling 0 of 0"),
        ({"scored": ()}, "operator", "at least one token"),
        ({"tokens": packed.pack_i32([1, 2])}, "operator", "end within the 2 tokens"),
        ({"expires_at": 1}, "infrastructure", "ago"),
    ],
)
def test_what_cannot_be_scored_is_a_failure(
    tmp_path: Path, fields: dict[str, Any], origin: str, message: str
) -> None:
    failure = complete(tmp_path, scoring(**fields)).failure
    assert failure is not None
    assert failure.origin == origin
    assert message in failure.message


def test_an_engine_that_cannot_score_says_so(tmp_path: Path) -> None:
    class Plain:
        def capacity(self) -> Capacity:
            return Capacity(1, CONTEXT)

    async def main() -> GenerationCompleted | None:
        engine: Any = Plain()
        policy = ServedPolicy("default", engine, Slots(engine), TOKENIZER, "w", version=7)
        return await policy.complete(scoring(), await policy.slots.take(), queue_s=0.0)

    answer = asyncio.run(main())
    assert answer is not None
    assert answer.failure is not None
    assert "the engine Plain has no method `score`" in answer.failure.message


def test_allowed_ids_bind(tmp_path: Path) -> None:
    answer = complete(tmp_path, request(sampling={"allowed": packed.pack_i32([9])}))
    assert packed.unpack_i32(answer.tokens) == [9] * 3


def test_a_full_context_is_overflow_and_no_failure(tmp_path: Path) -> None:
    answer = complete(tmp_path, request(tokens=packed.pack_i32([1] * CONTEXT)))
    assert (answer.finish, answer.tokens, answer.failure) == ("overflow", b"", None)


@pytest.mark.parametrize(
    ("fields", "failure"),
    [
        ({"expires_at": 1}, ("infrastructure", "expired", False)),
        ({"pinned": 6}, ("infrastructure", "version_unavailable", True)),
        ({"kind": "score"}, ("operator", "bad_tokens", False)),
        ({"tokens": packed.pack_i32([VOCABULARY])}, ("operator", "bad_tokens", False)),
        ({"tokens": packed.pack_i32([-1])}, ("operator", "bad_tokens", False)),
        ({"tokens": b"123"}, ("operator", "bad_tokens", False)),
        ({"tokens": b"", "text": ""}, ("operator", "bad_tokens", False)),
        ({"sampling": {"max_tokens": 0}}, ("operator", "bad_tokens", False)),
        ({"sampling": {"stop": ("two tokens",)}}, ("operator", "bad_tokens", False)),
        ({"sampling": {"temperature": float("nan")}}, ("operator", "bad_tokens", False)),
    ],
    ids=str,
)
def test_what_cannot_be_answered_is_a_failure(
    tmp_path: Path, fields: dict[str, Any], failure: tuple[str, str, bool]
) -> None:
    answer = complete(tmp_path, request(**fields))
    assert (answer.finish, answer.tokens) == ("failed", b"")
    assert answer.failure is not None
    assert (answer.failure.origin, answer.failure.code, answer.failure.retryable) == failure


def test_a_pinned_version_that_is_served_is_answered(tmp_path: Path) -> None:
    assert complete(tmp_path, request(pinned=7)).finish == "length"


def test_a_broken_engine_is_an_infrastructure_failure(tmp_path: Path) -> None:
    failure = complete(tmp_path, request(), fail_every=1).failure
    assert failure is not None
    assert (failure.origin, failure.code, failure.retryable) == ("infrastructure", "scripted", True)


def test_a_generation_ends_at_its_expiry(tmp_path: Path) -> None:
    asked = request(expires_at=int(time.time() * 1000) + 30, sampling={"max_tokens": 300})
    failure = complete(tmp_path, asked, delay_ms=5).failure
    assert failure is not None
    assert (failure.code, failure.retryable) == ("expired", False)


class FakeContext(ShardContext):
    """A ShardContext without a log."""

    def __init__(self, caught_up: bool = True) -> None:
        self.caught_up = caught_up
        self.sent: list[Event] = []
        self.held: list[str] = []
        self.released: list[str] = []
        self.spawned: list[asyncio.Task[None]] = []
        self.durable = asyncio.Event()
        self.durable.set()

    async def send(self, event: Event, partition: int | None = None) -> Ref:
        assert self.caught_up
        await self.durable.wait()
        self.sent.append(event)
        return Ref(topic="generations", partition=0, offset=len(self.sent), digest=b"r" * 16)

    def spawn(
        self, work: Coroutine[Any, Any, None], name: str, trace: Context | None = None
    ) -> asyncio.Task[None]:
        self.spawned.append(asyncio.create_task(work, name=name, context=trace))
        return self.spawned[-1]

    def hold(self, delivery: Delivery[Event], *, long: bool = False) -> Callable[[], None]:
        at = f"{delivery.event.event_id}@{delivery.offset}"
        self.held.append(at)
        return lambda: self.released.append(at)


def delivery(event: GenerationRequested, offset: int) -> Delivery[GenerationRequested]:
    ref = Ref(topic="prompts", partition=0, offset=offset, digest=b"r" * 16)
    return Delivery(event, ref, 0.0, Partition("prompts", 0), offset)


def drive(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 30))


def test_a_prompt_is_held_until_its_answer_is_durable(tmp_path: Path) -> None:
    async def main() -> None:
        context = FakeContext()
        shard = PromptShard(context, await serve(tmp_path))
        context.durable.clear()
        await shard.on_event(delivery(request(), 0))
        await asyncio.sleep(0.02)
        assert (context.held, context.released) == (["5/1/2/0@0"], [])
        context.durable.set()
        await asyncio.gather(*context.spawned)
        assert context.released == ["5/1/2/0@0"]
        assert len(context.sent) == 1

    drive(main)


def test_a_prompt_that_comes_again_in_flight_is_answered_once(tmp_path: Path) -> None:
    async def main() -> None:
        context = FakeContext()
        shard = PromptShard(context, await serve(tmp_path, delay_ms=1))
        await shard.on_event(delivery(request(), 0))
        await shard.on_event(delivery(request(), 1))
        await asyncio.gather(*context.spawned)
        assert (len(context.spawned), len(context.sent)) == (1, 1)
        assert context.released == ["5/1/2/0@0", "5/1/2/0@1"]

    drive(main)


def test_nothing_is_started_while_catching_up(tmp_path: Path) -> None:
    async def main() -> None:
        context = FakeContext(caught_up=False)
        shard = PromptShard(context, await serve(tmp_path, slots=1))
        for offset, call in enumerate("0012"):
            await shard.on_event(delivery(request(call), offset))
        assert (len(context.held), context.spawned) == (4, [])
        context.caught_up = True
        await shard.on_caught_up()
        await asyncio.gather(*context.spawned)
        assert [event.event_id[-1] for event in context.sent] == ["0", "1", "2"]
        assert len(context.released) == 4

    drive(main)


def test_a_prompt_waits_for_the_version_that_it_asks_for_and_delays_no_other(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        context = FakeContext()
        policy = await serve(tmp_path, slots=1)
        shard = PromptShard(context, policy)
        await shard.on_event(delivery(request("0", minimum=8), 0))
        await shard.on_event(delivery(request("1", minimum=7), 1))
        await shard.on_event(delivery(request("2", minimum=8, pinned=7), 2))
        await asyncio.gather(*context.spawned[1:])
        assert [event.event_id[-1] for event in context.sent] == ["1", "2"]
        await policy.engine.load(Weights("default", 8, empty_weights(tmp_path)))
        policy.on_loaded(8)
        await asyncio.gather(*context.spawned)
        answer = context.sent[-1]
        assert isinstance(answer, GenerationCompleted)
        assert (answer.call, packed.oldest(answer.versions)) == ("0", 8)
        assert policy.slots.starting == 0

    drive(main)


async def answered_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minimum: int
) -> tuple[ServedPolicy, GenerationCompleted]:
    """Sends a prompt for a version that is never loaded. Returns who answered, and the answer."""
    monkeypatch.setattr("headrace.services.inference.serving.LOAD_WAIT_S", 0.05)
    context = FakeContext()
    policy = await serve(tmp_path)
    policy.on_published(8)
    await PromptShard(context, policy).on_event(delivery(request("0", minimum=minimum), 0))
    await asyncio.gather(*context.spawned)
    answer = context.sent[-1]
    assert isinstance(answer, GenerationCompleted), "it is answered all the same"
    return policy, answer


def test_a_version_that_is_not_loaded_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        policy, answer = await answered_late(tmp_path, monkeypatch, minimum=8)
        assert packed.oldest(answer.versions) == 7, "late is better than never"
        assert not policy.is_behind(request("1", minimum=8))
        assert policy.is_behind(request("1", minimum=9))

    drive(main)


def test_a_prompt_for_a_version_that_does_not_exist_ends_no_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        policy, _ = await answered_late(tmp_path, monkeypatch, minimum=10**12)
        assert not policy.is_behind(request("1", minimum=8))
        assert policy.is_behind(request("1", minimum=9)), "once it is published, it is waited for"

    drive(main)


def test_a_task_cancelled_before_its_first_step_gives_its_slot_back(tmp_path: Path) -> None:
    async def main() -> None:
        context = FakeContext()
        policy = await serve(tmp_path, slots=1)
        shard = PromptShard(context, policy)
        await shard.on_event(delivery(request("0"), 0))
        context.spawned[0].cancel()
        await shard.on_event(delivery(request("1"), 1))
        await asyncio.gather(*context.spawned, return_exceptions=True)
        assert [event.event_id[-1] for event in context.sent] == ["1"]

    drive(main)


def test_an_engine_that_does_not_know_its_context_gets_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        policy = await serve(tmp_path)
        known = policy.engine.capacity()
        policy.engine.capacity = lambda: Capacity(4, 0)  # type: ignore[method-assign]
        taking = asyncio.create_task(policy.slots.take())
        await asyncio.sleep(0.01)
        assert not taking.done()
        policy.engine.capacity = lambda: known  # type: ignore[method-assign]
        policy.slots.notify()
        await taking

    drive(main)


def test_what_a_closing_engine_interrupts_is_abandoned(tmp_path: Path) -> None:
    async def main() -> None:
        context = FakeContext()
        policy = await serve(tmp_path, delay_ms=50)
        await PromptShard(context, policy).on_event(delivery(request(), 0))
        await asyncio.sleep(0.01)
        await policy.engine.close(0)
        await asyncio.gather(*context.spawned)
        assert (context.sent, context.released) == ([], [])

    drive(main)
