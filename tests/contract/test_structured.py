"""Answers by a JSON schema follow it, and the trainer computes the same logprobs."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.services.base.tool_calls import forced_call, parse_tool_calls
from headrace.services.inference.engine import EngineOutput, EnginePrompt
from headrace.services.models.weights import model_folder
from tests.contract.engines import KINDS, drive, make_engine_of, make_model
from tests.contract.test_engine_numbers import assert_close, trainer_logprobs, weights

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and what it imports warn of themselves

CITIES = ["Oslo", "Rome", "Lima", 'the "old" town']
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "city": {"enum": CITIES},
            "days": {"type": "array", "items": {"enum": [1, 20, 300]}, "maxItems": 3},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    }
)
CALL, AROUND = forced_call("hermes", {"travel": json.loads(SCHEMA)})
"""The same as a call's arguments."""
VOCABULARY, END = 258, 257


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose tokenizer has a token for each byte."""
    folder = make_model(
        tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY, max_position_embeddings=256
    )
    shutil.copy(model_folder("tiny-llama") / "tokenizer.json", folder)
    return folder


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def asked(number: int, **fields: Any) -> EnginePrompt:
    given: dict[str, Any] = {"max_tokens": 90, "stop_ids": (END,), "json_schema": SCHEMA}
    tokens = list(b"where to, and when?")[number % 7 :]
    return EnginePrompt("default", **({"tokens": tokens} | given | fields))


def read(answer: EngineOutput) -> Any:
    assert (answer.finish, answer.tokens[-1]) == ("stop", END)
    return json.loads(bytes(answer.tokens[:-1]))


def calling(prompt: EnginePrompt) -> EnginePrompt:
    """The same, of which a call is asked for."""
    return replace(prompt, json_schema=json.dumps(CALL), around=AROUND, max_tokens=170)


def called(answer: EngineOutput) -> Any:
    """The arguments of the one call that it is."""
    assert (answer.finish, answer.tokens[-1]) == ("stop", END)
    said, (call,) = parse_tool_calls(bytes(answer.tokens[:-1]).decode(), "hermes")
    assert (said, call.name) == ("", "travel")
    return call.arguments


def test_answers_follow_the_schema_and_logprobs_are_the_trainers(kind: str, model: Path) -> None:
    async def main() -> None:
        engine = make_engine_of(kind, model, 8)
        await engine.load(weights(model, 0))
        # More than slots, of all kinds side by side: rows come, leave and move.
        bound = [asked(number, temperature=(0.7, 1.0)[number % 2]) for number in range(12)]
        bound[3::3] = [calling(prompt) for prompt in bound[3::3]]
        greedy = [asked(number, temperature=0.0) for number in range(2)]
        free = [asked(number, json_schema="", max_tokens=11 + number) for number in range(6)]
        short = [asked(number, max_tokens=9) for number in range(3)]
        prompts = [one for many in zip(bound, (*free, *free), strict=True) for one in many]
        prompts += [*greedy, *short]
        answers = await asyncio.gather(*map(engine.generate, prompts))
        seen: Counter[str] = Counter()
        for prompt, answer in zip(prompts, answers, strict=True):
            if prompt.json_schema and prompt.max_tokens > 9:
                said = called(answer) if any(prompt.around) else read(answer)
                assert set(said) == {"city", "days"}
                assert said["city"] in CITIES
                assert set(said["days"]) <= {1, 20, 300}
                seen[said["city"]] += 1
            elif prompt.json_schema:
                assert bytes(answer.tokens).startswith(b'{"city": ')
                assert answer.finish == "length"
            if prompt.temperature:
                ours = trainer_logprobs(model, 0, prompt, answer.tokens, VOCABULARY)
                assert_close(answer, ours)
        assert len(seen) > 1, "drawn, not recited"
        await engine.close(1)

    drive(main)


def test_weights_change_in_the_middle_of_an_answer_by_a_schema(kind: str, model: Path) -> None:
    async def main() -> None:
        engine = make_engine_of(kind, model, 8)
        await engine.load(weights(model, 0))
        texts = {"type": "array", "items": {"enum": ["over and over", "again"]}, "minItems": 12}
        prompts = [
            asked(number, json_schema=json.dumps(texts), max_tokens=230) for number in range(4)
        ]
        answering = asyncio.gather(*map(engine.generate, prompts))
        version = 1
        while not answering.done():
            await engine.load(weights(model, version))
            version += 1
        answers = await answering
        assert any(len(set(answer.versions)) > 1 for answer in answers)
        for answer in answers:
            text = bytes(token for token in answer.tokens if token != END)
            whole = text if answer.finish == "stop" else text.rpartition(b",")[0] + b"]"
            assert set(json.loads(whole)) <= {"over and over", "again"}
        await engine.close(1)

    drive(main)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"json_schema": "{"}, "json_schema: "),
        ({"json_schema": '{"type": "nothing"}'}, "json_schema: "),
        ({"json_schema": '{"$ref": "#/nowhere"}'}, "nowhere"),
        ({"json_schema": '{"$ref": "#"}'}, "no text can follow this schema"),
        ({"json_schema": " " * 70_000}, "70000 characters"),
        ({"stop_ids": ()}, "stop token"),
        ({"allowed": (3, 4)}, "exclude each other"),
    ],
)
def test_what_can_not_be_followed_is_refused(
    kind: str, model: Path, fields: dict[str, Any], reason: str
) -> None:
    if "vllm" in kind:
        pytest.skip("the same code, before the engines differ")

    async def main() -> None:
        engine = make_engine_of(kind, model, 2)
        await engine.load(weights(model, 0))
        with pytest.raises(ValueError, match=reason):
            await engine.generate(asked(0, **fields))
        assert (await engine.generate(asked(1))).finish == "stop"
        assert engine.capacity().free_slots == 2
        await engine.close(1)

    drive(main)
