"""Text to ids and back, by the tokenizers of the shipped models and a strict one."""

from __future__ import annotations

from pathlib import Path

import pytest

tokenizers = pytest.importorskip("tokenizers")

from headrace.errors import UsageError  # noqa: E402
from headrace.services.inference.tokenizer import Tokenizer  # noqa: E402
from headrace.services.models.tokens import token_ids  # noqa: E402
from headrace.services.models.weights import model_folder  # noqa: E402


@pytest.fixture
def words(tmp_path: Path) -> Tokenizer:
    """Knows two words and an end, and no token for the unknown."""
    model = tokenizers.models.WordLevel({"left": 0, "right": 1, "<end>": 2}, unk_token="<none>")
    library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.add_special_tokens(["<end>"])
    library.save(str(tmp_path / "tokenizer.json"))
    return Tokenizer(tmp_path)


def test_encodes_and_decodes_without_adding_or_dropping(words: Tokenizer) -> None:
    assert words.encode("left right<end>") == [0, 1, 2]
    assert words.decode([1, 2]) == "right <end>"
    assert words.encode("") == []


def test_a_stop_text_is_exactly_one_token(words: Tokenizer) -> None:
    assert words.stop_ids(("right", "<end>")) == (1, 2)
    with pytest.raises(ValueError, match="'left right' has 2 tokens"):
        words.stop_ids(("left right",))
    with pytest.raises(ValueError, match="can't tokenize 'up'"):
        words.stop_ids(("up",))


def test_text_that_has_no_ids_is_a_value_error(words: Tokenizer) -> None:
    with pytest.raises(ValueError, match="can't tokenize 'up'"):
        words.encode("up")


def test_a_folder_without_a_tokenizer_is_a_usage_error(tmp_path: Path) -> None:
    for content in (None, "{}"):
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(UsageError, match=r"no usable tokenizer\.json"):
            Tokenizer(tmp_path)


def test_any_text_survives_the_shipped_tokenizer() -> None:
    folder = model_folder("tiny-llama")
    tokenizer = Tokenizer(folder)
    text = "Grün → 7\n\t<x>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert list(tokenizer.stop_ids(("a",))) == token_ids(folder, ["a"])
