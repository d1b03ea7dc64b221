"""Builds the requests of an agent. The same code makes the same requests, by the same call paths.

Each request has a digest of its meaning. The answer repeats the digest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Literal

from headrace.schemas import packed
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

    Raises KeyError if the task has no such role.
    """
    use = started.submitted.roles[conversation.role]
    most = min(max_tokens, use.sampling.max_tokens, prompt.max_tokens or max_tokens)
    changes: dict[str, object] = {"max_tokens": most}
    if prompt.json_schema is not None:
        changes["json_schema"] = json.dumps(prompt.json_schema, ensure_ascii=False)
        changes["json_before"], changes["json_after"] = prompt.around
    sampling = use.sampling.model_copy(update=changes)
    tokens = packed.pack_i32(conversation.tokens)
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
    return ActionRequested(
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
        digest=meaning_of(kind, str(index), use.model_dump_json(), payload),
    )


def last_observed(answers: Iterable[Answer]) -> ObservationRecorded | None:
    """Returns the environment's newest answer among `answers`, if there is one."""
    observed = (answer for answer in answers if isinstance(answer, ObservationRecorded))
    return max(observed, key=lambda answer: answer.index, default=None)


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
