"""The shipped models are what their maker makes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.errors import UsageError
from headrace.infra.models.make import SIZES, byte_tokenizer, files
from headrace.services.base.tool_calls import ToolCall, parse_tool_calls
from headrace.services.inference.tokenizer import Tokenizer as ModelTokenizer
from headrace.services.models.tokens import token_ids
from headrace.services.models.weights import model_folder


@pytest.mark.parametrize("name", SIZES)
def test_the_files_are_what_the_maker_makes(name: str) -> None:
    folder = model_folder(name)
    made = files(name)
    assert {path.name for path in folder.iterdir()} == set(made)
    assert {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()} == made


@given(st.text())
def test_any_text_becomes_ids_and_comes_back(text: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.encode_special_tokens = True
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_an_action_is_one_token_and_the_end_is_the_configurations() -> None:
    folder = model_folder("tiny-llama")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    configuration = json.loads((folder / "config.json").read_text())
    assert [tokenizer.token_to_id(action) for action in "LDRU"] == list(b"LDRU")
    assert tokenizer.token_to_id("<end>") == configuration["eos_token_id"]
    assert tokenizer.get_vocab_size() == configuration["vocab_size"]


def test_tokens_are_named_by_their_spellings() -> None:
    folder = model_folder("tiny-llama")
    assert token_ids(folder, ["5", "Ġ", "Ċ", "Ã", "©", "<end>"]) == [*b"5 \n", *"é".encode(), 257]
    with pytest.raises(UsageError, match=r"no token '10'. Write single tokens, .* a space as Ġ"):
        token_ids(folder, ["1", "0", "10", " "])


def test_the_chat_model_has_one_token_for_each_role_and_continues_what_was_said() -> None:
    tokenizer = ModelTokenizer(model_folder("tiny-chat"))
    hello = [{"role": "system", "content": "Guess <user>."}, {"role": "user", "content": "?"}]
    context = tokenizer.chat(json.dumps({"messages": hello}), [])
    assert tokenizer.decode(context) == "<system>Guess <user>.<end><user>?<end><assistant>"
    assert len(context) == len("sGuess <user>.eu?ea")  # a content spells no control token
    hint = json.dumps({"messages": [{"role": "user", "content": "up"}]})
    for said in ([ord("4")], [ord("4"), 257]):  # the policy may have drawn <end>, or not
        more = tokenizer.chat(hint, [*context, *said])
        assert tokenizer.decode([*said, *more]) == "4<end><user>up<end><assistant>"


def test_the_chat_model_renders_tools_and_calls_as_the_gateway_reads_them() -> None:
    tokenizer = ModelTokenizer(model_folder("tiny-chat"))
    arguments = {"letter": "a"}
    call = {"id": "1", "type": "function", "function": {"name": "pick", "arguments": arguments}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    messages = [{"role": "user", "content": "?"}, said, {"role": "tool", "content": "done"}]
    tools = [{"type": "function", "function": {"name": "pick"}}]
    text = tokenizer.decode(tokenizer.chat(json.dumps({"messages": messages, "tools": tools}), []))
    assert json.dumps(tools[0]) in text
    assert text.endswith("<end><tool>done<end><assistant>")
    answer = text.split("<assistant>")[1]
    assert parse_tool_calls(answer.removesuffix("<end><tool>done<end>"), "hermes") == (
        "", (ToolCall("pick", arguments),),
    )  # fmt: skip
