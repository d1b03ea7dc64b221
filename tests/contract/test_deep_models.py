"""In bfloat16 a deep model gives the engine and the trainer the same logprobs, whatever is batched.

A result that is rounded otherwise in one layer changes all layers and tokens after it. So a deep
model shows roundings that a model of two layers hides.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.schemas.events import Sampling
from headrace.services.inference.engine import EngineOutput, EnginePrompt, Weights
from headrace.services.models.torch_models import overwrite
from headrace.trainer.forward.master_weights import MasterWeights
from headrace.trainer.forward.policy_forward import PolicyForward
from headrace.trainer.model_loading import load_model
from headrace.trainer.sequences import TokenSequence
from tests.contract.engines import drive, make_engine_of, make_model

LAYERS, VOCABULARY, CONTEXT, SLOTS = 12, 128, 1024, 64
MOST = 1e-5
"""The largest mean difference, in nats. With attention in float32 it is 1e-4 and more."""
WEIGHTS = "0.safetensors"
Shape = tuple[int, tuple[int, ...], int]
"""How many prompts, the lengths that they may have, and how many tokens each draws."""
SHAPES: list[Shape] = [(1, (7,), 40), (12, (1, 7, 20, 40), 40)]
MANY_SHAPES: list[Shape] = [
    (1, (20,), 100), (1, (600,), 60), (2, (40,), 60), (8, (20,), 100), (16, (300,), 40),
    (32, (40,), 60), (48, (1, 2, 7, 20, 40, 90, 200), 60), (64, (1, 64), 30),
]  # fmt: skip


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights that are large enough for sharp distributions."""
    folder = tmp_path_factory.mktemp("deep")
    sizes = {"num_hidden_layers": LAYERS, "max_position_embeddings": CONTEXT}
    make_model(folder, vocab_size=VOCABULARY, initializer_range=0.12, **sizes)
    save(load_file(folder / WEIGHTS), folder)
    return folder


@pytest.fixture(scope="module")
def trained(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model after it has learned this repository's documents, letter by letter."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "config.json").write_bytes((deep / "config.json").read_bytes())
    model = load_model(bare(deep), seed=0)
    text = torch.tensor([letter for letter in documents() if letter < VOCABULARY])
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    steps = 400
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 30) * (1 - step / steps)
        first = torch.randint(0, len(text) - 129, (16,))
        ids = torch.stack([text[one : one + 129] for one in first.tolist()])
        logits = model(input_ids=ids[:, :-1]).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert loss.item() < 2.0, "it learned"
    save(model.state_dict(), folder)
    return folder


def documents() -> bytes:
    pages = Path(__file__).parents[2].joinpath("docs").glob("*.md")
    return b"".join(page.read_bytes() for page in sorted(pages))


def save(state: dict[str, Tensor], folder: Path) -> None:
    """As a trainer publishes it: in bfloat16."""
    save_file({name: one.bfloat16() for name, one in state.items()}, folder / WEIGHTS)


def bare(folder: Path) -> Path:
    """The folder without weights."""
    found = folder / "bare"
    found.mkdir(exist_ok=True)
    (found / "config.json").write_bytes((folder / "config.json").read_bytes())
    return found


def prompts(shape: Shape, pick: random.Random) -> list[EnginePrompt]:
    """Pieces of the documents."""
    count, lengths, draws = shape
    text = [letter % VOCABULARY for letter in documents()[:100_000]]
    made = []
    for _ in range(count):
        length = pick.choice(lengths)
        first = pick.randrange(len(text) - length)
        made.append(EnginePrompt("default", text[first : first + length], draws, temperature=1.0))
    return made


def trainer_of(folder: Path) -> PolicyForward:
    """The trainer's model, with the engine's weights."""
    model: Any = load_model(bare(folder), seed=0).eval()
    state = {name: one.float() for name, one in load_file(folder / WEIGHTS).items()}
    overwrite(model.state_dict(keep_vars=True), state)
    MasterWeights(model, torch.bfloat16)
    return PolicyForward(model, folder, torch.device("cpu"), entropy_gradient=False)


def sequence(prompt: EnginePrompt, answer: EngineOutput) -> TokenSequence:
    count = len(answer.tokens)
    zeros = np.zeros(count, dtype=np.float32)
    return TokenSequence(
        tokens=np.array([*prompt.tokens, *answer.tokens]),
        positions=np.arange(len(prompt.tokens), len(prompt.tokens) + count),
        behaviour=np.array(answer.logprobs, dtype=np.float32),
        advantages=zeros,
        versions=np.zeros(count, dtype=np.int64),
        samplings=((Sampling(max_tokens=count), count),),
        demonstrated=np.zeros(count, dtype=np.bool_),
    )


def differences(
    forward: PolicyForward, sequences: Sequence[TokenSequence], size: int
) -> Iterator[Tensor]:
    """Engine minus trainer, if a micro-batch has so many sequences, padded to the longest."""
    for first in range(0, len(sequences), size):
        inputs = forward.collate(sequences[first : first + size])
        with torch.no_grad():
            yield inputs.behaviour - forward.logprobs(inputs)[0]


def compare(folder: Path, shape: Shape) -> None:
    async def main() -> None:
        engine = make_engine_of("torch-bfloat16", folder, SLOTS)
        await engine.load(Weights("default", 0, folder / WEIGHTS))
        forward = trainer_of(folder)
        asked = prompts(shape, random.Random(1))
        answers = await asyncio.gather(*map(engine.generate, asked))
        sequences = [sequence(*pair) for pair in zip(asked, answers, strict=True)]
        for size in sorted({1, 5, len(sequences)}):
            found = torch.cat(list(differences(forward, sequences, size))).abs()
            print(f"{shape}, {size} together: mean {found.mean():.7f}, most {found.max():.5f}")
            assert found.mean() <= MOST
        await engine.close(1)

    drive(main)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_deep_model_has_the_trainers_logprobs(deep: Path, shape: Shape) -> None:
    compare(deep, shape)


@pytest.mark.long
@pytest.mark.parametrize("shape", MANY_SHAPES, ids=str)
def test_a_trained_deep_model_has_the_trainers_logprobs(trained: Path, shape: Shape) -> None:
    compare(trained, shape)
