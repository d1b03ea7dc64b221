"""An OpenEnv server as an environment: the policy's text becomes an action of the server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, JsonValue, ValidationError

from headrace.errors import EnvironmentFailed, InfrastructureError, UsageError
from headrace.services.base.redactor import REDACTOR
from headrace.services.base.tool_calls import BadCall, ToolCall, read_calls
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.environment import AskingAgain
from headrace.services.env.http_environment import authorization
from headrace.services.env.openenv.openenv_messages import (
    BadAction,
    Refused,
    Step,
    as_text,
    read_object,
    render,
)
from headrace.services.env.openenv.openenv_session import OpenEnvSession

SEEDS = 2**31
"""Seeds are taken modulo this: servers pass them to generators that take 32 bits."""


class _Tool(BaseModel):
    name: str
    description: str = ""
    input_schema: dict[str, JsonValue] = {}


class _Tools(BaseModel):
    tools: list[_Tool]


class OpenEnvEnvironment(AskingAgain):
    """One episode's session with an OpenEnv server."""

    recipe_only = frozenset(
        {
            *("url", "action", "fields", "tools", "render"),
            *("timeout_s", "answer_kb", "token", "replayable"),
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
        token: str | None = None,
        replayable: bool = False,
    ) -> None:
        """Raises UsageError if an option is wrong.

        Options:
            url: The server's address, such as `http://127.0.0.1:8000`.
            action: The field of an action that holds the policy's text. Absent: the policy writes
                the whole action as JSON.
            fields: Fields that are the same in every action.
            tools: Whether the policy calls the server's tools instead.
            render: The field of an observation that is its text, or several fields. Empty: the text
                is the whole observation as JSON.
            reset: Arguments of every reset. The task's payload overrides them.
            timeout_s: Seconds that a call may take. A server that is full or not there is asked as
                long again.
            answer_kb: Maximum size of a message.
            token: As for `http`.
            replayable: Whether the same actions always give the same answers.
        """
        scheme, _, rest = url.partition("://")
        if scheme not in ("http", "https", "ws", "wss") or not rest:
            raise UsageError(f"url {url!r}: give the server's address, as http://127.0.0.1:8000")
        if tools and (action is not None or fields):
            raise UsageError(
                "tools = true makes tool calls the actions; use it without action and fields"
            )
        self.replayable = replayable
        self._action = action
        self._fields = dict(fields or {})
        self._tools = tools
        self._render = (render,) if isinstance(render, str) else tuple(render)
        self._reset = dict(reset or {})
        headers = authorization(token)
        self._session = OpenEnvSession(
            f"{url.rstrip('/')}/ws", headers, timeout_s, answer_kb * 1024
        )
        self._name = ""
        self._described: dict[str, JsonValue] = {}
        """The server's tools by name, as chat templates take them."""

    @property
    def busy(self) -> InfrastructureError | None:
        """Why there was no session, if the server was asked again."""
        return self._session.room.busy

    def set_name(self, name: str) -> None:
        """Take the attempt's name; the server gets it as `episode_id`."""
        self._name = name

    async def reset(self, task: TaskView) -> Observation:
        """Start an episode, in the open session or in a new one."""
        about = {"seed": task.seed % SEEDS, "episode_id": self._name}
        arguments = {**self._reset, **task.payload, **about}
        if self._tools:  # before the reset: after it, the request might count as a step
            listed = await self._own("step", {"type": "list_tools"})
            self._described = _described(listed)
        first = await self._own("reset", arguments)
        observation = first.to_observation(render(first.observation, self._render))
        if not self._tools:
            return observation
        text = observation.text or str(task.payload.get("prompt", ""))
        data = {**observation.data, "tools": list(self._described.values())}
        return replace(observation, text=text, data=data)

    async def step(self, action: str) -> Observation:
        """Send the action. The policy reads why an action is not valid, and the episode goes on."""
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
        return done.to_observation(render(done.observation, self._render))

    async def aclose(self) -> None:
        """Ask the server to end the session. It takes bounded time."""
        await self._session.close()

    async def _own(self, kind: str, data: Mapping[str, Any]) -> Step:
        """Send a message that is not the policy's. Start a session if there is none."""
        try:
            if self._session.open:
                return await self._session.ask(kind, data)
            return await self._session.begin(kind, data)
        except Refused as refused:
            shown = REDACTOR.text(json.dumps(data), 200)
            raise UsageError(
                f"the server refused the {kind} {shown}: {refused}. Check the environment's options"
            ) from refused

    async def _call(self, calls: Sequence[ToolCall]) -> Observation:
        """Call tools until the episode ends. An action without a call ends it."""
        steps: list[Step] = []
        for call in calls:
            request = {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments}
            steps.append(await self._session.ask("step", request))
            if steps[-1].done:
                break
        rewards = [float(step.reward) for step in steps if step.reward is not None]
        return Observation(
            text="\n".join(_result_text(step.observation) for step in steps),
            data={"results": [step.observation for step in steps]},
            reward=sum(rewards) if rewards else None,
            terminated=not steps or steps[-1].done,
        )

    def _check(self, refused: Refused) -> None:
        """Raise UsageError if the action is wrong because of the recipe, not the policy."""
        if self._action is None:
            return
        for problem in refused.problems:
            ours = any(name in self._fields for name in problem.loc[:1])
            if ours or problem.type in ("missing", "extra_forbidden"):
                raise UsageError(
                    f"the server refused an action with the field {self._action!r}: {refused}. "
                    f"Check the environment's options action and fields"
                )


def _described(listed: Step) -> dict[str, JsonValue]:
    """Return a server's tools by name, as the OpenAI API and chat templates describe them."""
    try:
        tools = _Tools.model_validate(listed.observation).tools
    except ValidationError as error:
        shown = REDACTOR.text(json.dumps(listed.observation), 500)
        message = f"the server's list of tools is not valid: {shown}"
        raise EnvironmentFailed("bad_answer", message) from error
    if not tools:
        raise UsageError("the server has no tools: remove `tools`, or check the server's log")
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


def _result_text(observation: Mapping[str, JsonValue]) -> str:
    """Return the text of a tool's result."""
    match observation:
        case {"error": {"message": str(message)}}:
            return f"error: {message}"
        case {"result": {"content": [*blocks]}}:
            return "\n".join(map(_block, blocks))
        case {"result": result} if result is not None:
            return as_text(result)
    return render(observation, ())


def _block(block: JsonValue) -> str:
    """Return the text of one part of a result, or the type of a part that is not text."""
    match block:
        case {"text": str(text)}:
            return text
        case {"type": str(kind)}:
            return f"[{kind}]"
    return as_text(block)
