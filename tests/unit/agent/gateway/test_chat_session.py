"""Clients' calls: which context each goes on with, and what a client is told over HTTP."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from headrace.schemas import packed
from headrace.schemas.events import EpisodeEnded, Event, GenerationRequested
from headrace.services.agent.episode import Episode
from headrace.services.agent.gateway.chat_requests import read_request
from headrace.services.agent.gateway.chat_session import IN_FLIGHT, ChatSession, Choice, Dialect
from headrace.services.agent.gateway.episode_queue import Keys
from headrace.services.agent.gateway.refusals import ApiError
from headrace.services.agent.gateway.server import BODY_BYTES, GatewayServer
from headrace.services.base.tool_calls import BEGIN, END, Format, forced_call
from headrace.services.base.types import MOST_NAMES, NAME_CHARACTERS
from tests.unit.agent.gateway.test_program import BOUND_S, Chatting
from tests.unit.agent.test_episode_run import end, task

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def ask(session: ChatSession, *messages: dict[str, Any], **fields: Any) -> list[Choice]:
    tree = {"model": "policy", "messages": messages, **fields}
    return await session.complete(read_request(json.dumps(tree).encode()))


def converse(
    talk: Callable[[ChatSession], Awaitable[None]],
    world: Chatting | None = None,
    spelling: Format = "hermes",
    **changes: Any,
) -> EpisodeEnded:
    """An episode whose agent is a session that `talk` speaks to."""

    async def agent(episode: Episode) -> None:
        session = ChatSession(episode, Dialect(spelling, models={"gpt-4o": "policy"}))
        await talk(session)
        await session.drain()
        if session.failed.done():
            session.failed.result()

    submitted = task(environment=None, **changes)
    outcome = end(world or Chatting(), submitted, agent, bound_s=BOUND_S)
    if outcome.failure is not None:
        raise AssertionError(outcome.failure)
    return outcome


def parents(world: Chatting) -> list[int]:
    return [turn.parent for turn in world.trajectory().turns]


def test_each_request_goes_on_with_the_longest_conversation_that_it_extends() -> None:
    world = Chatting()

    async def talk(session: ChatSession) -> None:
        (first,) = await ask(session, user("a"))
        (second,) = await ask(session, user("a"), first.message(), user("b"))
        begun = (user("a"), first.message(), user("b"), second.message())
        await ask(session, *begun, user("c"), user("d"))
        await ask(session, user("a"), first.message(), user("other"))  # goes on with the first
        await ask(session, user("a"), {**first.message(), "content": "shortened"}, user("b"))
        await ask(session, *begun, user("c"), tools=[TOOL])

    converse(talk, world)
    assert parents(world) == [-1, 0, 1, 0, -1, -1]
    requests = world.of(GenerationRequested)
    said = [[one["content"] for one in json.loads(one.chat)["messages"]] for one in requests]
    assert said[:4] == [["a"], ["b"], ["c", "d"], ["other"]]
    assert said[4] == ["a", "shortened", "b"]
    assert "tools" in json.loads(requests[5].chat)
    assert said[5] == ["a", "answer 1", "b", "answer 2", "c"]


def test_an_answer_of_tool_calls_is_found_again() -> None:
    world = Calling()

    async def talk(session: ChatSession) -> None:
        (first,) = await ask(session, user("a"), tools=[TOOL])
        assert (first.content, first.finish) == ("", "tool_calls")
        function = {"name": "add", "arguments": '{ "a": 1}'}
        call = {
            "id": first.message()["tool_calls"][0]["id"],
            "type": "function",
            "function": function,
        }
        again = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
        told = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        await ask(session, user("a"), again, told, tools=[TOOL])
        (third,) = await ask(session, user("b"))  # without tools nothing is read out of it
        assert third.content == CALL

    converse(talk, world)
    assert parents(world) == [-1, 0, -1]


class Calling(Chatting):
    """Answers each prompt with a tool call."""

    def __init__(self, call: str = CALL) -> None:
        super().__init__()
        self.call = call

    def answer(self, event: Event) -> Any:
        found = super().answer(event)
        return found.model_copy(update={"text": self.call}) if found is not None else None


@pytest.mark.parametrize("spelling", ["hermes", "json"])
def test_a_forced_call_is_drawn_by_a_schema_as_the_policy_spells_it(spelling: Format) -> None:
    call = '{"name": "add", "arguments": {"a": 1}}'
    world = Calling(f"{BEGIN}\n{call}\n{END}" if spelling == "hermes" else call)

    async def talk(session: ChatSession) -> None:
        fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
        choices = await ask(session, user("a"), n=2, **fields)
        assert [one.finish for one in choices] == ["tool_calls"] * 2
        assert choices[0].tool_calls[0].arguments == {"a": 1}
        (call,) = choices[1].message()["tool_calls"]
        told = {"role": "tool", "tool_call_id": call["id"], "content": "3"}
        await ask(session, user("a"), choices[1].message(), told, tools=[TOOL])

    converse(talk, world, spelling)
    forced, again, free = world.of(GenerationRequested)
    schema, around = forced_call(spelling, {"add": {"type": "object", "properties": {}}})
    for request in (forced, again):
        assert json.loads(request.sampling.json_schema) == schema
        assert (request.sampling.json_before, request.sampling.json_after) == around
    assert free.sampling == forced.sampling.model_copy(
        update={"json_schema": "", "json_before": "", "json_after": "",
                "max_tokens": free.sampling.max_tokens}
    )  # fmt: skip
    assert parents(world) == [-1, -1, 1]


def test_where_calls_have_no_spelling_none_is_forced() -> None:
    async def talk(session: ChatSession) -> None:
        with pytest.raises(ApiError, match="tool_calls is none") as caught:
            await ask(session, user("a"), tools=[TOOL], tool_choice="required")
        assert caught.value.status == 400
        await ask(session, user("a"))

    assert converse(talk, spelling="none").ending == "finished"


def test_a_worker_that_knows_no_forced_calls_is_found_out() -> None:
    async def talk(session: ChatSession) -> None:
        with pytest.raises(ApiError, match="too old"):
            await ask(session, user("a"), tools=[TOOL], tool_choice="required")

    with pytest.raises(AssertionError, match="too old"):
        converse(talk, attempts=1)


def test_choices_are_branches_and_any_of_them_can_be_gone_on_with() -> None:
    world = Chatting()

    async def talk(session: ChatSession) -> None:
        choices = await ask(session, user("a"), n=3)
        await ask(session, user("a"), choices[1].message(), user("b"))

    converse(talk, world)
    assert parents(world) == [-1, -1, -1, 1]


def test_many_at_once_keep_the_task_s_tokens() -> None:
    # Each answer is 2 tokens; 6 may be drawn in all, 4 by one generation.
    world = Chatting()

    async def talk(session: ChatSession) -> None:
        asks = [ask(session, user(str(i)), max_tokens=4) for i in range(3)]
        await asyncio.gather(*asks)
        with pytest.raises(ApiError) as caught:
            await ask(session, user("one more"))
        assert caught.value.code == "token_limit"

    assert converse(talk, world, max_tokens=6, max_turns=100).ending == "token_limit"
    turns = world.trajectory().turns
    assert sum(packed.count(turn.tokens) for turn in turns) == 6
    assert [one.sampling.max_tokens for one in world.of(GenerationRequested)] == [4, 4, 2]


def test_what_cannot_be_asked_is_refused_and_the_episode_goes_on() -> None:
    async def talk(session: ChatSession) -> None:
        (first,) = await ask(session, user("a"), model="gpt-4o", temperature=0)
        for status, fields in (
            (404, {"model": "gpt-5"}),
            (400, {"stop": ["###"]}),
        ):
            with pytest.raises(ApiError) as caught:
                await ask(session, user("b"), **fields)
            assert caught.value.status == status
        with pytest.raises(ApiError, match="something new"):
            await ask(session, user("a"), first.message(), model="gpt-4o")

    assert converse(talk).ending == "finished"


def test_more_than_a_session_takes_is_turned_away_for_now() -> None:
    world = Chatting()
    world.silent_after = 0

    async def talk(session: ChatSession) -> None:
        asks = [asyncio.create_task(ask(session, user(str(i)))) for i in range(IN_FLIGHT)]
        async with asyncio.timeout(BOUND_S):
            while len(world.of(GenerationRequested)) < IN_FLIGHT:
                await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await ask(session, user("one more"))
        assert caught.value.status == 429
        assert caught.value.headers["Retry-After"]
        session.close()
        for done in await asyncio.gather(*asks, return_exceptions=True):
            assert isinstance(done, ApiError)
            assert (done.status, done.headers) == (503, {"x-should-retry": "false"})

    assert converse(talk, world, max_turns=1000, max_tokens=1000).ending == "finished"


def over_http(talk: Callable[[aiohttp.ClientSession, str, Keys], Awaitable[None]]) -> Chatting:
    """An episode that a client reaches at a base URL. Its requests have the chat key."""
    world = Chatting()

    async def serve(session: ChatSession) -> None:
        server = GatewayServer()
        url = await server.start("127.0.0.1", 0)
        with server.admitting(session) as keys:
            headers = {"Authorization": f"Bearer {keys.chat}"}
            async with aiohttp.ClientSession(headers=headers) as client:
                await talk(client, url, keys)
        await server.aclose()

    converse(serve, world)
    return world


def test_http_answers_in_openai_s_form() -> None:
    async def talk(client: aiohttp.ClientSession, url: str, keys: Keys) -> None:
        request = {"model": "policy", "messages": [user("a")], "logprobs": True, "top_p": 0.5}
        async with client.post(f"{url}/chat/completions", json=request) as response:
            assert response.status == 200
            assert response.headers["x-headrace-overridden"] == "top_p"
            tree = await response.json()
        (choice,) = tree["choices"]
        assert choice["message"] == {
            "role": "assistant", "content": "answer 1", "refusal": None,
        }  # fmt: skip
        assert choice["finish_reason"] == "stop"
        assert [one["token"] for one in choice["logprobs"]["content"]] == [
            "token_id:65", "token_id:66",
        ]  # fmt: skip
        assert [one["logprob"] for one in choice["logprobs"]["content"]] == [-0.5, -0.25]
        assert tree["usage"]["completion_tokens"] == 2
        async with client.get(f"{url}/models") as response:
            names = [one["id"] for one in (await response.json())["data"]]
            assert names == ["policy", "gpt-4o"]
        for key, status in ((keys.report, 200), (keys.chat, 403)):
            said, who = {"reward": status / 400}, {"Authorization": f"Bearer {key}"}
            async with client.post(f"{url}/episode/reward", json=said, headers=who) as response:
                assert response.status == status

    assert over_http(talk).of(EpisodeEnded)[0].reward == 0.5


def test_http_streams_and_says_when_it_is_done() -> None:
    async def talk(client: aiohttp.ClientSession, url: str, keys: Keys) -> None:
        request = {"model": "policy", "messages": [user("a")], "stream": True, "n": 2}
        request["stream_options"] = {"include_usage": True}
        async with client.post(f"{url}/chat/completions", json=request) as response:
            assert response.content_type == "text/event-stream"
            events = (await response.text()).split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        chunks = [json.loads(one.removeprefix("data: ")) for one in events[:-2]]
        said = [one["choices"][0] for one in chunks[:-1]]
        assert [one["index"] for one in said] == [0, 0, 1, 1]
        assert said[0]["delta"] == {"role": "assistant", "content": "answer 1"}
        assert [one["finish_reason"] for one in said] == [None, "stop", None, "stop"]
        assert chunks[-1]["usage"]["completion_tokens"] == 4

    over_http(talk)


def test_http_refuses_in_openai_s_form() -> None:
    async def talk(client: aiohttp.ClientSession, url: str, keys: Keys) -> None:
        large = b" " * (BODY_BYTES + 1)
        report = {"Authorization": f"Bearer {keys.report}"}
        many = dict.fromkeys(map(str, range(MOST_NAMES + 1)), 1.0)
        long = {"x" * (NAME_CHARACTERS + 1): 1.0}
        for status, method, path, options in (
            (400, "POST", "/chat/completions", {"data": b"{"}),
            (413, "POST", "/chat/completions", {"data": io.BytesIO(large)}),
            (404, "GET", "/models/none", {}),
            (404, "GET", "/embeddings", {}),
            (405, "GET", "/chat/completions", {}),
            (400, "POST", "/episode/reward", {"json": {"reward": "much"}, "headers": report}),
            (400, "POST", "/episode/reward", {"json": {"rewards": many}, "headers": report}),
            (400, "POST", "/episode/reward", {"json": {"metrics": long}, "headers": report}),
            (401, "GET", "/models", {"headers": {"Authorization": "Bearer x"}}),
            (401, "GET", "/nowhere", {"headers": {"Authorization": ""}}),
        ):
            async with client.request(method, url + path, **options) as response:
                assert response.status == status, path
                assert set((await response.json())["error"]) == {"message", "type", "param", "code"}

    over_http(talk)


def test_an_answer_that_nobody_heard_is_not_learned_from() -> None:
    world = Chatting()
    world.silent_after = 0

    async def serve(session: ChatSession) -> None:
        server = GatewayServer()
        url = await server.start("127.0.0.1", 0)
        with server.admitting(session) as keys:
            headers = {"Authorization": f"Bearer {keys.chat}"}
            request = {"model": "policy", "messages": [user("a")]}
            async with aiohttp.ClientSession(headers=headers) as client:
                asking = asyncio.create_task(client.post(f"{url}/chat/completions", json=request))
                async with asyncio.timeout(BOUND_S):
                    while not world.of(GenerationRequested):
                        await asyncio.sleep(0)
                asking.cancel()
                await asyncio.wait({asking})
            async with (  # once this is answered, the other's end was heard of, too
                aiohttp.ClientSession(headers=headers) as other,
                other.get(f"{url}/models") as response,
            ):
                assert response.status == 200
            (request_event,) = world.of(GenerationRequested)
            assert world.run is not None
            answer = world.answer(request_event)
            assert answer is not None
            world.run.on_answer(answer)
            await session.drain()
            await server.aclose()

    converse(serve, world)
    (turn,) = world.trajectory().turns
    assert not turn.trainable
    assert world.of(EpisodeEnded)[0].policies[0].tokens == 0
