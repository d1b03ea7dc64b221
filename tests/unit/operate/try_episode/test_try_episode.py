"""Episodes that are tried in the terminal: by hand, by chance, and by a model."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from headrace.services.operate import cli

LAKE = ("quickstart", "--set", "tasks.options.same=true")
PARTS = "tests.unit.operate.check.parts"


def entering(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    rest = iter(lines)

    def read(_: Any) -> str:
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(builtins, "input", read)


def tried(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert cli._run(["try", *arguments]) == code
    shown = capsys.readouterr()
    return shown.out + shown.err


def test_an_episode_by_hand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entering(monkeypatch, *"DDXRDRR")
    shown = tried(capsys, *LAKE)
    assert "can't answer this: the demonstration has token 88, which is not allowed" in shown
    assert "-- the policy default answers (1 tokens)\n   D\n-- the agent acts\n   D\n" in shown
    assert "-- the environment answers (reward 1, terminated)" in shown
    assert "-- the episode ended: finished, reward 1, attempts 1\n" in shown


def test_the_end_of_the_input_cancels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entering(monkeypatch, "D")
    shown = tried(capsys, *LAKE)
    assert "the episode ended: cancelled, no reward, attempts 1\n   no more answers" in shown


@pytest.mark.parametrize("by", ["random", "model"])
def test_an_episode_by_chance_and_by_the_model(by: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = tried(capsys, *LAKE, "--by", by, "--item", "3", "--set", "tasks.max_turns=4")
    assert "-- the policy default answers (1 tokens)" in shown
    assert "the episode ended: " in shown


def test_a_failing_environment_is_shown_with_its_attempts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    own = ("--set", f"environments.default.use={PARTS}:NoneFromStep", "--set")
    options = ("environments.default.options={}", "--by", "random")
    shown = tried(capsys, "quickstart", *own, *options, code=1)
    assert "-- failed: environment: no_observation\n   step returned None" in shown
    assert "the episode ended: failed, no reward, attempts 3" in shown
    assert "error: the episode ended as 'failed'; its last lines say why" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("null", "--item", "64"), "--item 64: the data set 'count' has fewer items"),
        (("null", "--by", "random"), "policies.default.sampling.allowed, which is empty"),
        (
            ("null", "--set", "agents.default.use=client", "--set", "tasks.environment=false"),
            "waits for clients of a gateway",
        ),
    ],
)
def test_what_can_not_be_tried_says_why(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in tried(capsys, *arguments, code=2)
