"""The answers of the dashboard's server about topics, records and dead letters."""

from __future__ import annotations

from datetime import UTC, datetime

from tests.browser import recorded_run as run
from tests.browser.recorded_run import HOSTILE, Answer, page, text


def topics() -> Answer:
    """`/api/topics`."""
    names = {
        "tasks": "TaskSubmitted",
        "prompts": "PromptSubmitted",
        "trajectories": "TrajectoryEnded",
    }
    return page(
        [
            {
                "topic": f"search-agent.{name}.v1",
                "name": name,
                "event": event,
                "policy": None,
                "writer": "scheduler",
                "kept": "long",
                "partitions": 4,
                "records": 2560,
                "first": 0,
            }
            for name, event in names.items()
        ]
    )


def records(topic: str) -> Answer:
    """`/api/records`."""
    return page(
        [
            {
                "topic": f"search-agent.{topic}.v1",
                "partition": 0,
                "offset": 99 - one,
                "at": datetime.fromtimestamp(run.NOW - one, UTC).isoformat(),
                "type": "TaskSubmitted",
                "id": str(one),
                "preview": text(HOSTILE),
                "location": f"search-agent.{topic}.v1/0@{99 - one}",
            }
            for one in range(20)
        ]
    )


def record(at: str) -> Answer:
    """`/api/record`."""
    topic, _, where = at.rpartition("/")
    return {
        "topic": topic,
        "partition": 0,
        "offset": int(where.partition("@")[2] or 0),
        "at": datetime.fromtimestamp(run.NOW - 5, UTC).isoformat(),
        "type": "TaskSubmitted",
        "id": "17",
        "location": at,
        "event": {"task": 17, "payload": HOSTILE},
    }


def dead_letters() -> Answer:
    """`/api/dead-letters`."""
    reason = "the record has no schema id"
    rows = [
        {
            "number": one,
            "topic": "search-agent.tasks.v1",
            "reason": reason,
            "at": run.NOW - 40 - one,
            "reader": "scheduler",
            "bytes": 120,
            "redriven": one == 2,
        }
        for one in range(3)
    ]
    kinds = [
        {
            "topic": "search-agent.tasks.v1",
            "reason": reason,
            "count": 3,
            "redriven": 1,
            "first": [0],
            "last_at": run.NOW - 40,
        }
    ]
    return page(rows, kinds=kinds)


def dead_letter(number: int) -> Answer:
    """`/api/dead-letters/NUMBER`."""
    return {
        "number": number,
        "location": f"search-agent.tasks.v1/0@{number}",
        "at": run.NOW - 40,
        "reason": HOSTILE,
        "reader": "scheduler",
        "refused": "",
        "key": "00ff",
        "headers": {"origin": HOSTILE},
        "value_hex": "00ff10",
        "value_text": text(HOSTILE),
        "bytes": 120,
    }
