"""Rules are tried one after the other, and nothing that a plug-in does can hang the check."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import pytest

from headrace.services.operate.conformance.conformance_report import (
    NotChecked,
    Rule,
    Violation,
    check_rules,
)


async def _good() -> None:
    await asyncio.sleep(0)


async def _bad() -> None:
    raise Violation("it did not")


async def _unknown() -> None:
    raise NotChecked("it can't")


async def _raises() -> None:
    raise KeyError("x")


async def _times_out() -> None:
    raise TimeoutError("mine")


async def _sleeps() -> None:
    await asyncio.sleep(60)


async def _blocks() -> None:
    time.sleep(60)


def _rule(check: Callable[[], Awaitable[None]], limit_s: float = 5.0) -> Rule:
    return Rule(check.__name__.strip("_"), "It does.", "Do it.", check, limit_s)


def test_each_rule_has_a_verdict() -> None:
    report = check_rules("engine", "mine", [*map(_rule, (_good, _bad, _unknown, _raises))])
    assert [one.verdict for one in report.findings] == ["pass", "fail", "not checked", "fail"]
    assert [one.happened for one in report.findings] == [
        "", "it did not", "it can't", "it raised KeyError: 'x'",
    ]  # fmt: skip
    assert report.failed == ("bad", "raises")
    assert "to do:    Do it." in "\n".join(report.lines())
    assert json.loads(json.dumps(report.as_json()))["rules"][1]["happened"] == "it did not"


def test_a_rule_that_hangs_breaks_and_the_next_is_tried() -> None:
    rules = [_rule(_sleeps, 0.1), _rule(_times_out), _rule(_good)]
    first, second, third = check_rules("engine", "mine", rules).findings
    assert (first.verdict, first.happened) == ("fail", "it did not return within 0.1 s")
    assert second.happened == "it raised TimeoutError: mine"
    assert third.verdict == "pass"


def test_after_a_rule_that_blocks_the_others_are_not_checked() -> None:
    first, second = check_rules("engine", "mine", [_rule(_blocks, 0.1), _rule(_good)]).findings
    assert first.happened == "it did not return within 0.1 s, and blocks the asyncio loop"
    assert (second.verdict, second.happened) == (
        "not checked",
        "after the rule blocks nothing runs in the asyncio loop",
    )


async def _exits() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    await asyncio.gather(leave())


def test_a_plug_in_that_exits_breaks_its_rule() -> None:
    first, second = check_rules("engine", "mine", [_rule(_exits), _rule(_good)]).findings
    assert (first.verdict, first.happened) == ("fail", "it raised SystemExit: 3")
    assert second.verdict == "not checked"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace.conformance", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


@pytest.mark.slow
def test_the_command_prints_rules_and_exits_with_their_verdict() -> None:
    names = ("--rule", "stops_at_max_tokens", "--rule", "logprobs_are_right")
    tried = _run("engine", "scripted", "--option", "tokens=[3, 5]", "--json", *names)
    assert tried.returncode == 1, tried.stderr
    assert [one["verdict"] for one in json.loads(tried.stdout)["rules"]] == ["pass", "fail"]
    assert "trying logprobs_are_right" in tried.stderr.splitlines()
    wrong = _run("engine", "nothing")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "no engine 'nothing'" in wrong.stderr
