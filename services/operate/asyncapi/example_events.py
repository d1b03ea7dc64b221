"""Examples of the events that other teams write and read: the story of one task.

Another team submits a task. Its first episode ends with an answer that a judge scores, and the task
is cancelled before its second episode starts.
"""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro

from headrace.schemas.codec import avsc, field_values
from headrace.schemas.events import (
    ActionRequested,
    EnvironmentUse,
    EpisodeEnded,
    Event,
    Failure,
    ObservationRecorded,
    PolicyUse,
    Ref,
    Sampling,
    TaskCancelled,
    TaskEnded,
    TaskSubmitted,
    TrajectoryRecorded,
    Turn,
    TurnProjected,
    Use,
)
from headrace.schemas.packed import pack_f32, pack_i32

_SAMPLING = Sampling(max_tokens=64)
_ORIGIN: dict[str, Any] = {"source": "search-team", "task_id": "2026-06-01/17", "item_id": "17"}
_ASKED, _SAID = bytes(range(16)), bytes(range(16, 32))
_REF = Ref(topic="search.trajectories.v1", partition=1, offset=42, digest=_SAID)
_TIMES: dict[str, Any] = {"started": 1_780_300_800_000, "ended": 1_780_300_803_500}

_OUTCOME = EpisodeEnded(
    task=1017,
    sample=0,
    tenant="search",
    item_id=_ORIGIN["item_id"],
    ending="finished",
    trajectory=_REF,
    reward=0.75,
    rewards={"jury": 0.75},
    policies=(PolicyUse(policy="default", tokens=3, longest=7, oldest_version=11),),
    seconds=3.5,
    labels={"team": "search"},
)
_CANCELLED = EpisodeEnded(
    task=1017,
    sample=1,
    tenant="search",
    item_id=_ORIGIN["item_id"],
    ending="cancelled",
    failure=Failure(origin="operator", code="cancelled", message="wrong image"),
    attempts=0,
    labels={"team": "search"},
)
EXAMPLES: tuple[tuple[str, Event], ...] = (
    (
        "A task for two episodes",
        TaskSubmitted(
            **_ORIGIN,
            tenant="search",
            agent="default",
            environment=EnvironmentUse(use="default"),
            roles={"policy": Use(policy="default", sampling=_SAMPLING)},
            payload=json.dumps({"question": "Which team wrote this task?"}),
            samples=2,
            max_turns=8,
            max_tokens=512,
            deadline_s=600,
            labels={"team": "search"},
        ),
    ),
    (
        "The same task is cancelled",
        TaskCancelled(
            source=_ORIGIN["source"],
            task_id=_ORIGIN["task_id"],
            reason="wrong image",
            tenant="search",
        ),
    ),
    (
        "A judge is asked for a score",
        ActionRequested(
            task=1017,
            sample=0,
            call="2",
            index=1,
            kind="score",
            environment=EnvironmentUse(use="jury"),
            payload=json.dumps({"answer": "the search team"}),
            expires_at=1_780_301_400_000,
            digest=_ASKED,
        ),
    ),
    (
        "The judge's answer, which repeats the numbers and the digest of the action",
        ObservationRecorded(task=1017, sample=0, call="2", index=1, digest=_ASKED, reward=0.75),
    ),
    (
        "An episode of one turn",
        TrajectoryRecorded(
            task=1017,
            sample=0,
            **_ORIGIN,
            **_TIMES,
            tokenizer="f1d2",
            agent="default",
            environment="default",
            samplings=(_SAMPLING,),
            turns=(
                Turn(
                    call="1",
                    policy="default",
                    context=pack_i32([5, 9, 2, 7]),
                    tokens=pack_i32([31, 8, 1]),
                    logprobs=pack_f32([-0.5, -0.25, -1.5]),
                    versions=pack_i32([0, 11]),
                    finish="stop",
                    reward=0.75,
                    text="the search team",
                ),
            ),
            reward=0.75,
            rewards={"jury": 0.75},
            ending="finished",
            labels={"team": "search"},
        ),
    ),
    (
        "The same turn as a row",
        TurnProjected(
            task=1017,
            sample=0,
            turn=0,
            **_ORIGIN,
            **_TIMES,
            tenant="search",
            agent="default",
            environment="default",
            policy="default",
            call="1",
            context=(5, 9, 2, 7),
            context_text="Which team wrote this task?",
            tokens=(31, 8, 1),
            text="the search team",
            logprobs=(-0.5, -0.25, -1.5),
            versions=(11, 11, 11),
            version=11,
            finish="stop",
            turn_reward=0.75,
            reward=0.75,
            rewards={"jury": 0.75},
            advantage=0.5,
            ending="finished",
            labels={"team": "search"},
        ),
    ),
    ("An episode with a reward", _OUTCOME),
    ("A cancelled episode", _CANCELLED),
    (
        "The result of the task",
        TaskEnded(
            task=1017,
            **_ORIGIN,
            tenant="search",
            closed_by="cancelled",
            outcomes=(_OUTCOME, _CANCELLED),
            labels={"team": "search"},
        ),
    ),
)
"""Events, each with what it shows."""


def examples_of(event_type: type[Event]) -> list[dict[str, Any]]:
    """Returns the examples of an event for AsyncAPI, with payloads in Avro's JSON encoding."""
    own = [(summary, event) for summary, event in EXAMPLES if type(event) is event_type]
    return [
        {
            "name": f"{event_type.__name__}-{number}",
            "summary": summary,
            "headers": _headers(event),
            "payload": to_avro_json(event),
        }
        for number, (summary, event) in enumerate(own, 1)
    ]


def to_avro_json(event: Event) -> Any:
    """Returns an event in Avro's JSON encoding, as JSON values.

    https://avro.apache.org/docs/1.12.0/specification/#json-encoding
    """
    text = io.StringIO()
    fastavro.json_writer(text, avsc(type(event)), [field_values(event)])
    return json.loads(text.getvalue())


def _headers(event: Event) -> dict[str, str]:
    return {
        "ce_specversion": "1.0",
        "ce_source": "search-team-1",
        "ce_type": f"headrace.{type(event).__name__}",
        "ce_id": event.event_id,
        "content-type": "application/avro",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    }
