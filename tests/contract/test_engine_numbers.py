"""Engines that run a model: the numbers that they record are those that the trainer computes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from headrace.schemas.events import Event, PolicyPublished, Ref, Sampling
from headrace.schemas.packed import pack_i32
from headrace.services.inference.engine import EngineOutput, EnginePrompt, Weights
from headrace.services.inference.engine_slots import Slots
from headrace.services.inference.serving import ServedPolicy
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.inference.weights_follower import WeightsFollower
from headrace.services.kafka.broker import Partition
from headrace.services.log.event_log import Delivery
from headrace.services.log.log_reader import CaughtUp
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.models.even_rounding import WIDE_ATTENTION
from headrace.services.models.weights import model_folder, weights_digest
from headrace.trainer.forward.sequence_logprobs import sequence_logprobs
from headrace.trainer.model_loading import load_model
from tests.contract.engines import (
    KINDS,
    NARROW,
    VLLM,
    drive,
    dtype_of,
    hold,
    make_engine_of,
    make_model,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and what it imports warn of themselves

CONTEXT = 512
VOCABULARY = 128
SLOTS = 256
ALLOWED = (3, 4, 5, 6, 100)
BFLOAT16_BOUNDS = {
    "torch-bfloat16": (1e-5, 1e-6),
    "torch-cuda-bfloat16": (1e-4, 1e-6),
    "vllm-bfloat16": (5e-3, 1e-4),
    "vllm-tp2-bfloat16": (5e-2, 2e-3),  # each rank rounds its part of a sum
    "vllm-cuda-bfloat16": (5e-2, 2e-3),
}
"""The largest mean difference of logprobs in nats, and KL divergence."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY, max_position_embeddings=CONTEXT
    )


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def weights(model: Path, version: int) -> Weights:
    return Weights("default", version, model / f"{version % 2}.safetensors")


def prompts(count: int, **settings: Any) -> list[EnginePrompt]:
    """Ragged ones."""
    pick = random.Random(count)
    lengths = [pick.choice([1, 2, 7, 20, 40, 90]) for _ in range(count)]
    made = [
        EnginePrompt(
            "default",
            [pick.randrange(VOCABULARY) for _ in range(length)],
            pick.choice([1, 2, 5, 30]),
        )
        for length in lengths
    ]
    return [replace(prompt, **settings) for prompt in made]


def trainer_logprobs(
    model: Path,
    version: int,
    prompt: EnginePrompt,
    tokens: Iterable[int],
    vocabulary: int = VOCABULARY,
    dtype: torch.dtype = torch.float32,
    attention: str = WIDE_ATTENTION,
) -> Any:
    """[tokens]: as the trainer computes them, by its own loading, forward and processing."""
    before, after = prompt.around
    drawn = list(tokens)
    sampling = Sampling(
        max_tokens=len(drawn),
        temperature=prompt.temperature,
        allowed=pack_i32(prompt.allowed),
        json_schema=prompt.json_schema,
        stop_ids=pack_i32(prompt.stop_ids),
        json_before=before,
        json_after=after,
    )
    path = weights(model, version).path
    name = str(dtype).removeprefix("torch.")
    return sequence_logprobs(
        model, path, sampling, prompt.tokens, drawn, dtype=name, attention=attention
    )


def model_without_weights(model: Path) -> Path:
    bare = model / "bare"
    if not bare.exists():
        bare.mkdir()
        (bare / "config.json").write_bytes((model / "config.json").read_bytes())
    return bare


def assert_close(generation: EngineOutput, expected: Any, first: int = 0) -> None:
    drawn = torch.tensor(generation.logprobs)
    torch.testing.assert_close(drawn[first:], expected[first:], rtol=1e-3, atol=1e-3)


def test_logprobs_are_the_trainers(kind: str, model: Path) -> None:
    async def main() -> None:
        engine = make_engine_of(kind, model, SLOTS)
        await engine.load(weights(model, 0))
        asked = [
            *prompts(8, temperature=0.7, allowed=ALLOWED),
            *prompts(6, temperature=0.7),
            *prompts(4, temperature=1.0, stop_ids=(5, 6)),
        ]
        answers = await asyncio.gather(*map(engine.generate, asked))
        for prompt, answer in zip(asked, answers, strict=True):
            assert_close(answer, trainer_logprobs(model, 0, prompt, answer.tokens))
            assert not prompt.allowed or set(answer.tokens) <= set(ALLOWED)
        await engine.close(1)

    drive(main)


@pytest.mark.parametrize("kind", NARROW)
def test_logprobs_in_bfloat16_are_the_trainers(kind: str, model: Path) -> None:
    """Also of tokens that are read one at a time, although some rounding then differs."""

    async def main() -> None:
        engine = make_engine_of(kind, model, SLOTS)
        await engine.load(weights(model, 0))
        asked = [*prompts(24, temperature=0.7, allowed=ALLOWED), *prompts(24, temperature=1.0)]
        answers = await asyncio.gather(*map(engine.generate, asked))
        attention = "sdpa" if kind == "vllm-cuda-bfloat16" else WIDE_ATTENTION
        differences = []
        for prompt, answer in zip(asked, answers, strict=True):
            dtype = dtype_of(kind)
            expected = trainer_logprobs(
                model, 0, prompt, answer.tokens, dtype=dtype, attention=attention
            )
            differences.append(torch.tensor(answer.logprobs) - expected)
        difference = torch.cat(differences)
        kl = (difference.neg().exp() - 1 + difference).mean()
        print(f"{kind}: mean {difference.abs().mean():.6f}, KL {kl:.7f}")
        # vLLM's kernels for a GPU round elsewhere: they fuse norms, rotations and activations.
        most, most_kl = BFLOAT16_BOUNDS[kind]
        assert difference.abs().mean() <= most
        assert kl <= most_kl
        await engine.close(1)

    drive(main)


def test_greedy_draws_are_the_trainers_likeliest(kind: str, model: Path) -> None:
    async def main() -> None:
        engine = make_engine_of(kind, model, SLOTS)
        await engine.load(weights(model, 1))
        for prompt in prompts(6, temperature=0.0, max_tokens=20):
            answer = await engine.generate(prompt)
            network = load_model(model_without_weights(model), seed=0)
            network.load_state_dict(load_file(weights(model, 1).path))
            with torch.no_grad():
                logits = network(torch.tensor([[*prompt.tokens, *answer.tokens]])).logits[0]
            expected = logits[len(prompt.tokens) - 1 : -1]
            assert answer.tokens == expected.argmax(-1).tolist()
            drawn = expected.log_softmax(-1).gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
            assert_close(answer, drawn)
        await engine.close(1)

    drive(main)


def test_many_at_once_and_weights_changing_under_them(kind: str, model: Path) -> None:
    """No token is lost, and after the change every token is the new version's own."""

    async def main() -> None:
        engine = make_engine_of(kind, model, SLOTS)
        await engine.load(weights(model, 0))
        asked = prompts(SLOTS, max_tokens=150, temperature=0.7, allowed=ALLOWED)
        hold(engine, 50, 100)
        running = [asyncio.create_task(engine.generate(prompt)) for prompt in asked]
        await asyncio.sleep(0)
        assert engine.capacity().free_slots == 0
        await engine.load(weights(model, 1))
        await engine.load(weights(model, 2))
        answers = await asyncio.gather(*running)
        for answer in answers:
            assert len(answer.tokens) == len(answer.versions) == len(answer.logprobs) == 150
            assert answer.finish == "length"
            assert answer.versions == sorted(answer.versions)
            assert answer.versions[-1] == 2
            assert set(answer.tokens) <= set(ALLOWED)
            assert answer.mixed or answer.versions[0] == 2
        late = await engine.generate(asked[0])
        assert (late.versions, late.mixed) == ([2] * 150, False)
        assert_close(late, trainer_logprobs(model, 2, asked[0], late.tokens))
        await engine.close(1)

    drive(main)


@pytest.mark.long
def test_ten_thousand_requests_lose_nothing_to_updates(kind: str, model: Path) -> None:
    async def main() -> None:
        engine = make_engine_of(kind, model, SLOTS)
        await engine.load(weights(model, 0))
        asked = prompts(10_000, temperature=0.7, allowed=ALLOWED)
        running = asyncio.gather(*map(engine.generate, asked))
        began = asyncio.get_running_loop().time()
        version = 0
        while not running.done():
            version += 1
            await engine.load(weights(model, version))
        answers = await running
        spanning = 0
        for prompt, answer in zip(asked, answers, strict=True):
            assert len(answer.tokens) == len(answer.logprobs) == prompt.max_tokens
            assert answer.versions == sorted(answer.versions)
            spanning += answer.versions[0] != answer.versions[-1]
        assert version > 20
        assert spanning > 1_000
        tokens = sum(len(answer.tokens) for answer in answers)
        took_s = asyncio.get_running_loop().time() - began
        print(f"{tokens} tokens, {version} updates, {spanning} spanning, {took_s:.1f} s")
        await engine.close(1)

    drive(main)


@pytest.mark.parametrize("kind", VLLM)
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_the_kv_cache_is_kept_or_computed_again(kind: str, kv: str, model: Path) -> None:
    """Computed again, what follows a change equals the new weights' own forward."""

    async def main() -> None:
        engine = make_engine_of(kind, model, SLOTS, kv=kv)
        await engine.load(weights(model, 0))
        prompt = EnginePrompt("default", list(range(1, 100)), 400, temperature=0.7, allowed=ALLOWED)
        hold(engine, 100)
        running = asyncio.create_task(engine.generate(prompt))
        # It came later: once it has ended, the other has drawn a token too.
        await engine.generate(EnginePrompt("default", [1], 5))
        await engine.load(weights(model, 1))
        answer = await running
        first = answer.versions.index(1)
        assert answer.versions == [0] * first + [1] * (400 - first)
        assert first > 0
        assert answer.mixed == (kv == "keep")
        expected = trainer_logprobs(model, 1, prompt, answer.tokens)
        if kv == "recompute":
            assert_close(answer, expected, first)
        else:
            difference = torch.tensor(answer.logprobs)[first:] - expected[first:]
            assert difference.abs().max() > 0.01
        again = await engine.generate(prompt)
        assert (again.versions, again.mixed) == ([1] * 400, False)
        assert_close(again, trainer_logprobs(model, 1, prompt, again.tokens))
        await engine.close(1)

    drive(main)


def test_a_version_that_is_published_again_uses_no_cache_of_its_other_weights(
    kind: str, model: Path
) -> None:
    """A trainer that lost a checkpoint makes the newest version again, with other weights."""

    async def main() -> None:
        engine = make_engine_of(kind, model, SLOTS)
        prompt = EnginePrompt("default", list(range(1, 100)), 5, temperature=0.7, allowed=ALLOWED)
        for content in (0, 1):
            await engine.load(replace(weights(model, content), version=7))
            answer = await engine.generate(prompt)
            assert answer.versions == [7] * 5
            assert_close(answer, trainer_logprobs(model, content, prompt, answer.tokens))
        await engine.close(1)

    drive(main)


def test_of_prompts_that_wait_the_higher_priority_goes_first(kind: str, model: Path) -> None:
    async def main() -> None:
        engine = make_engine_of(kind, model, 1)
        await engine.load(weights(model, 0))
        ended: list[int] = []

        async def ask(priority: int, tokens: int) -> None:
            await engine.generate(EnginePrompt("default", [1], tokens, priority=priority))
            ended.append(priority)

        running = [asyncio.create_task(ask(99, 300))]
        await asyncio.sleep(0)
        running += [asyncio.create_task(ask(priority, 2)) for priority in (0, 7, 3)]
        await asyncio.gather(*running)
        assert ended == [99, 7, 3, 0]
        await engine.close(1)

    drive(main)


def test_weights_of_a_wrong_digest_or_shape_are_refused(
    kind: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They are never served; the version before serves on, and the next good one is taken."""
    strange = make_model(tmp_path, vocab_size=VOCABULARY + 1) / "0.safetensors"
    store = LocalBlobStore(tmp_path / "blobs")
    publications: asyncio.Queue[Delivery[Event] | CaughtUp] = asyncio.Queue()
    publish = publications.put_nowait
    old, new = (weights(model, version).path for version in (0, 1))
    likeliest = EnginePrompt("default", [1], 2, temperature=0.0)

    async def read() -> AsyncIterator[Delivery[Event] | CaughtUp]:
        while True:
            yield await publications.get()

    async def until(holds: Callable[[], bool]) -> None:
        while not holds():
            await asyncio.sleep(0.01)

    async def main() -> None:
        engine = make_engine_of(kind, model, 4)
        codec = Tokenizer(model_folder("tiny-llama"))
        policy = ServedPolicy("default", engine, Slots(engine), codec, "inference-1")
        follower = WeightsFollower(read(), store, {"default": policy}, tmp_path)
        following = asyncio.create_task(follower.run())
        publish(published(store, 0, old, digest_of=old))
        publish(CaughtUp())
        await follower.ready.wait()
        before = await engine.generate(likeliest)
        assert before.versions == [0, 0]
        publish(published(store, 1, new, digest_of=old))
        await until(lambda: "version 1 can't be served" in caplog.text)
        publish(published(store, 2, strange, digest_of=strange))
        await until(lambda: "version 2 can't be served" in caplog.text)
        assert await engine.generate(likeliest) == before
        publish(published(store, 3, new, digest_of=new))
        await until(lambda: policy.version == 3)
        assert (await engine.generate(likeliest)).versions == [3, 3]
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await engine.close(1)

    drive(main)


def published(
    store: LocalBlobStore, version: int, path: Path, *, digest_of: Path
) -> Delivery[Event]:
    event = PolicyPublished(
        policy="default",
        version=version,
        status="trained",
        digest=weights_digest(digest_of),
        full=store.put(path.read_bytes()),
        full_version=version,
    )
    ref = Ref(topic="policies", partition=0, offset=0, digest=b"r" * 16)
    return Delivery(event, ref, 0.0, Partition("policies", 0), 0)
