"""Agents that know nothing of Headrace: the `openai` package, and a framework on top of it.

The task's sample says which of them plays. What they answer with the letter a is rewarded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        },
    },
}


def by_openai() -> str:
    """Two turns of a chat with tools, the second one streamed."""
    from openai import OpenAI

    client, model = OpenAI(), os.environ["OPENAI_MODEL"]
    assert [one.id for one in client.models.list()] == [model]
    messages: list[Any] = [{"role": "user", "content": "Say a."}]
    first = client.chat.completions.create(
        model=model, messages=messages, tools=[ADD], logprobs=True, temperature=0
    )
    message = first.choices[0].message
    logprobs = first.choices[0].logprobs
    assert first.usage is not None
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == first.usage.completion_tokens
    messages += [message.model_dump(), {"role": "user", "content": "Again."}]
    said = message.content or ""
    for chunk in client.chat.completions.create(
        model=model, messages=messages, tools=[ADD], stream=True
    ):
        said += chunk.choices[0].delta.content or ""
    return said


def by_framework() -> str:
    """The same by pydantic-ai, which has a tool of its own to offer."""
    from pydantic_ai import Agent

    agent: Any = Agent(f"openai-chat:{os.environ['OPENAI_MODEL']}", instructions="Say a.")

    @agent.tool_plain
    def add(a: float, b: float) -> float:
        """Adds two numbers."""
        return a + b

    first = agent.run_sync("Say a.")
    second = agent.run_sync("Again.", message_history=first.all_messages())
    return str(first.output) + str(second.output)


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
    said = by_framework() if task["sample"] % 2 else by_openai()
    mark = Path(sys.argv[1])
    try:
        mark.with_suffix(".first").touch(exist_ok=False)
    except FileExistsError:
        print(json.dumps({"reward": said.count("a") / len(said)}))
    else:
        linger(str(mark))


if __name__ == "__main__":
    main()
