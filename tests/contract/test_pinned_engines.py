"""Pinned versions on vLLM: a second engine draws them whole, while the first draws the newest."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.errors import HeadraceError
from headrace.schemas import packed
from headrace.schemas.events import Blob, GenerationCompleted, PolicyPublished
from headrace.services.inference.engine import Engine, EnginePrompt, Weights
from headrace.services.inference.engine_slots import Slots
from headrace.services.inference.pinned import PinnedVersions
from headrace.services.inference.serving import ServedPolicy
from headrace.services.inference.shard import PromptShard
from tests.contract.engines import drive, make_engine_of, make_model, needs_vllm
from tests.contract.test_engine_ranks import END_S, ranks_of
from tests.unit.inference.test_serving import TOKENIZER, FakeContext, delivery, request

SLOTS, TOKENS, SAMPLES = 4, 150, 8
STARTS = ([1], [2, 3], [4] * 17, [5] * 40)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM and what it imports warn of themselves
    *needs_vllm,
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return make_model(folder, vocab_size=128, max_position_embeddings=512)


class Bench:
    """A policy whose newest version is 1, and an engine for its versions 0 and 1."""

    def __init__(self, kind: str, model: Path) -> None:
        self._kind, self._model = kind, model
        self._context = FakeContext()
        self.newest = make_engine_of(kind, model, SLOTS)
        self.second: Engine | None = None
        self.pinned = PinnedVersions("default", self._make, self._find, self._fetch)
        served = ServedPolicy(
            "default", self.newest, Slots(self.newest), TOKENIZER, "inference-1", version=1
        )
        self._shard = PromptShard(self._context, served, self.pinned)

    def _make(self) -> ServedPolicy:
        self.second = make_engine_of(self._kind, self._model, SLOTS)
        return ServedPolicy("default", self.second, Slots(self.second), TOKENIZER, "inference-1")

    async def _find(self, policy: str, version: int) -> PolicyPublished | None:
        return PolicyPublished(
            policy=policy, version=version, status="trained", digest=bytes(32),
            full=Blob(sha256=bytes(32), size=0), full_version=version,
        )  # fmt: skip

    def _fetch(self, published: PolicyPublished) -> Weights:
        return self.weights(published.version)

    def weights(self, version: int) -> Weights:
        return Weights("default", version, self._model / f"{version}.safetensors")

    async def greedy(self, version: int) -> list[tuple[list[int], list[float]]]:
        """What the first engine alone draws with a version: tokens and logprobs."""
        await self.newest.load(self.weights(version))
        prompts = [EnginePrompt("default", start, TOKENS, temperature=0.0) for start in STARTS]
        answers = await asyncio.gather(*map(self.newest.generate, prompts))
        return [(answer.tokens, answer.logprobs) for answer in answers]

    async def ask(self, versions: Sequence[int | None], samples: int) -> list[GenerationCompleted]:
        """The answers to prompts of all versions, None for the newest, which come mixed."""
        for sample in range(samples):
            for version in versions:
                asked = request(
                    f"{version}.{sample}",
                    pinned=version,
                    tokens=packed.pack_i32(STARTS[sample % len(STARTS)]),
                    text="",
                    sampling={"max_tokens": TOKENS, "temperature": 0.0},
                )
                late = asked.model_copy(update={"expires_at": asked.expires_at + 600_000})
                await self._shard.on_event(delivery(late, 0))
        await asyncio.gather(*self._context.spawned)
        found = [one for one in self._context.sent if isinstance(one, GenerationCompleted)]
        self._context.sent.clear()
        assert len(found) == samples * len(versions)
        return found

    async def close(self) -> None:
        await self.pinned.close()
        await self.newest.close(0)


@pytest.mark.parametrize("kind", ["vllm", pytest.param("vllm-tp2", marks=pytest.mark.long)])
def test_pinned_versions_are_drawn_whole_while_the_newest_is_drawn(kind: str, model: Path) -> None:
    """And if a rank of their engine ends while nothing is asked, the worker hears of it."""

    async def main() -> None:
        bench = Bench(kind, model)
        expected = [await bench.greedy(version) for version in (0, 1)]
        assert expected[0] != expected[1]
        await bench.ask([0], 1)  # makes the second engine
        for answer in await bench.ask([None, 0, 1], SAMPLES):
            pinned, sample = answer.call.split(".")
            version = 0 if pinned == "0" else 1
            assert answer.failure is None
            tokens, logprobs = expected[version][int(sample) % len(STARTS)]
            assert packed.unpack_i32(answer.tokens) == tokens
            assert packed.unpack_spans(answer.versions, TOKENS) == [version] * TOKENS
            assert packed.unpack_f32(answer.logprobs) == pytest.approx(logprobs, abs=1e-4)
        if kind == "vllm-tp2":
            await loses_a_rank(bench)
        await bench.close()

    drive(main)


def test_models_of_a_process_that_are_both_busy_take_turns() -> None:
    # After vllm_engine, which sets the environment of vLLM.
    import headrace.services.inference.engines.vllm_engine  # noqa: F401
    from headrace.services.inference.engines.vllm_ranks.running import Turns

    turns, order, both = Turns(), list[str](), threading.Barrier(2)

    def step(name: str) -> None:
        both.wait()
        for _ in range(100):
            with turns:
                order.append(name)
                time.sleep(0.005)

    threads = [threading.Thread(target=step, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    middle = order[20:180]
    changes = sum(one != other for one, other in pairwise(middle))
    assert changes > 100, "".join(order)


async def loses_a_rank(bench: Bench) -> None:
    assert bench.second is not None
    failed: asyncio.Task[Any] = asyncio.create_task(bench.pinned.failed())
    others, ranks = ranks_of(bench.newest), ranks_of(bench.second)
    ranks[1].kill()
    said = rf"can't go on: rank 1 of 2 \(process {ranks[1].pid}\) ended by SIGKILL\. "
    with pytest.raises(HeadraceError, match=said):
        await asyncio.wait_for(failed, END_S)
    assert all(other.is_running() for other in others)
    await bench.close()
    assert not psutil.wait_procs([*others, *ranks], END_S)[1]
