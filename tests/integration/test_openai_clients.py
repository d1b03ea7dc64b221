"""The `openai` package and a framework on top of it call tools through the gateway, as they are."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from openai import AsyncOpenAI, BadRequestError
from openai.types.chat import ChatCompletionToolParam
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from headrace.schemas.events import Event, GenerationRequested
from headrace.services.agent.gateway.chat_session import ChatSession
from headrace.services.agent.gateway.server import GatewayServer
from tests.unit.agent.gateway.test_chat_session import TOOL, converse, parents
from tests.unit.agent.gateway.test_program import Chatting

CALLS = (
    '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 4}}</tool_call>'
)


class Adding(Chatting):
    """Calls a tool twice, then says what it was told."""

    def answer(self, event: Event) -> Any:
        found = super().answer(event)
        if found is None or not isinstance(event, GenerationRequested):
            return found
        told = [m["content"] for m in json.loads(event.chat)["messages"] if m["role"] == "tool"]
        return found.model_copy(update={"text": " and ".join(told) if told else CALLS})


async def serve(session: ChatSession, client: Any) -> None:
    """Lets a client talk to a session, by an AsyncOpenAI."""
    server = GatewayServer()
    url = await server.start("127.0.0.1", 0)
    with server.admitting(session) as keys:
        async with AsyncOpenAI(base_url=url, api_key=keys.chat) as openai:
            await client(openai)
    await server.aclose()


def test_a_framework_runs_its_loop_of_tools_in_one_context() -> None:
    world = Adding()

    async def play(openai: AsyncOpenAI) -> None:
        model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=openai))
        agent = Agent(model, instructions="Add.")

        @agent.tool_plain
        async def add(a: float, b: float) -> float:
            """Adds two numbers."""
            return a + b

        first = await agent.run("What is 1 + 2, and 3 + 4?")
        assert first.output == "3.0 and 7.0"
        async with agent.run_stream("Again.", message_history=first.all_messages()) as second:
            assert await second.get_output() == "3.0 and 7.0"

    converse(lambda session: serve(session, play), world)
    assert parents(world) == [-1, 0, 1, 2]
    first = json.loads(world.of(GenerationRequested)[0].chat)
    assert [tool["function"]["name"] for tool in first["tools"]] == ["add"]
    assert all("tools" not in json.loads(one.chat) for one in world.of(GenerationRequested)[1:])


def test_the_openai_package_streams_tool_calls_and_is_told_of_limits() -> None:
    world = Adding()

    async def play(openai: AsyncOpenAI) -> None:
        stream = await openai.chat.completions.create(
            model="policy",
            messages=[{"role": "user", "content": "a"}],
            tools=[cast(ChatCompletionToolParam, TOOL)],
            stream=True,
        )
        calls = [call async for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
        assert [call.index for call in calls] == [0, 1]
        functions = [call.function for call in calls if call.function is not None]
        assert [json.loads(function.arguments or "") for function in functions] == [
            {"a": 1, "b": 2}, {"a": 3, "b": 4},
        ]  # fmt: skip
        assert len({call.id for call in calls}) == 2
        with pytest.raises(BadRequestError) as caught:
            await openai.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "b"}]
            )
        assert caught.value.code == "turn_limit"

    outcome = converse(lambda session: serve(session, play), world, max_turns=1)
    assert outcome.ending == "turn_limit"
