"""Builds the requests of an agent. The same code makes the same requests, by the same call paths.

Each request has a digest of its meaning. The answer repeats the digest.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal, Protocol

from headrace.schemas.events import (
    ActionRequested,
    EnvironmentUse,
    EpisodeStarted,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
    Sampling,
)
from headrace.services.agent.conversation import Conversation, Prompt

Request = GenerationRequested | ActionRequested
Answer = GenerationCompleted | ObservationRecorded


class EpisodeRuntime(Protocol):
    """Sends the requests of an Episode, and returns the first recorded answer to each."""

    started: EpisodeStarted
    attempt: int

    async def ask_policy(self, request: GenerationRequested) -> GenerationCompleted:
        """Requests a generation, and returns its answer."""

    async def ask_environment(self, request: ActionRequested) -> ObservationRecorded:
        """Requests an action, and returns its observation."""


LAST = 2**31 - 1
"""The largest number that an event's `int` can hold. A record may contain it."""


def generation_requested(
    started: EpisodeStarted,
    attempt: int,
    call: str,
    conversation: Conversation,
    prompt: Prompt,
    *,
    max_tokens: int,
) -> GenerationRequested:
    """Returns the request that a policy continue a conversation, by at most `max_tokens` tokens.

    Raises KeyError if the task has no such role, and ValueError if the prompt asks for no token.
    """
    use = started.submitted.roles[conversation.role]
    asked = max_tokens if prompt.max_tokens is None else prompt.max_tokens
    if asked < 1:
        raise ValueError(
            f"max_tokens is {asked}, but an answer has at least 1 token: leave max_tokens out, or "
            "do not ask the policy"
        )
    most = min(max_tokens, use.sampling.max_tokens, asked)
    changes: dict[str, object] = {"max_tokens": most}
    if prompt.json_schema is not None:
        changes["json_schema"] = json.dumps(prompt.json_schema, ensure_ascii=False)
        changes["json_before"], changes["json_after"] = prompt.around
    sampling = use.sampling.model_copy(update=changes)
    tokens = conversation.packed_tokens
    meant: list[str | bytes] = [use.policy, str(use.version), _used(sampling), tokens, prompt.text]
    # Fields that are not used are left out: requests from before they existed keep their digest.
    if prompt.chat or prompt.demonstration is not None:
        meant.append(prompt.chat)
    if prompt.demonstration is not None:
        meant.append(prompt.demonstration)
    newest = prompt.demonstration is None and use.version is None
    return GenerationRequested(
        task=started.task,
        sample=started.sample,
        attempt=attempt,
        call=call,
        policy=use.policy,
        pinned=use.version,
        minimum=started.versions.get(use.policy, 0) if newest else 0,
        tokens=tokens,
        text=prompt.text,
        chat=prompt.chat,
        demonstration=prompt.demonstration,
        sampling=sampling,
        priority=started.submitted.priority,
        expires_at=started.deadline,
        digest=meaning_of(*meant),
    )


def action_requested(
    started: EpisodeStarted,
    attempt: int,
    call: str,
    kind: Literal["reset", "step", "score"],
    payload: str,
    *,
    index: int = 0,
    judge: str | None = None,
) -> ActionRequested:
    """Returns the request that the task's environment, or the judge, act.

    Raises ValueError if the task has no environment.
    """
    submitted = started.submitted
    use = submitted.environment if judge is None else EnvironmentUse(use=judge)
    if use is None:
        raise ValueError("this task has no environment: set tasks.environment in the recipe")
    request = ActionRequested(
        task=started.task,
        sample=started.sample,
        attempt=attempt,
        call=call,
        index=index,
        kind=kind,
        environment=use,
        payload=payload,
        artifacts=submitted.artifacts if kind == "reset" else (),
        seed=submitted.seed,
        expires_at=started.deadline,
        digest=meaning_of(kind, str(index), _meant(use), payload),
    )
    return sharing_names(request, request.__dict__)


_ALL = set(ActionRequested.model_fields)


def sharing_names(request: ActionRequested, fields: dict[str, Any]) -> ActionRequested:
    """Returns an action with these fields, as valid as `request` was.

    All such actions share the set of the fields' names. Each has one of its own otherwise, which
    takes a kilobyte for as long as the agent waits.
    """
    made = ActionRequested.__new__(type(request))
    object.__setattr__(made, "__dict__", fields)
    object.__setattr__(made, "__pydantic_fields_set__", _ALL)
    object.__setattr__(made, "__pydantic_extra__", None)
    object.__setattr__(made, "__pydantic_private__", None)
    return made


COLLECT = "collect"
"""The call of the request for an attempt's files. An attempt has at most one."""


def collect_requested(started: EpisodeStarted, attempt: int, index: int) -> ActionRequested | None:
    """Returns the request for the files of an attempt's environment; None if none are wanted.

    `index` is not part of what it means: at a limit, a branch of the agent may have asked for one
    more action or not.
    """
    use = started.submitted.environment
    if use is None or not use.collect:
        return None
    return ActionRequested(
        task=started.task,
        sample=started.sample,
        attempt=attempt,
        call=COLLECT,
        index=index,
        kind="collect",
        environment=use,
        expires_at=started.deadline,
        digest=meaning_of("collect", _meant(use)),
    )


def close_after(
    last: ActionRequested | ObservationRecorded, environment: EnvironmentUse | None
) -> ActionRequested:
    """Returns the request that ends the environment of an attempt.

    `last` is the attempt's newest action or answer. The env worker finds the environment by the
    attempt, so the request may leave the environment's name empty if that is no longer known.
    """
    expires_at = 0
    if isinstance(last, ActionRequested):
        environment, expires_at = last.environment, last.expires_at
    return ActionRequested(
        task=last.task,
        sample=last.sample,
        attempt=last.attempt,
        call=f"{last.call}.close",
        index=following(last.index),
        kind="close",
        environment=environment or EnvironmentUse(use=""),
        expires_at=expires_at,
        digest=last.digest,
    )


def following(number: int) -> int:
    """Returns the attempt or index after this one, at most LAST."""
    return min(number + 1, LAST)


def _meant(use: EnvironmentUse) -> str:
    """Returns an environment as JSON, without the later field if it is not used."""
    return use.model_dump_json(exclude=None if use.collect else {"collect"})


def _used(sampling: Sampling) -> str:
    """Returns a sampling as JSON, without the later fields if they are not used."""
    later = ("json_schema", "json_before", "json_after")
    return sampling.model_dump_json(exclude={name for name in later if not getattr(sampling, name)})


def meaning_of(*parts: str | bytes) -> bytes:
    """Returns the digest of what a request asks: two requests with one id must mean the same."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()[:16]
