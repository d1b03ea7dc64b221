"""Engines that serve a teacher: their scores are the logprobs that the trainer computes."""

from __future__ import annotations

import asyncio
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.errors import InfrastructureError
from headrace.services.inference.engine import (
    Engine,
    EnginePrompt,
    EngineSetup,
    ScoredRun,
    ScorePrompt,
    ScoringEngine,
    Weights,
)
from headrace.services.inference.engines.scripted import ScriptedEngine
from headrace.services.models.weights import model_folder
from tests.contract.engines import KINDS, NARROW, drive, dtype_of, hold, make_engine_of, make_model
from tests.contract.test_engine_numbers import trainer_logprobs

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and what it imports warn of themselves

CONTEXT = 256
VOCABULARY = 258
ALLOWED = (3, 4, 5, 6, 100)
SCHEMA = '{"enum": ["Oslo", "Rome"]}'
END = 257


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose tokenizer has a token for each byte."""
    folder = make_model(
        tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY, max_position_embeddings=CONTEXT
    )
    shutil.copy(model_folder("tiny-llama") / "tokenizer.json", folder)
    return folder


def weights(model: Path, version: int) -> Weights:
    return Weights("default", version, model / f"{version}.safetensors")


def scores(count: int, masks: bool) -> list[ScorePrompt]:
    """Ragged ones, each with three runs. With masks, each run was sampled differently."""
    pick = random.Random(count)
    made = []
    for _ in range(count):
        tokens = [pick.randrange(256) for _ in range(pick.choice([40, 55, 90, 200]))]
        runs = [ScoredRun(3, 1), ScoredRun(8, 20), ScoredRun(31, len(tokens) - 31)]
        if masks:
            tokens[8:28] = pick.choices(ALLOWED, k=20)
            tokens[31:38] = [*b'"Rome"', END]
            runs = [
                replace(runs[0], temperature=0.7),
                replace(runs[1], temperature=1.3, allowed=ALLOWED),
                ScoredRun(31, 7, 0.7, json_schema=SCHEMA, stop_ids=(END,)),
            ]
        made.append(ScorePrompt("default", tokens, runs))
    return made


def expected(model: Path, version: int, prompt: ScorePrompt, dtype: torch.dtype) -> torch.Tensor:
    """What the trainer computes for each run after the tokens before it."""
    found = []
    for run in prompt.runs:
        before, drawn = prompt.tokens[: run.first], prompt.tokens[run.first :][: run.count]
        asked = EnginePrompt(
            "default", before, run.count, run.temperature, allowed=run.allowed,
            json_schema=run.json_schema, stop_ids=run.stop_ids,
        )  # fmt: skip
        found.append(trainer_logprobs(model, version, asked, drawn, VOCABULARY, dtype))
    return torch.cat(found)


async def ask(engine: Engine, prompt: ScorePrompt) -> Any:
    assert isinstance(engine, ScoringEngine)
    return await engine.score(prompt)


@pytest.mark.parametrize("kind", [*KINDS, *NARROW])
def test_scores_are_the_trainers_logprobs(kind: str, model: Path) -> None:
    async def main() -> None:
        engine = make_engine_of(kind, model, 256)
        await engine.load(weights(model, 1))
        # vLLM scores only the plain distribution.
        asked = [*scores(7, masks=False), *([] if "vllm" in kind else scores(6, masks=True))]
        busy = asyncio.gather(
            *(engine.generate(EnginePrompt("default", [n], 30)) for n in range(20))
        )
        answers = await asyncio.gather(*(ask(engine, prompt) for prompt in asked))
        await busy
        differences = []
        for prompt, answer in zip(asked, answers, strict=True):
            assert (answer.tokens, answer.finish, answer.mixed) == ([], "stop", False)
            assert answer.versions == [1] * sum(run.count for run in prompt.runs)
            ours = expected(model, 1, prompt, dtype_of(kind))
            differences.append((torch.tensor(answer.logprobs) - ours).abs())
        difference = torch.cat(differences)
        # The torch engine computes what the trainer computes. vLLM's kernels round elsewhere.
        narrow = 1.5e-1 if "tp2" in kind else 5e-2  # Each rank rounds its part of a sum.
        most = 1e-4 if kind.startswith("torch") else narrow if "bfloat16" in kind else 1e-3
        assert difference.quantile(0.95) <= most, kind
        assert engine.capacity().free_slots == 256
        await engine.close(1)

    drive(main)


@pytest.fixture(params=[*KINDS, "scripted"])
def engine_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(kind: str, model: Path, slots: int) -> Engine:
    if kind == "scripted":
        return ScriptedEngine(EngineSetup(model, slots, options={"delay_ms": 5}))
    return make_engine_of(kind, model, slots)


def test_a_sequence_beyond_the_context_is_overflow(engine_kind: str, model: Path) -> None:
    async def main() -> None:
        engine = make(engine_kind, model, 4)
        await engine.load(weights(model, 0))
        answer = await ask(
            engine, ScorePrompt("default", [1] * (CONTEXT + 1), [ScoredRun(CONTEXT, 1)])
        )
        assert (answer.logprobs, answer.finish) == ([], "overflow")
        last = ScorePrompt("default", [1] * (CONTEXT - 1), [ScoredRun(CONTEXT - 2, 1)])
        assert len((await ask(engine, last)).logprobs) == 1
        await engine.close(1)

    drive(main)


@pytest.mark.parametrize(
    ("runs", "reason"),
    [
        ([], "at least one token"),
        ([ScoredRun(0, 1)], "begin at 1 or later"),
        ([ScoredRun(1, 0)], "a run of 0 tokens"),
        ([ScoredRun(3, 2)], "end within the 4 tokens"),
        ([ScoredRun(2, 1), ScoredRun(1, 1)], "must ascend"),
        ([ScoredRun(1, 1, temperature=0.0)], "only more than 0"),
        ([ScoredRun(1, 1, allowed=(VOCABULARY,))], "outside the vocabulary"),
    ],
)
def test_what_can_never_be_scored_is_refused(
    runs: list[ScoredRun], reason: str, model: Path
) -> None:
    async def main() -> None:
        for kind in ("torch", "scripted"):
            engine = make(kind, model, 4)
            await engine.load(weights(model, 0))
            with pytest.raises(ValueError, match=reason):
                await ask(engine, ScorePrompt("default", [1, 2, 3, 4], runs))
            await engine.close(1)

    drive(main)


def test_tokens_that_break_their_schema_fail_alone(model: Path) -> None:
    async def main() -> None:
        engine = make("torch", model, 4)
        await engine.load(weights(model, 0))
        run = ScoredRun(1, 7, json_schema=SCHEMA, stop_ids=(END,))
        good = ScorePrompt("default", [1, *b'"Oslo"', END], [run])
        bad = ScorePrompt("default", [1, *b'"Lima"', END], [run])
        answers: Any = await asyncio.gather(
            ask(engine, good), ask(engine, bad), return_exceptions=True
        )
        assert len(answers[0].logprobs) == 7
        assert isinstance(answers[1], InfrastructureError)
        assert "does not follow its JSON schema" in answers[1].message
        await engine.close(1)

    drive(main)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_take_slots_and_a_cancelled_one_gives_its_slot_back(kind: str, model: Path) -> None:
    async def main() -> None:
        engine = make(kind, model, 1)
        await engine.load(weights(model, 0))
        hold(engine, 0)
        generating = asyncio.create_task(engine.generate(EnginePrompt("default", [1], 5)))
        await asyncio.sleep(0)
        assert engine.capacity().free_slots == 0
        prompt = ScorePrompt("default", [1, 2, 3], [ScoredRun(1, 2)])
        scoring = [asyncio.create_task(ask(engine, prompt)) for _ in range(2)]
        await asyncio.sleep(0)
        scoring[0].cancel()
        await engine.load(weights(model, 1))
        await generating
        assert len((await scoring[1]).logprobs) == 2
        assert engine.capacity().free_slots == 1
        await engine.close(1)

    drive(main)


def test_a_closing_engine_interrupts_scores(engine_kind: str, model: Path) -> None:
    async def main() -> None:
        engine = make(engine_kind, model, 1)
        await engine.load(weights(model, 0))
        prompt = ScorePrompt("default", [1, 2, 3], [ScoredRun(1, 2)])
        scoring = [asyncio.create_task(ask(engine, prompt)) for _ in range(3)]
        await asyncio.sleep(0)
        await engine.close(0)
        ended = await asyncio.gather(*scoring)
        assert {one.finish for one in ended} <= {"stop", "interrupted"}
        with pytest.raises(InfrastructureError, match="closed"):
            await ask(engine, prompt)

    drive(main)
