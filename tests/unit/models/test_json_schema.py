"""Masks by JSON schemas: what they let through is JSON that follows them."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.schemas.events import Sampling
from headrace.services.base.tool_calls import (
    BEGIN,
    Format,
    forced_call,
    parse_tool_calls,
)
from headrace.services.base.tool_calls import END as CALLED
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.models.json_schema import Schemas, masked
from headrace.services.models.output_head import Head
from headrace.services.models.weights import model_folder
from headrace.trainer.collate import SchemaMasks, collate
from headrace.trainer.forward.token_logprobs import token_logprobs
from headrace.trainer.sequences import TokenSequence, UnusableBatch

FOLDER = model_folder("tiny-llama")
VOCABULARY, END = 258, 257
SCHEMAS = Schemas(FOLDER, VOCABULARY)

VALUES = st.recursive(
    st.booleans() | st.integers(-99, 99) | st.text('aü"\\ \n', max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2)
    ),
    max_leaves=6,
)


def random_text(schema: Any, seed: int, around: tuple[str, str] = ("", "")) -> list[int]:
    """Up to 400 ids drawn uniformly from what is allowed, the end where it is."""
    chance, grammar = Random(seed), SCHEMAS.begin(json.dumps(schema), [END], around)
    ids: list[int] = []
    while len(ids) < 400 and (not ids or ids[-1] != END):
        allowed = grammar.allowed().nonzero().flatten().tolist()
        ids.append(END if END in allowed else chance.choice(allowed))
        grammar.accept(ids[-1])
    return ids


@given(VALUES, st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_what_is_drawn_is_what_the_schema_says(value: Any, seed: int) -> None:
    ids = random_text({"const": value}, seed)
    assert ids[-1] == END
    assert json.loads(bytes(ids[:-1])) == value


KINDS = {
    "n": (st.integers(-(10**6), 10**6), {"type": "integer"}),
    "b": (st.booleans(), {"type": "boolean"}),
    "s": (st.text('aü"\\ \n', max_size=5), {"type": "string"}),
    "l": (st.lists(st.none()), {"type": "array", "items": {"type": "null"}}),
}


@given(st.fixed_dictionaries({name: values for name, (values, _) in KINDS.items()}))
@settings(max_examples=40, deadline=None)
def test_what_json_dumps_writes_follows_its_schema(value: dict[str, Any]) -> None:
    properties = {name: schema for name, (_, schema) in KINDS.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    grammar = SCHEMAS.begin(json.dumps(schema | {"additionalProperties": False}), [END])
    text = json.dumps({name: value[name] for name in properties}, ensure_ascii=False)
    for token in [*Tokenizer(FOLDER).encode(text), END]:
        assert grammar.allowed()[token]
        grammar.accept(token)
    assert grammar.allowed().all(), "nothing is forbidden after the end"


DIGIT = {
    "type": "object",
    "properties": {"default": {"$ref": "#/$defs/digit"}, "$ref": {"const": {"$ref": "#"}}},
    "required": ["default"],
    "$defs": {"digit": {"enum": [1, 2]}},
}
"""With a schema of its own within, and things that look like references."""


SAID = f"{BEGIN}ü{CALLED}"


@pytest.mark.parametrize("spelling", ["hermes", "json"])
def test_a_forced_call_is_one_of_the_tools_as_it_is_spelled(spelling: Format) -> None:
    tools: dict[str, Any] = {"add": DIGIT, "say": {"properties": {"what": {"const": SAID}}}}
    schema, around = forced_call(spelling, tools)
    told = [{"default": 1}, {"default": 2}]
    possible = [*told, *({**one, "$ref": {"$ref": "#"}} for one in told), {}, {"what": SAID}]
    seen = set()
    for seed in range(40):
        ids = random_text(schema, seed, around)
        text = bytes(ids[:-1]).decode()
        beside, (call,) = parse_tool_calls(text, spelling)
        assert (beside, text.startswith(around[0]), text.endswith(around[1])) == ("", True, True)
        assert call.arguments in (possible[:4] if call.name == "add" else possible[4:])
        seen.add((call.name, len(call.arguments)))
    assert seen == {("add", 1), ("add", 2), ("say", 0), ("say", 1)}


def test_what_is_around_is_spelled_as_it_is() -> None:
    around = ('"é😀\\', "\n")
    grammar = SCHEMAS.begin('{"enum": [7]}', [END], around)
    for token in [*f"{around[0]}7{around[1]}".encode(), END]:
        assert grammar.allowed().nonzero().flatten().tolist() == [token]
        grammar.accept(token)


def test_a_token_that_does_not_follow_is_refused() -> None:
    grammar = SCHEMAS.begin('{"type": "boolean"}', [END])
    with pytest.raises(ValueError, match="token 97 does not follow"):
        grammar.accept(ord("a"))


def test_only_rows_with_a_schema_are_masked_and_padding_is_never_drawn() -> None:
    logits = torch.zeros(2, VOCABULARY + 6)
    scores = masked(logits, [None, SCHEMAS.begin('{"type": "boolean"}', [END])])
    assert torch.isfinite(scores[0]).all()
    assert torch.isfinite(scores[1]).nonzero().flatten().tolist() == [ord("f"), ord("t")]


def sequence(schema: Any, text: str, ends: bytes = b"") -> TokenSequence:
    tokens = [*b"q:", *text.encode(), END]
    count = len(tokens) - 2
    stop_ids = ends or np.array([END], dtype="<i4").tobytes()
    sampling = Sampling(
        max_tokens=count, temperature=0.5, json_schema=json.dumps(schema), stop_ids=stop_ids
    )
    zeros = np.zeros(count, dtype=np.float32)
    return TokenSequence(
        tokens=np.array(tokens),
        positions=np.arange(2, len(tokens)),
        behaviour=zeros,
        advantages=zeros,
        versions=np.zeros(count, dtype=np.int64),
        samplings=((sampling, count),),
        demonstrated=np.zeros(count, dtype=np.bool_),
    )


def test_the_trainer_spreads_probability_over_what_could_be_drawn_alone() -> None:
    schema = {"enum": [True, False]}
    inputs = collate(
        [sequence(schema, "true"), sequence(schema, "false")],
        VOCABULARY,
        torch.device("cpu"),
        SchemaMasks(FOLDER, VOCABULARY),
    )
    logprobs, _ = token_logprobs(torch.zeros(11, VOCABULARY), inputs, Head(torch.clone, VOCABULARY))
    # A choice of two at the first token, and none after it.
    expected = [np.log(0.5), 0, 0, 0, 0, np.log(0.5), 0, 0, 0, 0, 0]
    torch.testing.assert_close(logprobs, torch.tensor(expected, dtype=torch.float32))


@pytest.mark.parametrize(
    "wrong", [sequence({"enum": [True]}, "false"), sequence({"type": "nothing"}, "true")]
)
def test_an_answer_that_does_not_follow_its_schema_can_not_be_trained_on(
    wrong: TokenSequence,
) -> None:
    with pytest.raises(UnusableBatch, match="JSON schema"):
        collate([wrong], VOCABULARY, torch.device("cpu"), SchemaMasks(FOLDER, VOCABULARY))
