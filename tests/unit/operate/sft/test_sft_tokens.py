"""Rows become the ids that inference workers make of the same messages and demonstrations."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from headrace.schemas.packed import unpack_i32
from headrace.schemas.recipe.policy import Policy
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.models.weights import model_folder
from headrace.services.operate.sft.sft_rows import read_row
from headrace.services.operate.sft.sft_tokens import RowTokens

FOLDER = model_folder("tiny-chat")
END = 257


def tokens(context: int = 0, **sampling: Any) -> RowTokens:
    policy = Policy.model_validate({"model": "tiny-chat", "sampling": sampling})
    return RowTokens(FOLDER, policy, context)


def chat(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": one} for n, one in enumerate(texts)]}


def test_a_chat_has_the_ids_of_a_run() -> None:
    row = read_row(chat("hi", "hello", "more", "no", "last"), "hermes")
    found = tokens().sequence(row, 3, "rows:7")
    tokenizer, ids, trained = Tokenizer(FOLDER), list[int](), list[int]()
    for asked, answer in (("hi", "hello"), ("more", "no")):
        ids += tokenizer.chat(json.dumps(chat(asked)), ids)
        said = [*tokenizer.encode_demonstration(answer, ()), END]
        trained += range(len(ids), len(ids) + len(said))
        ids += said
    assert found.tokens.tolist() == ids  # What follows the last answer is left out.
    assert found.positions.tolist() == trained
    assert found.demonstrated.all()
    assert (found.versions == -1).all()
    assert [count for _, count in found.samplings] == [6, 3]
    assert (found.sample, found.name) == (3, "rows:7")
    arrays = (found.behaviour, found.advantages, found.demonstrated, found.versions)
    assert {len(one) for one in arrays} == {len(trained)}
    assert {one.strides for one in arrays} == {(0,)}, "each has one value, which is stored once"


def test_an_answer_of_weight_0_is_only_read() -> None:
    tree = chat("hi", "hello", "more", "no")
    whole = tokens().sequence(read_row(tree, "hermes"), 0, "")
    tree["messages"][1]["weight"] = 0
    found = tokens().sequence(read_row(tree, "hermes"), 0, "")
    assert found.tokens.tolist() == whole.tokens.tolist()
    assert found.positions.tolist() == whole.positions.tolist()[6:]


def test_tools_are_shown_at_the_beginning() -> None:
    tree = chat("hi", "hello", "more", "no") | {"tools": [{"name": "add"}]}
    text = Tokenizer(FOLDER).decode(
        tokens().sequence(read_row(tree, "hermes"), 0, "").tokens.tolist()
    )
    assert text.startswith("<system>Call a tool")
    assert text.count("add") == 1


def test_plain_text_has_no_markup_and_the_sampling_holds() -> None:
    row = read_row({"prompt": "<end>2+2=", "completion": "4"}, "hermes")
    found = tokens(allowed=["4", "5"], max_tokens=1, temperature=0).sequence(row, 0, "")
    assert found.tokens.tolist() == list(b"<end>2+2=4")
    assert found.positions.tolist() == [9]
    [(sampling, _)] = found.samplings
    assert unpack_i32(sampling.allowed) == list(b"45")
    assert sampling.temperature == 1


@pytest.mark.parametrize(
    ("context", "sampling", "reason"),
    [
        (20, {}, "more than 20 tokens"),
        (0, {"max_tokens": 3}, "its sampling allows 3"),
        (0, {"allowed": ["x"]}, "which is not allowed|no stop token"),
    ],
)
def test_what_the_policy_could_not_draw_is_refused(
    context: int, sampling: dict[str, Any], reason: str
) -> None:
    row = read_row(chat("a question of some length", "an answer"), "hermes")
    with pytest.raises(ValueError, match=reason):
        tokens(context, **sampling).sequence(row, 0, "")
    assert len(tokens(60).sequence(row, 0, "").tokens) <= 60


def test_ids_are_whole_numbers() -> None:
    found = tokens().sequence(read_row(chat("a", "b"), "hermes"), 0, "")
    assert found.tokens.dtype == found.positions.dtype == np.int64
