"""A chat with one version in the terminal, on the torch engine."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.schemas.recipe.policy import SamplingSettings
from headrace.services.inference.engine import EnginePrompt, EngineSetup, Finish, Weights
from headrace.services.inference.engines.torch_engine import TorchEngine
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.models.blobs import BlobStore
from headrace.services.models.shards import write_shards
from headrace.services.models.tokens import end_ids, token_ids
from headrace.services.models.torch_models import DTYPES
from headrace.services.models.weights import ADAPTER, model_folder
from headrace.services.operate.run_versions import RunVersion, VersionWriter, write_description

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for the bytes of a character that is not complete yet."""
FOLDER_SAMPLING = SamplingSettings(max_tokens=512)
"""How the tokens of a model are sampled that has no recipe."""


@dataclass(frozen=True, slots=True)
class ChatModel:
    """What the engine needs of a model."""

    folder: Path
    """Configuration and tokenizer."""
    weights: Weights
    dtype: str
    sampling: SamplingSettings = FOLDER_SAMPLING
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def model_of_version(version: RunVersion, blobs: BlobStore, scratch: Path) -> ChatModel:
    """Fetches and verifies a version. Its files are in `scratch`. Blocks."""
    folder = scratch / "model"
    folder.mkdir()
    write_description(version, blobs, folder)
    weights = VersionWriter(version, blobs, scratch / "weights").weights
    return ChatModel(
        folder, weights, version.published.dtype, version.sampling, version.chat_template_kwargs
    )


def model_of_folder(folder: Path, scratch: Path) -> ChatModel:
    """Opens a folder with a whole model. Raises UsageError if it is not one. Blocks."""
    folder = model_folder(str(folder.absolute()))
    files = sorted(folder.glob("*.safetensors"))
    if not files or ADAPTER in [file.name for file in files]:
        what = "an adapter, not a whole model" if files else "no safetensors"
        raise UsageError(f"{folder} has {what}: give a folder that `headrace export --merge` wrote")
    if len(files) > 1:  # The engine reads one file.
        size = sum(file.stat().st_size for file in files)
        files = write_shards(files, scratch, shard_bytes=size)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    dtype = config.get("dtype", config.get("torch_dtype"))
    return ChatModel(folder, Weights("chat", 0, files[0]), dtype if dtype in DTYPES else "float32")


class Chat:
    """One chat. With a chat template it remembers earlier messages; else it completes texts."""

    def __init__(self, model: ChatModel) -> None:
        """Reads the configuration and the tokenizer. Raises UsageError if they can't be used."""
        self.sampling = model.sampling
        self._tokenizer = Tokenizer(model.folder, model.chat_template_kwargs)
        self._allowed = token_ids(model.folder, model.sampling.allowed)
        try:
            stops = self._tokenizer.stop_ids(model.sampling.stop)
        except ValueError as error:
            raise UsageError(f"sampling.stop: {error}") from error
        self._stop_ids = [*end_ids(model.folder), *stops]
        self._weights = model.weights
        self._context: list[int] = []
        threads = len(os.sched_getaffinity(0))
        self._engine = TorchEngine(
            EngineSetup(model.folder, slots=1, threads=threads, dtype=model.dtype)
        )

    @property
    def remembers(self) -> bool:
        """Whether the model has a chat template."""
        return self._tokenizer.has_template

    async def open(self) -> None:
        """Loads the weights. Raises BlobError if they do not fit the configuration."""
        await self._engine.load(self._weights)

    async def close(self) -> None:
        """Ends the engine."""
        await self._engine.close(0)

    async def answer(self, text: str, write: Callable[[str], None]) -> Finish:
        """Generates an answer and gives `write` its text piece by piece.

        If it is cancelled, the chat goes on with what was generated. If the context is full, it
        returns `overflow`, and the next answer starts a new chat. Raises ValueError if the text has
        no tokens or the chat template can't render it.
        """
        self._context += self._ids(text)
        loop, printer = asyncio.get_running_loop(), Printer(self._tokenizer, self._stop_ids, write)

        def on_token(token: int) -> None:
            loop.call_soon_threadsafe(printer.add, token)

        prompt = EnginePrompt(
            self._weights.policy,
            list(self._context),
            self.sampling.max_tokens,
            temperature=self.sampling.temperature,
            stop_ids=self._stop_ids,
            allowed=self._allowed,
            json_schema=json.dumps(schema) if (schema := self.sampling.json_schema) else "",
        )
        try:
            output = await self._engine.generate(prompt, on_token)
        finally:
            printer.flush()
            self._context += printer.tokens
        if output.finish == "overflow":
            self._context.clear()
        return output.finish

    def _ids(self, text: str) -> list[int]:
        if not self.remembers:
            self._context.clear()
            return self._tokenizer.encode(text)
        messages = [{"role": "user", "content": text}]
        return self._tokenizer.chat(json.dumps({"messages": messages}), self._context)


class Printer:
    """Turns tokens into text as they come. It holds back characters that are not complete."""

    def __init__(
        self, tokenizer: Tokenizer, stop_ids: list[int], write: Callable[[str], None]
    ) -> None:
        self.tokens: list[int] = []
        self._tokenizer = tokenizer
        self._stop_ids = stop_ids
        self._write = write
        self._written = 0

    def add(self, token: int) -> None:
        """Adds a token and writes the text that it completes."""
        self.tokens.append(token)
        text = self._text()
        if not text.endswith(UNFINISHED):
            self._emit(text)

    def flush(self) -> None:
        """Writes what was held back."""
        self._emit(self._text())

    def _text(self) -> str:
        return self._tokenizer.decode([one for one in self.tokens if one not in self._stop_ids])

    def _emit(self, text: str) -> None:
        if len(text) > self._written:
            self._write(text[self._written :])
            self._written = len(text)


def talk(
    chat: Chat,
    lines: Iterator[str],
    write: Callable[[str], None],
    say: Callable[[str], None],
) -> None:
    """Answers lines until they end. Ctrl-C ends an answer."""
    most, remarked = chat.sampling.max_tokens, False
    with asyncio.Runner() as runner, _opened(chat, runner):
        for line in lines:
            if not line.strip():
                continue
            finish: Finish | None = None
            try:
                finish = runner.run(chat.answer(line, write))
            except KeyboardInterrupt:
                finish = "interrupted"
            except ValueError as error:
                say(str(error))
                continue
            write("\n")
            if finish == "length" and not remarked:
                say(f"(answers end at max_tokens = {most}, and --max-tokens changes that)")
                remarked = True
            elif finish == "overflow":
                say("(the context is full: the next message starts a new chat)")


@contextmanager
def _opened(chat: Chat, runner: asyncio.Runner) -> Iterator[None]:
    try:
        runner.run(chat.open())
        yield
    finally:
        runner.run(chat.close())
