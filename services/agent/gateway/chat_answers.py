"""Builds what a client gets: chat completions, whole or as server-sent events.

https://platform.openai.com/docs/api-reference/chat/object
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.services.agent.gateway.chat_requests import ChatRequest
from headrace.services.agent.gateway.chat_session import Choice

DONE = b"data: [DONE]\n\n"


def completion(request: ChatRequest, choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns a `chat.completion`."""
    return {
        **_head(request, "chat.completion"),
        "choices": [
            {
                "index": index,
                "message": {**_content(choice), "refusal": None},
                "logprobs": _logprobs(choice) if request.logprobs else None,
                "finish_reason": choice.finish,
            }
            for index, choice in enumerate(choices)
        ],
        "usage": _usage(choices),
    }


def events(request: ChatRequest, choices: Sequence[Choice]) -> Iterator[bytes]:
    """Yields the same as a stream. Each choice is one chunk: it is one record in the log."""
    head = _head(request, "chat.completion.chunk")
    usage: dict[str, Any] = {"usage": None} if request.stream_usage else {}
    for index, choice in enumerate(choices):
        delta = _content(choice)
        for number, call in enumerate(delta.get("tool_calls", ())):
            call["index"] = number
        said = {"index": index, "delta": delta, "finish_reason": None}
        said["logprobs"] = _logprobs(choice) if request.logprobs else None
        yield _event({**head, "choices": [said], **usage})
        end = {"index": index, "delta": {}, "finish_reason": choice.finish, "logprobs": None}
        yield _event({**head, "choices": [end], **usage})
    if request.stream_usage:
        yield _event({**head, "choices": [], "usage": _usage(choices)})
    yield DONE


def models(names: Sequence[str], created: int) -> dict[str, Any]:
    """Returns the list of models."""
    return {"object": "list", "data": [model(name, created) for name in names]}


def model(name: str, created: int) -> dict[str, Any]:
    """Returns the description of one model."""
    return {"id": name, "object": "model", "created": created, "owned_by": "headrace"}


def _head(request: ChatRequest, kind: str) -> dict[str, Any]:
    answer_id, created = f"chatcmpl-{secrets.token_hex(8)}", int(time.time())
    return {"id": answer_id, "object": kind, "created": created, "model": request.model}


def _content(choice: Choice) -> dict[str, Any]:
    message = choice.message()
    if calls := message.get("tool_calls"):
        message["content"] = choice.content or None
        for call in calls:
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return message


def _logprobs(choice: Choice) -> dict[str, Any]:
    """Returns the logprobs of the sampled tokens.

    Tokens are named by their ids: the bytes of a single token need not be valid text.
    """
    content: list[dict[str, Any]] = [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(choice.tokens, choice.logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _usage(choices: Sequence[Choice]) -> dict[str, int]:
    prompt = choices[0].prompt_tokens
    drawn = sum(len(choice.tokens) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}


def _event(tree: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(tree).encode() + b"\n\n"
