"""The answers of the dashboard's server that list what a run has."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.browser import recorded_run as run
from tests.browser.recorded_run import GROUP, HOSTILE, Answer, page


def episode_row(number: int) -> Answer:
    """One line of `/api/episodes`, the newest first."""
    chance = random.Random(number)
    failed = number % 5 == 0
    return {
        "task": 640 - number // GROUP,
        "sample": number % GROUP,
        "item_id": f"question-{number // 8}",
        "purpose": "train",
        "state": "ended",
        "ended_at": run.NOW - 20 - number * 0.7,
        "ending": "failed" if failed else "finished",
        "reward": None if failed else float(chance.random() < 0.3),
        "tokens": chance.randint(60, 900),
        "turns": chance.randint(1, 6),
        "seconds": chance.uniform(1, 9),
        "attempts": 1,
        "oldest_version": 58,
        "newest_version": 60,
        "tools": ["search", "read"],
        "tool_failures": 1 if failed else 0,
        "snippet": None,
        "failure": {"origin": "environment", "code": "tool_timeout"} if failed else None,
        "trained_in": {} if failed else {"default": 60},
    }


def episodes(asked: dict[str, str]) -> Answer:
    """`/api/episodes`, with the filters that the tests use."""
    rows = [episode_row(number) for number in range(400)]
    if asked.get("tool_failed"):
        rows = [one for one in rows if one["tool_failures"]]
    if asked.get("reward_min"):
        rows = [one for one in rows if (one["reward"] or 0) >= float(asked["reward_min"])]
    if asked.get("text"):
        rows = [dict(one, snippet=f"… {asked['text']} {HOSTILE} …") for one in rows[:3]]
    order = asked.get("order", "-ended")
    key = {"ended": "ended_at"}.get(order.lstrip("-"), order.lstrip("-"))
    known = [one for one in rows if one[key] is not None]
    known.sort(key=lambda one: one[key], reverse=order.startswith("-"))
    rows = [*known, *(one for one in rows if one[key] is None)]
    start = int(asked.get("cursor", 0))
    last = start + int(asked.get("limit", 50))
    return {
        "items": rows[start:last],
        "total": len(rows),
        "next": str(last) if last < len(rows) else None,
    }


def tools() -> Answer:
    """`/api/tools`."""
    rows = [("search", 1830, 212, 2.4), ("read", 1422, 9, 0.2), ("calculate", 300, 0, 0.01)]
    return page(
        [
            {
                "tool": tool,
                "calls": calls,
                "failed": failed,
                "share": failed / calls,
                "seconds_mean": took,
                "example": {"task": 17, "sample": 2} if failed else None,
            }
            for tool, calls, failed, took in rows
        ]
    )


def discarded(asked: dict[str, str]) -> Answer:
    """`/api/discarded`."""
    kinds = {"zero_variance": "group", "stale": "batch", "no_reward": "sample"}
    counts = run.run()["discarded"]
    reasons = [
        {
            "policy": "default",
            "reason": reason,
            "kind": kind,
            "count": counts[reason],
            "first": run.NOW - 1500,
            "last": run.NOW - 30,
        }
        for reason, kind in kinds.items()
    ]
    items = [
        {
            "policy": "default",
            "reason": reason,
            "kind": kinds[reason],
            "task": 600 - one,
            "version": 59,
            "sample": -1 if kinds[reason] == "group" else one % GROUP,
            "at": run.NOW - 30 - one,
        }
        for one, reason in enumerate([*kinds] * 12)
        if asked.get("reason") in (None, reason)
    ]
    return page(items, reasons=reasons)


def waits() -> Answer:
    """`/api/waits`: two causes, one of which stops the trainer."""

    def one(
        id: str, kind: str, name: str, ago: float, on: list[str], cause: str, help: str
    ) -> Answer:
        return {
            "id": id,
            "kind": kind,
            "name": name,
            "since": run.NOW - ago,
            "on": on,
            "cause": cause,
            "help": help,
            "busy": False,
        }

    def asked() -> Iterator[Answer]:
        for sample in range(4):
            name = f"action of episode 631/{sample}"
            yield one(
                f"episode/631/{sample}",
                "episode",
                f"episode 631/{sample}",
                250 - sample,
                [f"action/631/{sample}"],
                "it has asked for something and has no answer",
                f"headrace show 631/{sample}",
            )
            yield one(
                f"action/631/{sample}",
                "action",
                name,
                249 - sample,
                ["worker/env-2"],
                "no worker has answered",
                f"headrace show 631/{sample}",
            )

    chains = [
        one(
            "trainer/default",
            "trainer",
            "trainer of default",
            241,
            ["batch/default/61"],
            "it waits for the batch of version 61",
            "headrace status",
        ),
        one(
            "batch/default/61",
            "batch",
            "batch of version 61",
            240,
            ["group/631", "group/632"],
            "3 of 8 groups have not ended",
            "headrace status",
        ),
        one(
            "group/631",
            "group",
            "group of task 631",
            252,
            [f"episode/631/{sample}" for sample in range(4)],
            "its episodes have not ended",
            "headrace show 631",
        ),
        one(
            "group/632",
            "group",
            "group of task 632",
            98,
            ["episode/632/0"],
            "its episodes have not ended",
            "headrace show 632",
        ),
        *asked(),
        one(
            "episode/632/0",
            "episode",
            "episode 632/0",
            97,
            ["prompt/632/0"],
            "it has asked for something and has no answer",
            "headrace show 632/0",
        ),
        one(
            "prompt/632/0",
            "prompt",
            "prompt of episode 632/0",
            96,
            ["worker/inference-1"],
            "it is in the queue of inference-1",
            "headrace show 632/0",
        ),
        one(
            "worker/env-2",
            "worker",
            "worker env-2",
            256,
            [],
            "env-2 has not been seen for 4 min and no other worker serves the environment `search`",
            "headrace serve env --environment search",
        ),
        one(
            "worker/inference-1",
            "worker",
            "worker inference-1",
            95,
            [],
            "all of its 16 slots are in use",
            "add a worker: `headrace serve inference` on another host, or raise "
            "`policies.default.slots`",
        ),
    ]
    return {
        "at": run.NOW,
        "waits": sorted(chains, key=lambda each: (not each["on"], each["since"])),
    }


def workers() -> Answer:
    """`/api/workers`."""

    def one(
        name: str, service: str, alive: bool, pools: list[Answer], environments: list[Answer]
    ) -> Answer:
        return {
            "worker": name,
            "service": service,
            "policy": "",
            "host": f"host-{name[-1]}",
            "state": "ready",
            "since": run.NOW - 1890,
            "seen_at": run.NOW - (1 if alive else 256),
            "alive": alive,
            "suspected": not alive,
            "leaving": False,
            "reason": "" if alive else "no heartbeat",
            "pools": pools,
            "environments": environments,
        }

    pool = {
        "policy": "default",
        "slots": 16,
        "busy": 16,
        "waiting": 4,
        "seconds": 0.9,
        "version": 60,
    }
    lake = {
        "environment": "search",
        "slots": 32,
        "busy": 12,
        "waiting": 0,
        "seconds": 0.2,
        "open_seconds": 1.0,
    }
    return {
        "workers": [
            one("inference-1", "inference", True, [pool], []),
            one("env-1", "env", True, [], [lake]),
            one("env-2", "env", False, [], [dict(lake, busy=0)]),
            one("agent-1", "agent", True, [], []),
        ],
        "workers_total": 4,
        "sandboxes": [
            {
                "instance": f"631/{one}",
                "worker": "env-2",
                "host": "host-2",
                "state": "running",
                "since": run.NOW - 300,
                "age_s": 300 + one,
                "reason": "",
            }
            for one in range(4)
        ],
        "sandboxes_total": 4,
        "versions": {"default": {"newest": 60, "served": {"60": 1}}},
    }


def compare_runs(other: str) -> Answer:
    """`/api/compare` of this run and another one, which has hostile texts."""
    names = ("search-agent", other)
    rewards: list[list[float | None]] = [
        [(one + 20 * place) / 80 for one in range(60)] for place in range(2)
    ]
    rewards[1][40:] = [None] * 20
    return {
        "kind": "runs",
        "policy": "default",
        "notes": [f"{other} is not a replay. Its figures are measured on its own episodes."],
        "versions": list(range(1, 61)),
        "metrics": {"reward_mean": rewards, "grad_norm": [[0.5] * 60, [0.25] * 60]},
        "runs": [
            {
                "name": name,
                "replay_of": None,
                "newest": 60 - 20 * place,
                "changes": [f'tasks.use: "<b>a</b>" -> "{name}"'] * place,
                "differences": ["weights: differ from version 1 on"] * place,
                "means": {"reward_mean": 0.7 - 0.1 * place, "grad_norm": 0.5},
            }
            for place, name in enumerate(names)
        ],
    }


def compare(first: int, second: int) -> Answer:
    """`/api/compare` of two versions."""

    def side(number: int) -> Answer:
        found = run.version(number)
        broken = number >= run.BROKEN
        assert found is not None
        return {
            "name": f"version {number}",
            "version": number,
            "metrics": found["metrics"],
            "rewards": found["rewards"],
            "endings": {"finished": 20 if broken else 32, "failed": 12 if broken else 0},
            "failures": {"environment tool_timeout": 12 if broken else 0},
            "tools": {
                "search": {"calls": 40, "failed": 31 if broken else 1},
                "read": {"calls": 31, "failed": 0},
            },
            "tokens_mean": 240.5,
            "turns_mean": 3.2,
            "seconds_mean": 8.1 if broken else 3.1,
            "episodes": 32,
            "evaluation": found["evaluation"],
        }

    items = [
        {
            "item_id": f"question-{one}",
            "first": {"reward": 0.75, "episodes": 4},
            "second": {"reward": 0.05 * one, "episodes": 4},
            "difference": 0.05 * one - 0.75,
        }
        for one in range(8)
    ]
    return {
        "kind": "versions",
        "policy": "default",
        "sides": [side(first), side(second)],
        "items": items,
    }
