"""Turns text and messages into token ids, with the tokenizer and chat template of a model's folder.

Texts and messages are written by tasks, tools and users, so they never become control tokens; only
the markup of the chat template does (see `control_tokens.py`).

Earlier messages are never rendered again, so they are never retokenized. A template may rewrite
history (drop earlier reasoning, shorten old turns), but the ids that the policy has seen and drawn
must not change. So new messages are rendered after a marker that represents everything before them,
and the text after the marker is appended.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from headrace.errors import UsageError
from headrace.services.inference.control_tokens import ControlTokens
from headrace.services.models.tokens import encode, load_library, single_ids

SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")
"""The tokens of `tokenizer_config.json` that templates use by name."""


class Tokenizer:
    """The tokenizer of a model. It neither adds nor drops special tokens."""

    def __init__(self, folder: Path, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
        """The chat template gets the values of `chat_template_kwargs` by name.

        Raises UsageError if the folder has no usable `tokenizer.json`.
        """
        self._library = load_library(folder)
        configuration = _configuration(folder)
        source = _source(folder, configuration)
        self._control = ControlTokens(self._library, source or "")
        given = chat_template_kwargs or {}
        template = ChatTemplate(folder, configuration, source, self._control, given)
        self.has_template = template.exists
        """Whether the model has a chat template."""
        self.chat = template.ids
        """Returns the ids that new messages add to a context, by the model's chat template."""
        self.stop_ids = lru_cache(maxsize=64)(partial(single_ids, self._library))
        """Returns the ids of a tuple of stop texts, as `single_ids` does."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, in which control tokens are control tokens.

        Adds none. Raises ValueError if the text has no ids.
        """
        return encode(self._library, text)

    def encode_content(self, text: str) -> list[int]:
        """Returns the ids of a text that may be of anybody: it gives no control tokens.

        Raises ValueError if it has no ids.
        """
        return self._control.encode(self._control.hide(text))

    def encode_demonstration(self, text: str, stops: Sequence[str]) -> list[int]:
        """Returns the ids of a text that the policy should have drawn.

        It gives no special tokens, except for one of `stops` at its end. Raises ValueError if it
        has no ids.
        """
        for stop in stops:
            if stop in self._control.special and text.endswith(stop):
                answer = text.removesuffix(stop)
                return [*self.encode_demonstration(answer, ()), *self.stop_ids((stop,))]
        return self._control.encode(self._control.hide(text, said=True))

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids, with special tokens. Ids outside the vocabulary are left out."""
        text: str = self._library.decode(list(ids), skip_special_tokens=False)
        return text


class ChatTemplate:
    """A Jinja chat template of a Hugging Face model. It runs in a sandbox."""

    def __init__(
        self,
        folder: Path,
        configuration: Mapping[str, Any],
        source: str | None,
        control: ControlTokens,
        given: Mapping[str, Any],
    ) -> None:
        """`source` is the template's text, and `given` are further values that it gets by name.

        Raises UsageError if it has a syntax error.
        """
        self._control = control
        self._given = given
        self._folder = folder
        self._special = {name: _spelling(configuration.get(name)) for name in SPECIAL}
        self._template = None if source is None else _compile(folder, source)
        self.exists = self._template is not None

    def ids(self, chat: str, context: Sequence[int]) -> list[int]:
        """Returns the ids that new messages add to a context, including the generation prompt.

        `chat` is JSON: `messages`, and optionally `tools`, which are used only if the context is
        empty. Raises ValueError if the model has no template or if it can't render the messages.
        """
        try:
            messages, tools = _parse(chat)
            messages = [self._hide(one, one["role"] == "assistant") for one in messages]
            tools = self._hide(tools, said=False)
        except RecursionError as error:
            raise ValueError("the messages or tools are nested too deeply") from error
        if not context:
            return self._control.encode(self._render(messages, tools))
        marker = f"said-{hashlib.sha256(chat.encode()).hexdigest()[:24]}"
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": marker}]
        _, *after = self._render([*before, *messages], ()).split(marker)
        if len(after) != 1:
            raise ValueError(
                f"the chat template of {self._folder} renders an assistant's message {len(after)} "
                "times, so messages can't be appended to a context: append text instead"
            )
        ids = self._control.encode(after[0])
        # The policy may have drawn the token with which the template ends its turn.
        return ids[1:] if ids and ids[0] == context[-1] else ids

    def _hide(self, part: Any, said: bool) -> Any:
        """Hides the control tokens in all texts of a message or a tool. `said`: by the policy."""
        if isinstance(part, str):
            return self._control.hide(part, said=said)
        if isinstance(part, list):
            return [self._hide(one, said) for one in part]
        if isinstance(part, dict):
            return {self._hide(name, said): self._hide(one, said) for name, one in part.items()}
        return part

    def _render(self, messages: Sequence[Any], tools: Sequence[Any]) -> str:
        if self._template is None:
            raise ValueError(
                f"model {self._folder} has no chat template. Add chat_template.jinja, or "
                "chat_template in tokenizer_config.json, to its folder, or send text instead"
            )
        try:
            text: str = self._template.render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=True,
                **self._special,
                **self._given,
            )
        except Exception as error:
            # A template is code and may raise anything.
            reason = self._control.shown(str(error))
            raise ValueError(f"the chat template can't render these messages: {reason}") from None
        return text


def _parse(chat: str) -> tuple[list[Any], list[Any]]:
    tree = json.loads(chat)
    if not isinstance(tree, dict) or set(tree) - {"messages", "tools"}:
        raise ValueError("a chat needs `messages`, may have `tools`, and nothing else")
    messages, tools = tree.get("messages"), tree.get("tools", [])
    if not isinstance(messages, list) or not messages or not isinstance(tools, list):
        raise ValueError("`messages` must be a list that is not empty, and `tools` must be a list")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError("each message must be an object with a role")
    return messages, tools


def _configuration(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    try:
        tree = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"can't read {path}: {error}") from error
    return tree if isinstance(tree, dict) else {}


def _source(folder: Path, configuration: dict[str, Any]) -> str | None:
    """The template's text. If the configuration names several, the one named `default`."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    match configuration.get("chat_template"):
        case str() as text:
            return text
        case list() as named:
            found = [one["template"] for one in named if one.get("name") == "default"]
            return str(found[0]) if found else None
    return None


def _spelling(token: Any) -> str:
    """The text of a token. The configuration holds the text or an object that contains it."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _compile(folder: Path, source: str) -> Any:
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    # Give templates what transformers gives them, so that they render the same text.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise UsageError(f"the chat template of {folder} has a syntax error: {error}") from error


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str) -> None:
    raise ValueError(message)
