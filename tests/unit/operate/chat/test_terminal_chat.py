"""A chat with a tiny model, on the torch engine."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.models.shards import write_shards
from headrace.services.models.torch_models import DTYPES
from headrace.services.models.weights import model_folder
from headrace.services.operate.chat.terminal_chat import Chat, Printer, model_of_folder, talk
from headrace.trainer.model_loading import load_model, trained_weights

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model in several files, without a chat template."""
    folder, source = tmp_path_factory.mktemp("model"), model_folder("tiny-llama")
    for file in source.glob("*.json"):
        shutil.copy(file, folder)
    one = folder / "one.safetensors"
    one.write_bytes(trained_weights(load_model(source, 0), DTYPES["float32"]))
    assert len(write_shards([one], folder, shard_bytes=100_000)) > 1
    one.unlink()
    return folder


def chat_of(folder: Path, scratch: Path, max_tokens: int = 8) -> Chat:
    return Chat(model_of_folder(folder, scratch), temperature=0, max_tokens=max_tokens)


def said(chat: Chat, *lines: str) -> tuple[list[str], list[str]]:
    written: list[str] = []
    remarks: list[str] = []
    talk(chat, iter(lines), written.append, remarks.append)
    return written, remarks


def test_a_model_without_a_template_completes_each_line(folder: Path, tmp_path: Path) -> None:
    written, remarks = said(chat_of(folder, tmp_path), "abc", "  ", "abc")
    answers = "".join(written).split("\n")[:-1]
    assert "".join(written[: len(written) // 2]) == "".join(written[len(written) // 2 :])
    assert answers
    assert remarks == ["(stopped at --max-tokens)"] * 2


def test_a_model_with_a_template_remembers_the_chat_until_its_context_is_full(
    folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    chat = chat_of(model, tmp_path, max_tokens=200)
    assert chat.remembers
    contexts: list[int] = []

    def lines() -> Iterator[str]:
        for _ in range(4):
            yield "hello"
            contexts.append(len(chat._context))

    remarks: list[str] = []
    talk(chat, lines(), lambda text: None, remarks.append)
    # The context is 512 tokens: two answers of 200 tokens fit, and the third is cut.
    assert contexts[0] < contexts[1]
    assert contexts[2] == 0
    assert contexts[3] == contexts[0]
    assert [remark for remark in remarks if "context is full" in remark]


def test_ctrl_c_ends_an_answer_and_the_chat_goes_on(folder: Path, tmp_path: Path) -> None:
    chat = chat_of(folder, tmp_path, max_tokens=500)
    written: list[str] = []

    async def interrupted() -> None:
        await chat.open()
        answer = asyncio.ensure_future(chat.answer("abc", written.append))
        while not written:
            await asyncio.sleep(0.001)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        assert 0 < len(chat._context) < 500
        chat._max_tokens = 3
        assert await chat.answer("abc", written.append) == "length"
        await chat.close()

    asyncio.run(interrupted())


def test_characters_of_several_tokens_are_written_whole() -> None:
    tokenizer = Tokenizer(model_folder("tiny-llama"))
    pieces: list[str] = []
    printer = Printer(tokenizer, [257], pieces.append)
    for token in [*tokenizer.encode("aé→b"), 257]:
        printer.add(token)
    printer.flush()
    assert pieces == ["a", "é", "→", "b"]
    printer.add(tokenizer.encode("é")[0])
    printer.flush()
    assert len(pieces) == 5  # A part of a character is written at the end at the latest.


def test_an_adapter_or_an_empty_model_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no safetensors"):
        model_of_folder(model_folder("tiny-llama"), tmp_path)
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    (model / "adapter_model.safetensors").touch()
    with pytest.raises(UsageError, match="has an adapter, not a whole model"):
        model_of_folder(model, tmp_path)
    assert json.loads((model / "config.json").read_text())
