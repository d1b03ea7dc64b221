"""Writes episodes as chat messages for supervised fine-tuning (SFT), one JSON object a line.

The messages are those that the agent sent and those that the policy answered. The chat template's
markup is not in them: the tool that trains renders them again. Does not guarantee that this gives
the same token ids, because a template may render earlier answers in another way.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.services.agent.gateway.chat_messages import Message, said_by_policy
from headrace.services.base.json_text import load_json
from headrace.services.base.tool_calls import FORMATS, Format, parse_tool_calls
from headrace.services.operate.trajectories.recorded_episodes import Prompts, RecordedEpisode
from headrace.services.operate.trajectories.row_files import RowFile


class PromptsGone(ValueError):
    """A prompt of a path is not in the log any more, or holds no messages."""


@dataclass(frozen=True, slots=True)
class _Said:
    """What an agent added to a conversation before an answer."""

    messages: list[Message]
    tools: list[Any]


def learned_paths(episode: RecordedEpisode) -> list[list[int]]:
    """Returns the indices of the turns of each path, up to the path's last trainable turn.

    A path without a trainable turn is left out, and one that is the beginning of another one.
    """
    found: list[list[int]] = []
    for path in episode.paths():
        while path and not episode.turns[path[-1]].turn.trainable:
            path.pop()
        if path and path not in found:
            found.append(path)
    return [
        path
        for path in found
        if not any(other != path and other[: len(path)] == path for other in found)
    ]


def conversation_of(
    episode: RecordedEpisode,
    prompts: Prompts,
    path: Sequence[int],
    form: Format,
    taught: Collection[int] = (),
) -> dict[str, Any]:
    """Returns the `messages` of a path, and its `tools` if it has any.

    An answer has `"weight": 0` if nothing is to be learned from it: its turn is not trainable, or
    is in `taught`, because an earlier conversation of the episode has it. The trainer, too, learns
    a turn that several paths share once.

    `form` is how the policy spells calls of tools. They are read only if the conversation has
    tools; their arguments are objects, as chat templates take them. Raises PromptsGone.
    """
    recorded = episode.recorded
    messages: list[Message] = []
    tools: list[Any] = []
    for index in path:
        turn = episode.turns[index].turn
        said = _read(prompts.get((recorded.task, recorded.sample, recorded.attempt, turn.call)))
        tools = tools if messages else said.tools
        content, calls = parse_tool_calls(turn.text, form if tools else "none")
        answer = said_by_policy(turn.call, content, calls)
        if index in taught or not turn.trainable:
            answer["weight"] = 0
        messages += [*said.messages, answer]
    return {"messages": messages} | ({"tools": tools} if tools else {})


def tool_format(options: Mapping[str, Any]) -> Format:
    """Returns how a policy spells calls of tools, by the options of its agent."""
    named = options.get("tool_calls")
    return next((form for form in FORMATS if form == named), "hermes")


def _read(prompt: tuple[str, str] | None) -> _Said:
    """Reads a prompt: its text, which is a message of the user, and its chat."""
    if prompt is None:
        raise PromptsGone
    text, chat = prompt
    if not chat:
        return _Said([{"role": "user", "content": text}] if text else [], [])
    value = load_json(chat)
    messages, tools = (
        (value.get("messages"), value.get("tools", [])) if isinstance(value, dict) else (None, None)
    )
    if not isinstance(messages, list) or not isinstance(tools, list):
        raise PromptsGone
    return _Said(messages, tools)


class SftFile(RowFile[dict[str, Any]]):
    """One JSON object for each conversation."""

    def _open(self, path: Path) -> None:
        self._output = open(path, "w", encoding="utf-8")  # noqa: SIM115

    def _write(self, rows: Sequence[dict[str, Any]]) -> None:
        for row in rows:
            self._output.write(f"{json.dumps(row, ensure_ascii=False)}\n")

    def _close(self) -> None:
        self._output.close()
