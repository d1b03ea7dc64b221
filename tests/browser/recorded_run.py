"""The answers of the dashboard's server for one run, in which the reward falls at version 40.

From that version on the tool `search` fails, because the environment worker env-2 is gone. Episode
17/2 is the richest one: three branches, a failed attempt, an image, hostile text and a long answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]

NOW = 1_764_000_000.0
NEWEST = 60
BROKEN = 40
"""The version from which on the tool `search` fails."""
GROUP = 4
RICH = (17, 2)
LONG_TOKENS = 32_000
LONG_TEXT = 5 * 1024 * 1024
INLINE = 20_000
HOSTILE = (
    "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x00\u202eesrever\u202c <b>bold</b> javascript:alert(1)"
)
SHA = "ab" * 32


def set_now(at: float) -> None:
    """Sets the time of all answers, in epoch seconds."""
    global NOW
    NOW = at


def text(value: str, more: str | None = None, length: int | None = None) -> Answer:
    """A long text as the server gives it."""
    return {"text": value, "length": len(value) if length is None else length, "more": more}


def page(items: list[Any], **more: object) -> Answer:
    """A list as the server gives it, with no further page."""
    return {"items": items, "total": len(items), "next": None, **more}


def observation() -> str:
    """A tool's answer of 5 MB, with markup and escapes in each line."""
    line = f"{HOSTILE} {'log line of a tool ' * 6}\n"
    return (line * (LONG_TEXT // len(line) + 1))[:LONG_TEXT]


def reward_of(version: int) -> float:
    """The mean reward of the batch of a version."""
    noise = random.Random(version).uniform(-0.02, 0.02)
    learned = 0.2 + 0.55 * (1 - 0.95**version)
    return round((learned if version < BROKEN else learned * 0.45) + noise, 4)


def published(version: int) -> float:
    """When a version was published, in epoch seconds."""
    return NOW - 90 - (NEWEST - version) * 30


def interval(value: float) -> Answer:
    """A mean with its interval."""
    return {"value": value, "low": max(0.0, value - 0.08), "high": min(1.0, value + 0.08)}


def evaluation_of(version: int) -> Answer:
    """The evaluation of a version."""
    found = interval(reward_of(version))
    return {
        "version": version,
        "items": 32,
        "samples": 4,
        "failed": 0,
        "avg": found,
        "pass": {"1": found},
    }


def metrics_of(version: int) -> Answer:
    """What the trainer reported of a step."""
    chance = random.Random(version)
    return {
        "loss": round(chance.uniform(-0.02, 0.02), 5),
        "kl": round(chance.uniform(0.001, 0.004), 5),
        "importance_mean": round(chance.uniform(0.99, 1.01), 4),
        "entropy": round(1.4 - version * 0.01, 4),
        "grad_norm": round(chance.uniform(0.4, 0.9), 4),
        "reward": reward_of(version),
    }


def session() -> Answer:
    """`/api/session`."""
    actions = ["cancel", "again", "evaluate", "replay", "redrive"]
    return {"action_token": "t", "actions": actions, "actions_off": "", "version": "0.1.0"}


def run() -> Answer:
    """`/api/run`."""
    policy = {
        "name": "default",
        "trained": True,
        "version": NEWEST,
        "published_at": published(NEWEST),
        "reward": reward_of(NEWEST),
        "staleness": 1,
        "skipped": 0,
        "evaluation": evaluation_of(NEWEST),
    }
    failures = [
        {
            "origin": "environment",
            "code": "tool_timeout",
            "count": 212,
            "task": 17,
            "sample": 2,
            "message": "search: no answer within 5 s",
        },
        {
            "origin": "infrastructure",
            "code": "worker_lost",
            "count": 6,
            "task": 31,
            "sample": 0,
            "message": "env-2 has not been seen since 12:40",
        },
    ]
    return {
        "namespace": "search-agent",
        "recipe": "search",
        "state": "started",
        "reason": "",
        "started_at": NOW - 1900,
        "ended_at": None,
        "now": NOW,
        "index": {
            "done": 48120,
            "total": 48120,
            "caught_up": True,
            "seconds": 1.2,
            "as_of": None,
            "problem": "",
            "forgotten_tasks": 0,
            "undecodable": 0,
        },
        "policies": [policy],
        "tasks": {"submitted": 640, "ended": 628},
        "episodes": {
            "started": 2560,
            "ended": 2512,
            "live": 48,
            "failed": 218,
            "evaluation": 768,
            "tokens": 1_812_345,
        },
        "rates": {"window_s": 60, "episodes_per_s": 1.4, "tokens_per_s": 1520.0},
        "lags": {"scheduler": 0, "agent": 3},
        "lags_problem": "",
        "dead_letters": 3,
        "failures": failures,
        "endings": {"finished": 2214, "turn_limit": 80, "failed": 218},
        "discarded": {"zero_variance": 96, "stale": 31, "no_reward": 218},
        "hints": [],
    }


def series() -> Answer:
    """`/api/series`."""
    versions = list(range(1, NEWEST + 1))

    def line(value: Callable[[int], float | None], spread: float = 0.0) -> Answer:
        means = [value(one) for one in versions]
        return {
            "mean": means,
            "low": [one if one is None else one - spread for one in means],
            "high": [one if one is None else one + spread for one in means],
        }

    made = {
        "reward": line(reward_of, 0.05),
        "staleness": line(lambda one: one % 3, 0.5),
        "tokens_per_s": line(lambda one: 1500 + 40 * (one % 7)),
        "wait_s": line(lambda one: 2.0 if one < BROKEN else 9.0),
        "step_s": line(lambda one: 4 + one % 2),
        "dropped": line(lambda one: 2 if one < BROKEN else 14),
        "samples": line(lambda one: 30 if one < BROKEN else 18),
    }
    return {
        "policy": "default",
        "names_known": [*made],
        "versions": versions,
        "first": versions,
        "at": [published(one) for one in versions],
        "series": made,
        "evaluation": [evaluation_of(one) for one in versions if one % 10 == 0],
    }


def times() -> Answer:
    """`/api/times`."""
    at = [NOW - 1800 + 15 * one for one in range(120)]
    broken = [one > published(BROKEN) - 40 for one in at]
    environment = [3 + number % 3 if bad else 0 for number, bad in enumerate(broken)]
    infrastructure = [1 if bad and number % 9 == 0 else 0 for number, bad in enumerate(broken)]
    return {
        "from": at[0],
        "to": NOW,
        "step_s": 15,
        "at": at,
        "episodes": [14 if bad else 21 + number % 4 for number, bad in enumerate(broken)],
        "tokens": [15000] * 120,
        "reward": [None] * 120,
        "failures": {"environment": environment, "infrastructure": infrastructure},
        "lag": {"at": at[-40:], "services": {"agent": [number % 5 for number in range(40)]}},
    }


def version_row(version: int) -> Answer:
    """One line of `/api/versions`."""
    broken = version >= BROKEN
    return {
        "version": version,
        "status": "trained",
        "at": published(version),
        "reward": reward_of(version),
        "samples": 18 if broken else 30,
        "dropped": 14 if broken else 2,
        "tokens": 5120,
        "staleness": 1,
        "wait_s": 9.0 if broken else 2.0,
        "step_s": 4.0,
        "metrics": metrics_of(version),
    }


def version(number: int) -> Answer | None:
    """`/api/versions/default/NUMBER`."""
    if not 1 <= number <= NEWEST:
        return None
    row = version_row(number)
    broken = number >= BROKEN
    chance = random.Random(number)
    samples: list[Answer] = [
        {
            "task": number * 8 + one // GROUP,
            "sample": one % GROUP,
            "ending": "finished",
            "turns": 3,
            "reward": float(chance.random() < row["reward"]),
            "tokens": chance.randint(80, 400),
            "versions": [number - 2, number - 1],
            "staleness": 1,
            "use": 0,
            "weight": 1.0,
            "gone": "",
            "advantages": [round(chance.uniform(-1, 1), 3)],
            "location": f"s.groups.default.v1/0@{one}",
        }
        for one in range(row["samples"])
    ]
    dropped = [
        {
            "task": number * 8 + 7 - one // GROUP,
            "sample": one % GROUP,
            "reason": "failed" if broken and one > 1 else "stale",
        }
        for one in range(row["dropped"])
    ]
    good = sum(one["reward"] for one in samples)
    weights = {
        "digest": "c0ffee" * 10,
        "base": "tiny-chat",
        "dtype": "float32",
        "format": "safetensors",
        "bytes": 8_123_400,
        "files": [
            {
                "role": "delta",
                "from": number - 1,
                "to": number,
                "sha256": SHA,
                "bytes": 812_340,
                "held": True,
            }
        ],
    }
    at = f"search-agent.policies.default.v1/0@{number}"
    return {
        "policy": "default",
        "version": number,
        "status": "trained",
        "at": published(number),
        "previous": number - 1 if number > 1 else None,
        "next": number + 1 if number < NEWEST else None,
        "batch": {
            "location": f"search-agent.batches.default.v1/0@{number}",
            "at": published(number),
            "reward": row["reward"],
            "tokens": 5120,
            "recipe": "ab12",
        },
        "samples": page(samples),
        "dropped": page(dropped),
        "publications": [
            {"at": published(number), "status": "trained", "location": at, "writer": "trainer-1"}
        ],
        "metrics": row["metrics"],
        "wait_s": row["wait_s"],
        "step_s": 4.0,
        "updates": 1,
        "weights": weights,
        "evaluation": evaluation_of(number) if number % 10 == 0 else None,
        "rewards": {
            "edges": [0, 0.25, 0.5, 0.75, 1],
            "counts": [len(samples) - int(good), 0, 0, int(good)],
        },
        "remarks": ["12 of 32 samples were left out because their episodes failed."]
        if broken
        else [],
    }
