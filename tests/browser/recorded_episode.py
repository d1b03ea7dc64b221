"""The answers of the dashboard's server for one group, its episodes, and for records."""

from __future__ import annotations

import random

from tests.browser import recorded_run as run
from tests.browser.recorded_run import (
    GROUP,
    HOSTILE,
    INLINE,
    LONG_TEXT,
    LONG_TOKENS,
    RICH,
    SHA,
    Answer,
    observation,
    text,
)

FAILURE: Answer = {
    "origin": "environment",
    "code": "tool_timeout",
    "message": "search: no answer within 5 s",
    "retryable": True,
}
IMAGE: Answer = {
    "name": "screen.png",
    "bytes": 70,
    "media": "image/png",
    "sha256": SHA,
    "url": f"/api/artifacts/{SHA}?task=17&sample=2",
}
TURNS = (
    (-1, "I will search for the river."),
    (0, "The first page does not help."),
    (1, HOSTILE),
    (2, "The answer is 42."),
    (0, "Another thought."),
    (4, "The answer is 41."),
)
"""Parent and text of each turn: a root, and two branches."""


def group(task: int) -> Answer:
    """`/api/groups/TASK`."""
    samples = [
        {
            "sample": one,
            "state": "ended",
            "ending": "failed" if one == 2 else "finished",
            "reward": None if one == 2 else float(one == 0),
            "rewards": {"judge": 0.5},
            "attempts": 1 + (one == 2),
            "seconds": 3.1 + one,
            "tokens": 120 + one,
            "turns": 4,
            "oldest_version": 38,
            "advantages": {} if one == 2 else {"default": [1.15 if one == 0 else -0.58]},
            "failure": FAILURE if one == 2 else None,
            "last_text": "The answer is 42.",
            "tool_failures": 0,
            "trained_in": {},
        }
        for one in range(GROUP)
    ]
    policy = {
        "policy": "default",
        "verdict": "scored",
        "reason": "",
        "estimator": "grpo",
        "mean": 0.333,
        "deviation": 0.577,
        "batch": {"version": 40, "trained": [0, 1], "dropped": {"3": "stale"}},
        "excluded": {"2": "no_reward"},
    }
    return {
        "task": task,
        "source": "source",
        "task_id": "t-17",
        "item_id": "question-3",
        "epoch": 0,
        "purpose": "train",
        "tenant": "default",
        "agent": "chat",
        "environment": "search",
        "labels": {},
        "payload": text('{"question": "How long is the river?"}'),
        "samples_wanted": GROUP,
        "submitted_at": run.NOW - 700,
        "ended_at": run.NOW - 690,
        "state": "ended",
        "closed_by": "all",
        "artifacts": [IMAGE],
        "policies": [policy],
        "samples": samples,
        "remarks": [],
    }


def _turn(index: int) -> Answer:
    parent, said = TURNS[index]
    return {
        "index": index,
        "parent": parent,
        "call": str(index),
        "policy": "default",
        "role": "policy",
        "context": text("How long is the river?\n" if parent < 0 else "search: Traceback …\n"),
        "text": text(said),
        "context_tokens": 50 + 20 * index,
        "tokens": 30,
        "versions": [38, 39],
        "logprob_mean": -0.4,
        "finish": "stop",
        "reward": None,
        "trainable": index != 4,
        "demonstrated": False,
        "kv": "fresh",
        "sampling": {"temperature": 1.0},
        "teacher": False,
        "advantages": {"default": -0.5},
        "tool_calls": [{"name": "search", "arguments": '{"q": "<img src=x onerror=alert(1)>"}'}]
        if index in (0, 1, 2)
        else [],
    }


def _exchanges(task: int, sample: int) -> list[Answer]:
    shared: Answer = {
        "worker": "inference-1",
        "index": None,
        "failed": False,
        "failure": None,
        "request": text("How long is the river?"),
        "request_location": "search-agent.prompts.default.v1/0@3",
        "answer_location": "search-agent.answers.default.v1/0@4",
    }
    long = text(observation()[:INLINE], "/api/text?name=observation", LONG_TEXT)
    found: list[Answer] = []
    for index, (_, said) in enumerate(TURNS):
        at = run.NOW - 700 + index * 2
        found.append(
            {
                **shared,
                "call": str(index),
                "kind": "generate",
                "what": "default",
                "answer": text(said),
                "requested_at": at,
                "answered_at": at + 0.9,
                "queue_s": 0.1,
                "run_s": 0.7,
                "turn": index,
                "versions": [39],
                "context_tokens": 0,
                "tokens": 30,
                "prompt_tokens": 50,
                "cached_tokens": 20,
                "finish": "stop",
            }
        )
        failed = index == 1
        found.append(
            {
                **shared,
                "call": f"{index}s",
                "kind": "step",
                "what": "search",
                "worker": "env-1",
                "answer": long if index == 0 else text("search: Traceback …"),
                "requested_at": at + 1,
                "answered_at": at + 1.4,
                "queue_s": 0.02,
                "run_s": 0.3,
                "reward": 1.0 if index == 3 else None,
                "rewards": {},
                "terminated": index == 3,
                "truncated": False,
                "data": text(""),
                "index": index,
                "turn": None,
                "failed": failed,
                "failure": FAILURE if failed else None,
                "artifacts": [IMAGE] if index == 0 else [],
            }
        )
    return found


def episode(task: int, sample: int) -> Answer:
    """`/api/episodes/TASK/SAMPLE`."""
    exchanges = _exchanges(task, sample)
    timeline = [
        {
            "call": one["call"],
            "name": f"{one['kind']} {one['what']}",
            "start": one["requested_at"],
            "end": one["answered_at"],
            "queue_s": one["queue_s"],
            "run_s": one["run_s"],
            "other_s": 0.08,
        }
        for one in exchanges
    ]
    return {
        "task": task,
        "sample": sample,
        "attempt": 1,
        "attempts": [
            {
                "attempt": 0,
                "counts": False,
                "exchanges": 2,
                "ending": "failed",
                "at": run.NOW - 710,
                "failures": [FAILURE],
            },
            {
                "attempt": 1,
                "counts": True,
                "exchanges": 2 * len(TURNS),
                "ending": "finished",
                "at": run.NOW - 690,
                "failures": [],
            },
        ],
        "item_id": "question-3",
        "purpose": "train",
        "agent": "chat",
        "environment": "search",
        "verdict": None,
        "trained_in": {"default": 40},
        "state": "ended",
        "started_at": run.NOW - 700,
        "ended_at": run.NOW - 688,
        "seconds": 12.0,
        "ending": "finished",
        "reward": 1.0,
        "rewards": {"judge": 0.5, "exact": 0.5},
        "failure": None,
        "masked": False,
        "policies": [{"policy": "default", "role": "policy", "tokens": 180, "oldest_version": 38}],
        "metrics": {"searches": 3},
        "labels": {"split": "hard"},
        "artifacts": [IMAGE],
        "turns": [_turn(index) for index in range(len(TURNS))],
        "turns_total": len(TURNS),
        "exchanges": exchanges,
        "timeline": timeline,
        "judges": [],
        "group": group(task)["policies"],
        "remarks": [],
        "neighbours": {
            "previous": f"{task}/{sample - 1}" if sample else None,
            "next": f"{task}/{sample + 1}",
        },
    }


UNKNOWN = (
    "Policy default: the trainer's logprobs are unknown. Those of version 39 can't be read: blob "
    f"{SHA} is not in /data/blobs. It was pruned, or its writer uses another blob store."
)
PIECES = (
    " the",
    " river",
    " is",
    " long",
    ",",
    " 42",
    ".\n",
    " search",
    "(",
    '"Nile"',
    ")",
    " 河",
    "<b>",
    "\x1b[31m",
    "",
)


def tokens(task: int, sample: int, asked: dict[str, str]) -> Answer:
    """`/api/episodes/TASK/SAMPLE/tokens`. The rich episode has 32,000.

    The blob with the trainer's logprobs of sample 1 was pruned.
    """
    pruned = sample == 1
    total = LONG_TOKENS if (task, sample) == RICH else 240
    start, limit = int(asked.get("from", 0)), min(8000, int(asked.get("limit", 4000)))
    last = min(total, start + limit)
    chance = random.Random(start)
    columns: dict[str, list[object]] = {
        name: []
        for name in (
            "turn",
            "id",
            "text",
            "origin",
            "mask",
            "logprob",
            "trainer",
            "teacher",
            "version",
            "policy",
        )
    }
    for index in range(start, last):
        turn, within = divmod(index * 6, total)
        sampled = within / total > 0.4
        engine = -chance.expovariate(2) if sampled else None
        row = {
            "turn": turn,
            "id": index % 512,
            "text": PIECES[(index * 7 + index // 11) % len(PIECES)],
            "origin": (2 if turn == 4 else 1) if sampled else 0,
            "mask": int(sampled and turn != 4),
            "logprob": engine,
            "trainer": None if pruned or engine is None else engine + chance.gauss(0, 0.1),
            "teacher": None,
            "version": 38 + turn % 2 if sampled else -1,
            "policy": 0,
        }
        for name, column in columns.items():
            column.append(row[name])
    return {
        "from": start,
        "total": total,
        "next": last if last < total else None,
        "branch": int(asked.get("branch", 5)),
        "policies": ["default"],
        "leaves": [3, 5],
        "remarks": [UNKNOWN] if pruned else [],
        **columns,
    }
