"""Agents that know nothing of Headrace: the `openai` package, and a framework on top of it.

The task's sample says which of them plays. Both make the policy call a tool, and are rewarded
where it picks the letter a.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

Letter = Literal["a", "b", "c", "d"]
PICK: Any = {
    "type": "function",
    "function": {
        "name": "pick",
        "description": "Picks a letter.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"letter": {"enum": [*get_args(Letter)]}},
            "required": ["letter"],
            "additionalProperties": False,
        },
    },
}


@dataclass
class Pick:
    """A letter."""

    letter: Letter


def by_openai() -> list[str]:
    """Two turns of calls that it asks for, by name and streamed."""
    from openai import OpenAI

    client, model = OpenAI(), os.environ["OPENAI_MODEL"]
    assert [one.id for one in client.models.list()] == [model]
    messages: list[Any] = [{"role": "user", "content": "Pick a."}]
    first = client.chat.completions.create(
        model=model,
        messages=messages,
        tools=[PICK],
        tool_choice={"type": "function", "function": {"name": "pick"}},
        logprobs=True,
        temperature=0,
    )
    message = first.choices[0].message
    logprobs = first.choices[0].logprobs
    assert first.usage is not None
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == first.usage.completion_tokens
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    told = {"role": "tool", "tool_call_id": call.id, "content": "picked"}
    messages += [message.model_dump(), told]
    streamed = ""
    for chunk in client.chat.completions.create(
        model=model, messages=messages, tools=[PICK], tool_choice="required", stream=True
    ):
        for part in chunk.choices[0].delta.tool_calls or ():
            assert part.function is not None
            streamed += part.function.arguments or ""
    assert call.type == "function"
    return [json.loads(one)["letter"] for one in (call.function.arguments, streamed)]


def by_framework() -> list[str]:
    """The same by pydantic-ai, whose output is of a type."""
    from pydantic_ai import Agent

    model = f"openai-chat:{os.environ['OPENAI_MODEL']}"
    agent: Any = Agent(model, instructions="Pick a.", output_type=Pick, retries=0)
    first = agent.run_sync("Pick a.")
    second = agent.run_sync("Again.", message_history=first.all_messages())
    return [first.output.letter, second.output.letter]


def linger(mark: str) -> None:
    """With children of its own, until somebody ends them all."""
    command = [sys.executable, "-c", "import time; time.sleep(600)", mark]
    subprocess.Popen(command, start_new_session=True)
    subprocess.Popen(command)
    Path(mark).touch()
    time.sleep(600)


def main() -> None:
    """Plays one episode."""
    task = json.load(sys.stdin)
    picked = by_framework() if task["sample"] % 2 else by_openai()
    mark = Path(sys.argv[1])
    try:
        mark.with_suffix(".first").touch(exist_ok=False)
    except FileExistsError:
        print(json.dumps({"reward": picked.count("a") / len(picked)}))
    else:
        linger(str(mark))


if __name__ == "__main__":
    main()
