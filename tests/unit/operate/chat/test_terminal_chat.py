"""A chat with a tiny model, on the torch engine."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.schemas.events import PolicyPublished
from headrace.schemas.recipe.policy import SamplingSettings
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.models.shards import write_shards
from headrace.services.models.torch_models import DTYPES
from headrace.services.models.weights import model_folder, weights_digest
from headrace.services.operate.chat.terminal_chat import (
    Chat,
    Printer,
    model_of_folder,
    model_of_version,
    talk,
)
from headrace.services.operate.run_versions import RunVersion, description_of
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


def chat_of(folder: Path, scratch: Path, max_tokens: int = 8, **sampling: Any) -> Chat:
    settings = SamplingSettings(temperature=0, max_tokens=max_tokens, **sampling)
    return Chat(replace(model_of_folder(folder, scratch), sampling=settings))


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
    assert remarks == ["(answers end at max_tokens = 8, and --max-tokens changes that)"]


def test_a_chat_samples_as_the_recipe_says(folder: Path, tmp_path: Path) -> None:
    for name in ("allowed", "stopped"):
        (tmp_path / name).mkdir()
    allowed = chat_of(folder, tmp_path / "allowed", max_tokens=5, allowed=("L", "R"))
    written, _ = said(allowed, "abc")
    answer = "".join(written).strip()
    assert len(answer) == 5
    assert set(answer) <= {"L", "R"}
    sampling: dict[str, Any] = {"allowed": ("L", "R"), "stop": (answer[1],)}
    written, _ = said(chat_of(folder, tmp_path / "stopped", max_tokens=5, **sampling), "abc")
    assert "".join(written).strip() == answer[: answer.index(answer[1])]


def test_a_version_brings_the_sampling_of_its_run(folder: Path, tmp_path: Path) -> None:
    blobs = LocalBlobStore(tmp_path / "blobs")
    one = Path(model_of_folder(folder, tmp_path).weights.path).read_bytes()
    published = PolicyPublished(
        policy="p", version=3, status="trained", digest=weights_digest(one),
        full=blobs.put(one), full_version=3, base="tiny-llama",
    )  # fmt: skip
    sampling = SamplingSettings(temperature=0, max_tokens=4, allowed=("L", "R"))
    version = RunVersion("ns", published, description_of("tiny-llama"), {}, sampling)
    (tmp_path / "scratch").mkdir()
    written, _ = said(Chat(model_of_version(version, blobs, tmp_path / "scratch")), "abc")
    assert len("".join(written).strip()) == 4
    assert set("".join(written)) <= {"L", "R", "\n"}


def test_a_model_with_a_template_remembers_the_chat_until_its_context_is_full(
    folder: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder, model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 160}))
    chat = chat_of(model, tmp_path, max_tokens=45)
    assert chat.remembers
    contexts: list[int] = []

    def lines() -> Iterator[str]:
        for _ in range(4):
            yield "hello"
            contexts.append(len(chat._context))

    remarks: list[str] = []
    talk(chat, lines(), lambda text: None, remarks.append)
    # Two answers of 45 tokens fit into the context of 160 tokens, and the third is cut.
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
        chat.sampling = chat.sampling.model_copy(update={"max_tokens": 3})
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
