"""`python -m tests.bench.packing`: what packing saves, against padding, in tokens and in time.

A learner that packs and one that pads train on the same batches in turns, on one thread of a CPU.
It needs no Kafka.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np

from headrace.schemas.events import Sampling
from headrace.schemas.recipe.policy import Policy
from headrace.services.models.weights import model_folder
from headrace.trainer.learner import Learner
from headrace.trainer.sequences import TokenSequence, UpdateBatch

ROUNDS = 3
Batch = list[TokenSequence]


def sequence(tokens: list[int], trained: int) -> TokenSequence:
    return TokenSequence(
        tokens=np.array(tokens, dtype=np.int64),
        positions=np.arange(len(tokens) - trained, len(tokens)),
        behaviour=np.full(trained, -5.5, dtype=np.float32),
        advantages=np.ones(trained, dtype=np.float32),
        versions=np.zeros(trained, dtype=np.int64),
        samplings=((Sampling(max_tokens=trained), trained),),
        demonstrated=np.zeros(trained, dtype=np.bool_),
    )


def batches() -> Iterator[tuple[str, Batch]]:
    pick = np.random.default_rng(1)

    def draw(count: int) -> list[int]:
        return [*map(int, pick.integers(0, 250, count))]

    lengths = [int(count) for count in pick.integers(100, 2000, 32)]
    yield "32 sequences of 100 to 2,000 tokens", [sequence(draw(one), one - 1) for one in lengths]
    groups: Batch = []
    for _ in range(4):
        prompt = draw(1000)
        for count in map(int, pick.integers(50, 400, 8)):
            groups.append(sequence(prompt + draw(count), count))
    yield "4 groups of 8, prompts of 1,000 and answers of 50 to 400 tokens", groups
    long = draw(4000)
    yield (
        "a group of 8, a prompt of 4,000 and answers of 200 tokens",
        [sequence(long + draw(200), 200) for _ in range(8)],
    )
    talk: list[int] = []
    branches: Batch = []
    for _ in range(20):
        talk += draw(100)
        branches.append(sequence(talk + draw(50), 50))
    yield "20 questions of 50 tokens beside a talk of 20 turns of 100", branches


def learner(folder: Path, packs: bool) -> Learner:
    training = {"device": "cpu", "threads": 1, "learning_rate": 1e-9}
    policy = Policy.model_validate({"model": str(folder), "training": training})
    if packs:
        return Learner(folder, policy)
    with patch("headrace.trainer.forward.policy_forward.learn_to_pack", return_value=False):
        return Learner(folder, policy)


def measure(folder: Path, name: str, batch: Batch) -> None:
    both = {packs: learner(folder, packs) for packs in (False, True)}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    read = {}
    for _ in range(ROUNDS):
        for packs, one in both.items():
            start = time.process_time()
            read[packs] = one.train([UpdateBatch(batch)])["tokens_read"]
            seconds[packs].append(time.process_time() - start)
    start_logprobs = [
        np.concatenate([found for _, found in one.start_logprobs]) for one in both.values()
    ]
    difference = np.abs(start_logprobs[0] - start_logprobs[1]).max()
    padded, packed = min(seconds[False]), min(seconds[True])
    print(
        f"{name}: {read[False]:,.0f} tokens, {read[True]:,.0f} packed; {padded:.2f} s padded, "
        f"{packed:.2f} s packed, ratio {padded / packed:.2f}; logprobs differ by {difference:.0e}"
    )


def main() -> None:
    """Measures every batch with the model `tiny-llama` and longer contexts."""
    source = model_folder("tiny-llama")
    with TemporaryDirectory() as made:
        folder = Path(made)
        config = json.loads((source / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
        (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
        for name, batch in batches():
            measure(folder, name, batch)


if __name__ == "__main__":
    main()
