"""An OpenEnv server as an environment: what a policy writes becomes an action of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, JsonValue, ValidationError

from headrace.errors import EnvironmentFailed, UsageError
from headrace.services.base.tool_calls import BadCall, ToolCall, read_calls
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.http_environment import authorization
from headrace.services.env.openenv.openenv_messages import (
    BadAction,
    Refused,
    Step,
    read_object,
    render,
)
from headrace.services.env.openenv.openenv_session import OpenEnvSession

SEEDS = 2**31
"""Servers hand a seed on to generators of 32 bits."""


class _Tool(BaseModel):
    name: str
    description: str = ""
    input_schema: dict[str, JsonValue] = {}


class _Tools(BaseModel):
    tools: list[_Tool]


class OpenEnvEnvironment:
    """One episode's session with an OpenEnv server."""

    recipe_only = frozenset(
        {
            *("url", "action", "fields", "tools", "render"),
            *("timeout_s", "answer_kb", "token_variable", "replayable"),
        }
    )

    def __init__(
        self,
        url: str,
        action: str | None = None,
        fields: Mapping[str, Any] | None = None,
        tools: bool = False,
        render: str | Sequence[str] = (),
        reset: Mapping[str, Any] | None = None,
        timeout_s: float = 60.0,
        answer_kb: int = 1024,
        token_variable: str | None = None,
        replayable: bool = False,
    ) -> None:
        """`action` names the field of an action that is the policy's text.

        Absent: the policy writes the action as JSON. `fields` are the same in every action. With
        `tools` the policy calls the server's tools instead. `render` names the field of an
        observation that is its text, or several; absent: the whole of it as JSON. `reset` are
        arguments of every reset, under the task's payload. Each call has `timeout_s`, and as long
        a full server is waited for; each message has at most `answer_kb` KiB. `token_variable` is
        as for `http`. `replayable` says that the same actions give the same answers.
        """
        scheme, _, rest = url.partition("://")
        if scheme not in ("http", "https", "ws", "wss") or not rest:
            raise UsageError(f"url {url!r}: give the server's address, as http://127.0.0.1:8000")
        if tools and (action is not None or fields):
            raise UsageError("tools = true: tool calls are the actions, without action and fields")
        self.replayable = replayable
        self._action = action
        self._fields = dict(fields or {})
        self._tools = tools
        self._render = (render,) if isinstance(render, str) else tuple(render)
        self._reset = dict(reset or {})
        headers = authorization(token_variable)
        self._session = OpenEnvSession(
            f"{url.rstrip('/')}/ws", headers, timeout_s, answer_kb * 1024
        )
        self._name = ""
        self._described: dict[str, JsonValue] = {}
        """The server's tools by name, as chat templates take them."""

    def set_name(self, name: str) -> None:
        """As Named has it: the server is told it as `episode_id`."""
        self._name = name

    async def reset(self, task: TaskView) -> Observation:
        """Begins an episode, in the session that there is or a new one."""
        about = {"seed": task.seed % SEEDS, "episode_id": self._name}
        told = {**self._reset, **task.payload, **about}
        if self._tools:  # asked for before the reset, after which it might count as a step
            listed = await self._own("step", {"type": "list_tools"})
            self._described = _described(listed)
        first = await self._own("reset", told)
        observation = first.told(render(first.observation, self._render))
        if not self._tools:
            return observation
        text = observation.text or str(task.payload.get("prompt", ""))
        data = {**observation.data, "tools": list(self._described.values())}
        return replace(observation, text=text, data=data)

    async def step(self, action: str) -> Observation:
        """Acts. What is wrong with an action that is none is told, and the episode goes on."""
        try:
            if self._tools:
                return await self._call(read_calls(action, self._described))
            fields = {self._action: action} if self._action else read_object(action)
            done = await self._session.ask("step", {**self._fields, **fields})
        except (BadCall, BadAction) as error:
            return Observation(f"error: {error}")
        except Refused as refused:
            self._check(refused)
            return Observation(f"error: {refused}")
        return done.told(render(done.observation, self._render))

    async def aclose(self) -> None:
        """Has the server end the session; bounded."""
        await self._session.close()

    async def _own(self, kind: str, data: Mapping[str, Any]) -> Step:
        """The answer to a message that is not the policy's, in a new session if there is none."""
        try:
            if self._session.open:
                return await self._session.ask(kind, data)
            return await self._session.begin(kind, data)
        except Refused as refused:
            said = f"the server takes no {kind} of {json.dumps(data)[:200]}: {refused}"
            raise UsageError(f"{said}. Look at the environment's options") from refused

    async def _call(self, calls: Sequence[ToolCall]) -> Observation:
        """Calls tools until the episode is over. An action without a call ends it."""
        steps: list[Step] = []
        for call in calls:
            asked = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
            steps.append(await self._session.ask("step", asked))
            if steps[-1].done:
                break
        rewards = [float(step.reward) for step in steps if step.reward is not None]
        return Observation(
            text="\n".join(_said(step.observation) for step in steps),
            data={"results": [step.observation for step in steps]},
            reward=sum(rewards) if rewards else None,
            terminated=not steps or steps[-1].done,
        )

    def _check(self, refused: Refused) -> None:
        """UsageError where it's the recipe that makes no action of the policy's text."""
        if self._action is None:
            return
        for problem in refused.problems:
            if problem.type in ("missing", "extra_forbidden") or problem.field in self._fields:
                said = f"the server takes no action of {self._action!r}: {refused}"
                raise UsageError(f"{said}. Look at the environment's action and fields")


def _described(listed: Step) -> dict[str, JsonValue]:
    """A server's tools by name, as the OpenAI API and chat templates describe them."""
    try:
        tools = _Tools.model_validate(listed.observation).tools
    except ValidationError as error:
        said = f"the server lists what are no tools: {json.dumps(listed.observation)[:500]}"
        raise EnvironmentFailed("bad_answer", said) from error
    if not tools:
        raise UsageError("the server has no tools: leave `tools` out, or look at the server's log")
    return {
        tool.name: {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
            },
        }
        for tool in tools
    }


def _said(observation: Mapping[str, JsonValue]) -> str:
    """What a tool says, as text."""
    match observation:
        case {"error": {"message": str(message)}}:
            return f"error: {message}"
        case {"result": {"content": [*blocks]}}:
            return "\n".join(map(_block, blocks))
        case {"result": str(result)}:
            return result
        case {"result": result} if result is not None:
            return json.dumps(result, ensure_ascii=False)
    return render(observation, ())


def _block(block: JsonValue) -> str:
    """A part of what a tool says; what is no text is named."""
    match block:
        case {"text": str(text)}:
            return text
        case {"type": str(kind)}:
            return f"[{kind}]"
    return json.dumps(block, ensure_ascii=False)
