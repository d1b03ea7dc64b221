"""The rules for agents: good ones keep them, and each fault breaks one by its name."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.services.agent.episode import Episode
from headrace.services.operate.conformance.agent.check_agent import check_agent

pytestmark = pytest.mark.slow

LEFT: list[asyncio.Task[None]] = []


async def good(episode: Episode) -> None:
    observation = await episode.reset()
    while not observation.done:
        drafts = await episode.gather(
            lambda: episode.new_conversation().generate("one"),
            lambda: episode.new_conversation().generate("two"),
        )
        chosen = episode.random.choice(drafts)
        episode.metrics["score"] = await episode.score("jury", {"answer": chosen.text})
        observation = await episode.step(chosen.text)


async def minds_its_limit(episode: Episode) -> None:
    observation = await episode.reset()
    while not observation.done and episode.turns_left:
        observation = await episode.step((await episode.generate(observation.text)).text)


async def shows_first(episode: Episode) -> None:
    observation = await episode.reset()
    await episode.generate("like this:", demonstration="d")
    while not observation.done:
        observation = await episode.step((await episode.generate(observation.text)).text)


class GoodTeam:
    """An agent that is a class, with an option and two roles."""

    def __init__(self, hint: str) -> None:
        self.hint = hint

    async def __call__(self, episode: Episode) -> None:
        observation = await episode.reset()
        while not observation.done:
            draft = await episode.generate(f"{self.hint} {observation.text}")
            await episode.generate(draft.text, role="critic")
            observation = await episode.step(draft.text)


async def raises(episode: Episode) -> None:
    await episode.reset()
    raise KeyError("lost")


async def never_looks(episode: Episode) -> None:
    await episode.reset()
    while True:
        await episode.step((await episode.generate("go on")).text)


async def forgets_to_await(episode: Episode) -> None:
    await episode.reset()
    episode.generate("who waits?")


async def asks_nobody(episode: Episode) -> None:
    observation = await episode.reset()
    while not observation.done:
        observation = await episode.step("a")


async def unbounded(episode: Episode) -> None:
    await plain(episode)
    episode.metrics["ratio"] = float("inf")


async def draws(episode: Episode) -> None:
    await episode.reset()
    await episode.generate(str(random.random()))


async def asyncio_gather(episode: Episode) -> None:
    async def branch(name: str) -> None:
        conversation = episode.new_conversation()
        await conversation.generate(name)
        await conversation.generate(f"{name} again")

    await episode.reset()
    await asyncio.gather(branch("one"), branch("two"))


class Shares:
    turns = 0

    async def __call__(self, episode: Episode) -> None:
        observation = await episode.reset()
        self.turns = 0
        while not observation.done:
            self.turns += 1
            generation = await episode.generate(f"turn {self.turns}")
            observation = await episode.step(generation.text)


class SharesWhatItReads:
    text = ""

    async def __call__(self, episode: Episode) -> None:
        observation = await episode.reset()
        while not observation.done:
            self.text = observation.text
            generation = await episode.generate("think")
            observation = await episode.step(f"{self.text} {generation.text}")


async def swallows(episode: Episode) -> None:
    with suppress(BaseException):
        await never_looks(episode)


async def hangs_on(episode: Episode) -> None:
    ends = time.monotonic() + 4
    while time.monotonic() < ends:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.1)
            await asyncio.shield(asyncio.ensure_future(episode.reset()))


async def blocks(episode: Episode) -> None:
    await plain(episode)
    time.sleep(0.6)


async def plain(episode: Episode) -> None:
    observation = await episode.reset()
    while not observation.done:
        observation = await episode.step((await episode.generate(observation.text)).text)


async def connects(episode: Episode) -> None:
    await plain(episode)
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", 9), timeout=0.1).close()


class KeepsALine:
    """It connects once, and keeps the connection."""

    line: socket.socket | None = None

    async def __call__(self, episode: Episode) -> None:
        if self.line is None:
            self.line = socket.socket()
            with self.line, suppress(OSError):
                self.line.connect(("127.0.0.1", 9))
        await plain(episode)


async def runs_a_program(episode: Episode) -> None:
    await plain(episode)
    subprocess.run([sys.executable, "-c", ""], check=True)


async def leaves_a_task(episode: Episode) -> None:
    LEFT.append(asyncio.create_task(asyncio.sleep(3600)))
    await plain(episode)


FAULTS: list[tuple[Callable[..., Any], str, str]] = [
    (raises, "plays_an_episode", "KeyError: 'lost'"),
    (never_looks, "plays_an_episode", "ended as 'turn_limit'"),
    (forgets_to_await, "plays_an_episode", "await"),
    (asks_nobody, "asks_a_policy", "asked no policy"),
    (unbounded, "rewards_are_finite", "ratio is inf"),
    (draws, "repeats_its_requests", "two episodes with the same answers differ"),
    (asyncio_gather, "continues_after_a_crash", ""),
    (Shares, "episodes_are_apart", "one beside others differ"),
    (SharesWhatItReads, "episodes_are_apart", "one beside others differ"),
    (swallows, "stops_at_its_limit", "ended as 'finished'"),
    (swallows, "passes_failures_on", "ended as 'finished'"),
    (hangs_on, "ends_when_cancelled", "the asyncio task"),
    (hangs_on, "ends_at_its_deadline", "the asyncio task"),
    (blocks, "blocks_no_loop", "blocked the asyncio loop for"),
    (connects, "stays_inside", "socket.connect"),
    (KeepsALine, "stays_inside", "socket.connect"),
    (runs_a_program, "stays_inside", "subprocess.Popen"),
    (leaves_a_task, "leaves_nothing", "the asyncio task"),
]


def check(made: Callable[..., Any], **changes: Any) -> Any:
    return check_agent(f"{made.__module__}:{made.__name__}", changes.pop("options", {}), **changes)


@pytest.mark.parametrize(
    ("made", "changes"),
    [
        (good, {"judges": ["jury"]}),
        (plain, {"steps": 5, "answers": ["left", "right"]}),
        (minds_its_limit, {}),
        (shows_first, {}),
        (GoodTeam, {"options": {"hint": "look"}, "roles": ["policy", "critic"]}),
    ],
)
def test_a_good_agent_keeps_all_rules(made: Callable[..., Any], changes: dict[str, Any]) -> None:
    report = check(made, **changes)
    assert [one for one in report.findings if one.verdict != "pass"] == []


@pytest.mark.parametrize(
    ("made", "rule", "says"), FAULTS, ids=[f"{one[0].__name__}-{one[1]}" for one in FAULTS]
)
def test_a_fault_breaks_its_rule(made: Callable[..., Any], rule: str, says: str) -> None:
    report = check(made, rules=[rule])
    assert report.failed == (rule,)
    assert says in report.findings[0].happened


def test_each_rule_has_a_fault() -> None:
    assert {one.rule for one in check(plain).findings} == {rule for _, rule, _ in FAULTS}


def test_a_connection_of_an_earlier_rule_counts() -> None:
    assert check(KeepsALine, rules=["plays_an_episode", "stays_inside"]).failed == ("stays_inside",)


def test_an_agent_may_say_that_it_connects() -> None:
    report = check(connects, rules=["stays_inside"], connects=True)
    assert [one.verdict for one in report.findings] == ["not checked"]


def test_what_can_not_be_made_fails_once() -> None:
    report = check(GoodTeam)
    assert report.failed == ("plays_an_episode",)
    assert "missing 1 required positional argument: 'hint'" in report.findings[0].happened


@pytest.mark.long
@pytest.mark.parametrize("use", ["multi_turn", "single_turn", "chat"])
def test_built_in_agents_keep_the_rules(use: str) -> None:
    report = check_agent(use, {})
    assert report.failed == (), "\n".join(report.lines())


def test_what_can_not_be_tried_is_refused() -> None:
    with pytest.raises(UsageError, match="no rule 'speed'"):
        check(plain, rules=["speed"])
    with pytest.raises(UsageError, match="no agent 'speed'"):
        check_agent("speed", {})
    with pytest.raises(UsageError, match="through the gateway"):
        check_agent("client", {})
