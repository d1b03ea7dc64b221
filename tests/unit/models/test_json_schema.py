"""Masks by JSON schemas: what they let through is JSON that follows them."""

from __future__ import annotations

import json
import tracemalloc
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
from headrace.services.models.json_schema import GrammarState, Schemas, masked
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


TEXTS = {"type": "string"}


def collated(schemas: SchemaMasks, *sequences: TokenSequence, vocabulary: int = VOCABULARY) -> Any:
    return collate(sequences, vocabulary, torch.device("cpu"), schemas)


def test_the_trainers_masks_are_those_of_the_engine() -> None:
    answers = [sequence(TEXTS, '"one"'), sequence({"enum": [12, 1]}, "12"), sequence(TEXTS, '""')]
    expected = []
    for one in answers:
        sampling = one.samplings[0][0]
        grammar = SCHEMAS.begin(sampling.json_schema, [END])
        for token in one.tokens[2:].tolist():
            expected.append(grammar.allowed())
            grammar.accept(token)
    schemas = SchemaMasks(FOLDER, VOCABULARY)
    for _ in range(2):  # the second time from what is kept
        inputs = collated(schemas, *answers)
        assert torch.equal(inputs.allowed[inputs.allowed_set], torch.stack(expected))
        assert len(inputs.allowed) == len({tuple(one.tolist()) for one in expected})
        seen = list(dict.fromkeys(inputs.allowed_set.tolist()))
        assert seen == list(range(len(inputs.allowed)))


def counts(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Counts the answers that a grammar begins, and the masks that are unpacked."""
    found = {"begun": 0, "unpacked": 0}

    def counting(owner: Any, name: str, what: str) -> None:
        real = getattr(owner, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            found[what] += 1
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, counted)

    counting(Schemas, "begin", "begun")
    counting(GrammarState, "allowed", "unpacked")
    counting(np, "unpackbits", "unpacked")
    return found


def test_the_trainer_unpacks_distinct_masks_only_and_computes_them_once_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schemas = SchemaMasks(FOLDER, VOCABULARY)
    answers = [sequence(TEXTS, f'"{letter * 200}"') for letter in "xy"]
    found = counts(monkeypatch)
    distinct = len(collated(schemas, *answers).allowed)
    assert distinct < 5
    # `begin` itself unpacks one mask.
    assert found == {"begun": 2, "unpacked": 2 + distinct}
    for one in answers:
        collated(schemas, one)
    assert found["begun"] == 2
    assert found["unpacked"] <= 2 + 3 * distinct
    schemas.forget()
    collated(schemas, *answers)
    assert found["begun"] == 4


def test_masks_beyond_the_bound_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = sequence(TEXTS, '"xxx"'), sequence({"enum": [12, 1]}, "12")
    words, tokens = -(-VOCABULARY // 32), 6
    distinct = len(collated(SchemaMasks(FOLDER, VOCABULARY), one).allowed)
    monkeypatch.setattr("headrace.trainer.collate.KEPT_BYTES", 4 * (distinct * words + tokens))
    schemas, found = SchemaMasks(FOLDER, VOCABULARY), counts(monkeypatch)
    first = collated(schemas, one, other)
    again = collated(schemas, one, other)
    assert found["begun"] == 3
    assert torch.equal(first.allowed, again.allowed)
    assert torch.equal(first.allowed_set, again.allowed_set)


def test_the_trainers_memory_for_masks_does_not_grow_by_a_mask_for_each_token() -> None:
    vocabulary, count = 40_000, 600
    schemas, answer = SchemaMasks(FOLDER, vocabulary), sequence(TEXTS, f'"{"x" * count}"')
    collated(schemas, sequence(TEXTS, '"x"'), vocabulary=vocabulary)
    tracemalloc.start()
    try:
        inputs = collated(schemas, answer, vocabulary=vocabulary)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * inputs.allowed.numel() + 1_000 * count < count * vocabulary / 10


@pytest.mark.parametrize(
    "wrong", [sequence({"enum": [True]}, "false"), sequence({"type": "nothing"}, "true")]
)
def test_an_answer_that_does_not_follow_its_schema_can_not_be_trained_on(
    wrong: TokenSequence,
) -> None:
    with pytest.raises(UnusableBatch, match="JSON schema"):
        collate([wrong], VOCABULARY, torch.device("cpu"), SchemaMasks(FOLDER, VOCABULARY))
