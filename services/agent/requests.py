"""What an agent asks, as requests: the same code asks the same, under the same calls.

Each request carries a digest of its meaning, which its answer echoes.
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
"""Largest number that an event's `int` holds: another's record may have it."""


def generation_requested(
    started: EpisodeStarted,
    attempt: int,
    call: str,
    context: Conversation,
    prompt: Prompt,
    *,
    max_tokens: int,
) -> GenerationRequested:
    """Has a policy go on with a context, by `max_tokens` tokens at the most.

    KeyError for a role that the task lacks.
    """
    use = started.submitted.roles[context.role]
    most = min(max_tokens, use.sampling.max_tokens, prompt.max_tokens or max_tokens)
    changes: dict[str, object] = {"max_tokens": most}
    if prompt.json_schema is not None:
        changes["json_schema"] = json.dumps(prompt.json_schema, ensure_ascii=False)
        changes["json_before"], changes["json_after"] = prompt.around
    sampling = use.sampling.model_copy(update=changes)
    tokens = packed.pack_i32(context.tokens)
    meant: list[str | bytes] = [use.policy, str(use.version), _told(sampling), tokens, prompt.text]
    # Only what there is: a request that was sent before these fields were must mean the same.
    if prompt.chat or prompt.demonstration is not None:
        meant.append(prompt.chat)
    if prompt.demonstration is not None:
        meant.append(prompt.demonstration)
    return GenerationRequested(
        task=started.task,
        sample=started.sample,
        attempt=attempt,
        call=call,
        policy=use.policy,
        pinned=use.version,
        tokens=tokens,
        text=prompt.text,
        chat=prompt.chat,
        demonstration=prompt.demonstration,
        sampling=sampling,
        priority=started.submitted.priority,
        expires_at=started.deadline,
        digest=_meaning(*meant),
    )


def action_requested(
    started: EpisodeStarted,
    attempt: int,
    call: str,
    kind: Literal["reset", "step", "score"],
    payload: str,
    *,
    index: int,
    judge: str | None = None,
) -> ActionRequested:
    """Has the task's environment act, or `judge` answer. ValueError where the task has none."""
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
        digest=_meaning(kind, str(index), use.model_dump_json(), payload),
    )


def last_observed(answers: Iterable[Answer]) -> ObservationRecorded | None:
    """The newest answer of an environment among these."""
    observed = (answer for answer in answers if isinstance(answer, ObservationRecorded))
    return max(observed, key=lambda answer: answer.index, default=None)


def close_after(
    last: ActionRequested | ObservationRecorded, environment: EnvironmentUse | None
) -> ActionRequested:
    """What ends the environment of an attempt: `last` is its newest action or answer known.

    An environment is found by its attempt: the record names none where it isn't known any more.
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
    """The attempt or index after this one; the last that there is has none after it."""
    return min(number + 1, LAST)


def _told(sampling: Sampling) -> str:
    """All of it that says something: what came later changes nothing where it is not used."""
    later = ("json_schema", "json_before", "json_after")
    return sampling.model_dump_json(exclude={name for name in later if not getattr(sampling, name)})


def _meaning(*parts: str | bytes) -> bytes:
    """Digest of what a request asks: two requests of one id must mean the same."""
    digest = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()[:16]
