"""Engines that serve adapters: several policies on one base, their numbers those of the trainer."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.errors import BlobError, InfrastructureError
from headrace.schemas.events import Sampling
from headrace.schemas.packed import pack_i32
from headrace.schemas.recipe.policy import Lora
from headrace.services.inference.engine import (
    AdapterWeights,
    Engine,
    EngineOutput,
    EnginePrompt,
    Weights,
)
from headrace.services.inference.engines.torch_engine import TorchEngine
from headrace.services.models.lora import adapter_tensors
from headrace.services.models.output_head import ChosenHidden
from headrace.services.models.weights import weights_digest
from headrace.trainer.collate import collate
from headrace.trainer.forward.token_logprobs import token_logprobs
from headrace.trainer.model_loading import add_adapter, load_model
from headrace.trainer.sequences import TokenSequence
from tests.contract.engines import KINDS, VLLM, drive, hold, make_engine_of, make_model

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and what it imports warn of themselves

CONTEXT = 512
VOCABULARY = 128
SLOTS = 16
ALLOWED = (3, 4, 5, 6, 100)
LEFT = Lora(rank=4, alpha=4.0)
RIGHT = Lora(rank=8, alpha=24.0, targets=("q_proj", "v_proj", "down_proj"))
POLICIES = {"left": LEFT, "right": RIGHT}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder with two bases, `0.safetensors` and `1.safetensors`."""
    return make_model(
        tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY, max_position_embeddings=CONTEXT
    )


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(kind: str, model: Path, **options: Any) -> Engine:
    return make_engine_of(kind, model, SLOTS, adapters=2, rank=8, **options)


def trainers_model(model: Path, policy: str, version: int, base: int = 0) -> Any:
    """As the trainer has it: its base and its adapter, both strong enough to be told apart."""
    folder = model / f"trained-{base}"
    if not folder.exists():
        folder.mkdir()
        (folder / "config.json").write_bytes((model / "config.json").read_bytes())
        (folder / "model.safetensors").write_bytes((model / f"{base}.safetensors").read_bytes())
    network = load_model(folder, seed=0).eval()
    add_adapter(network, folder, POLICIES[policy], 0, torch.float32)
    noise = torch.Generator().manual_seed(10 * version + len(policy))
    with torch.no_grad():
        for tensor in adapter_tensors(network).values():
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=noise))
    return network


def weights(model: Path, policy: str, version: int, base: int = 0) -> Weights:
    """A version as its worker gets it."""
    path = model / f"{policy}-{version}.safetensors"
    network = trainers_model(model, policy, version, base)
    tensors = {name: tensor.detach() for name, tensor in adapter_tensors(network).items()}
    save_file(tensors, path)
    lora, file = POLICIES[policy], model / f"{base}.safetensors"
    layers = [name.removeprefix("base_model.model.") for name in tensors if "lora_A" in name]
    targets = tuple(name.removesuffix(".lora_A.weight") for name in layers)
    adapter = AdapterWeights(file, weights_digest(file), lora.rank, lora.alpha, targets)
    return Weights(policy, version, path, adapter)


def expected(model: Path, version: int, prompt: EnginePrompt, drawn: Sequence[int]) -> Any:
    """[drawn]: logprobs by the trainer's own forward and processing."""
    network = trainers_model(model, prompt.policy, version)
    positions = np.arange(len(prompt.tokens), len(prompt.tokens) + len(drawn))
    zeros = np.zeros(len(drawn), dtype=np.float32)
    temperature, allowed = prompt.temperature or 1.0, pack_i32(prompt.allowed)
    sampling = Sampling(max_tokens=len(drawn), temperature=temperature, allowed=allowed)
    sequence = TokenSequence(
        tokens=np.array([*prompt.tokens, *drawn]),
        positions=positions,
        behaviour=zeros,
        advantages=zeros,
        versions=positions,
        demonstrated=zeros.astype(bool),
        samplings=((sampling, len(drawn)),),
    )
    inputs = collate([sequence], VOCABULARY, torch.device("cpu"))
    with torch.no_grad():
        hidden_at = ChosenHidden(network)
        hidden = hidden_at(inputs.rows, inputs.before, input_ids=inputs.ids)
        return token_logprobs(hidden, inputs, hidden_at.head)[0]


def assert_close(generation: EngineOutput, logprobs: Any, first: int = 0) -> None:
    drawn = torch.tensor(generation.logprobs)
    torch.testing.assert_close(drawn[first:], logprobs[first:], rtol=1e-3, atol=1e-3)


def prompts(count: int, **settings: Any) -> list[EnginePrompt]:
    """Of both policies in turn, the same tokens for either."""
    made: dict[str, Any] = {"max_tokens": 12, "temperature": 0.7, "allowed": ALLOWED} | settings
    return [
        EnginePrompt(policy=policy, tokens=range(7, 9 + 5 * number), **made)
        for number in range(count)
        for policy in POLICIES
    ]


def test_two_policies_at_once_have_the_trainers_logprobs(kind: str, model: Path) -> None:
    async def main() -> None:
        engine = make(kind, model)
        await engine.load(weights(model, "left", 0))
        with pytest.raises(InfrastructureError, match="no_weights"):
            await engine.generate(prompts(1)[1])
        await engine.load(weights(model, "right", 5))
        asked = [*prompts(4), *prompts(2, allowed=())]
        answers = await asyncio.gather(*map(engine.generate, asked))
        for prompt, answer in zip(asked, answers, strict=True):
            version = 0 if prompt.policy == "left" else 5
            assert answer.versions == [version] * 12
            assert_close(answer, expected(model, version, prompt, answer.tokens))
        await engine.close(1)

    drive(main)


def test_greedy_draws_are_the_trainers_likeliest(kind: str, model: Path) -> None:
    async def main() -> None:
        engine = make(kind, model)
        for policy in POLICIES:
            await engine.load(weights(model, policy, 3))
        for prompt in prompts(2, temperature=0.0, allowed=()):
            answer = await engine.generate(prompt)
            network = trainers_model(model, prompt.policy, 3)
            with torch.no_grad():
                logits = network(torch.tensor([[*prompt.tokens, *answer.tokens]])).logits[0]
            likeliest = logits[len(prompt.tokens) - 1 : -1].argmax(-1)
            assert answer.tokens == likeliest.tolist()
            assert_close(answer, expected(model, 3, prompt, answer.tokens))
        await engine.close(1)

    drive(main)


def test_an_adapter_changes_between_tokens_and_the_others_stay(kind: str, model: Path) -> None:
    async def main() -> None:
        engine = make(kind, model)
        for policy in POLICIES:
            await engine.load(weights(model, policy, 0))
        later = [weights(model, "left", version) for version in (1, 2)]
        asked = prompts(2, max_tokens=400)
        hold(engine, 100, 200)
        running = [asyncio.create_task(engine.generate(prompt)) for prompt in asked]
        await asyncio.sleep(0)
        # It came later: once it has ended, the others have drawn a token too.
        await engine.generate(EnginePrompt("left", [1], 2))
        for one in later:
            await engine.load(one)
        answers = await asyncio.gather(*running)
        for prompt, answer in zip(asked, answers, strict=True):
            assert len(answer.tokens) == len(answer.logprobs) == len(answer.versions) == 400
            if prompt.policy == "left":
                assert answer.versions == sorted(answer.versions)
                assert (answer.versions[0], answer.versions[-1]) == (0, 2)
                assert answer.mixed
                old = answer.versions.count(0)
                before = expected(model, 0, prompt, answer.tokens[:old])
                torch.testing.assert_close(
                    torch.tensor(answer.logprobs[:old]), before, rtol=1e-3, atol=1e-3
                )
            else:
                assert answer.versions == [0] * 400
                assert not answer.mixed
                assert_close(answer, expected(model, 0, prompt, answer.tokens))
        late = await engine.generate(asked[0])
        assert (late.versions, late.mixed) == ([2] * 400, False)
        assert_close(late, expected(model, 2, asked[0], late.tokens))
        await engine.close(1)

    drive(main)


def test_what_is_no_adapter_of_the_policys_base_is_refused(
    kind: str, model: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        engine = make(kind, model)
        good = weights(model, "left", 0)
        await engine.load(good)
        [prompt, _] = prompts(1, temperature=0.0)
        before = await engine.generate(prompt)
        with pytest.raises(BlobError, match=r"'left' is an adapter of base .*restart it"):
            await engine.load(weights(model, "left", 1, base=1))
        with pytest.raises(BlobError, match="is a whole model"):
            await engine.load(Weights("left", 1, model / "0.safetensors"))
        strange = load_file(good.path)
        strange["base_model.model.lm_head.lora_A.weight"] = torch.zeros(4, 64)
        save_file(strange, tmp_path / "strange")
        with pytest.raises(BlobError, match=r"don't fit .*unknown: base_model.model.lm_head"):
            await engine.load(dataclasses.replace(good, version=1, path=tmp_path / "strange"))
        assert await engine.generate(prompt) == before
        await engine.close(1)

    drive(main)


def test_policies_share_the_memory_of_their_base(model: Path) -> None:
    async def main() -> None:
        engine = make("torch", model)
        assert isinstance(engine, TorchEngine)
        await engine.load(weights(model, "left", 0))
        await engine.load(weights(model, "right", 0))
        left, right = (
            {name: one.data_ptr() for name, one in batch.model.state_dict().items()}
            for batch in engine._batches.values()
        )
        base = {name for name in left if ".lora_" not in name}
        assert {left[name] for name in base} == {right[name] for name in base}
        assert not {at for name, at in left.items() if name not in base} & set(right.values())
        await engine.close(1)

    drive(main)


@pytest.mark.parametrize("kind", VLLM)
def test_computed_again_the_kv_cache_is_the_new_adapters(kind: str, model: Path) -> None:
    async def main() -> None:
        engine = make(kind, model, kv="recompute")
        for policy in POLICIES:
            await engine.load(weights(model, policy, 0))
        later = weights(model, "left", 1)
        asked = prompts(1, max_tokens=400)
        running = [asyncio.create_task(engine.generate(prompt)) for prompt in asked]
        await asyncio.sleep(0)
        await engine.generate(EnginePrompt("left", [1], 5))
        await engine.load(later)
        left, right = await asyncio.gather(*running)
        first = left.versions.index(1)
        assert first > 0
        assert (left.mixed, right.mixed) == (False, False)
        assert_close(left, expected(model, 1, asked[0], left.tokens), first)
        assert_close(right, expected(model, 0, asked[1], right.tokens))
        await engine.close(1)

    drive(main)
