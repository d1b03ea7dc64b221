"""Usual mistakes in recipes and in the code that they name: each has one clear message."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from headrace.errors import UsageError
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.services.operate import cli
from headrace.services.operate.check import checking
from headrace.services.operate.check.check import try_recipe
from headrace.services.operate.processes import NEVER_BORN, Process, headrace_command, spawn
from headrace.services.operate.serve import loop_watch

PARTS = f"{__name__.rpartition('.')[0]}.parts"


def tree(**changes: Any) -> dict[str, Any]:
    """A recipe that can be used, with changes by dotted names; `__` is the dot."""
    made: dict[str, Any] = {
        "name": "mine",
        "tasks": {"use": "count", "options": {"items": 2}, "samples": 4},
        "environments": {"default": {"use": f"{PARTS}:World"}},
        "policies": {
            "default": {
                "model": "tiny-llama",
                "engine": {"use": "scripted"},
                "training": {"device": "cpu"},
            }
        },
    }
    for name, value in changes.items():
        *path, last = name.split("__")
        table = made
        for part in path:
            table = table.setdefault(part, {})
        table[last] = _named(value)
    return made


def _named(value: Any) -> Any:
    """A value in which `:name` is a part of `parts.py`."""
    if isinstance(value, str):
        return f"{PARTS}{value}" if value.startswith(":") else value
    if isinstance(value, dict):
        return {name: _named(one) for name, one in value.items()}
    return [_named(one) for one in value] if isinstance(value, list) else value


def tried(**changes: Any) -> list[str]:
    """What is announced."""
    announced: list[str] = []
    asyncio.run(try_recipe(parse_recipe(tree(**changes), "test"), announced.append))
    return announced


def test_a_recipe_whose_parts_can_all_be_used() -> None:
    announced = tried(
        agents__default__use=":OwnAgent", agents__default__options={"name": "x"},
        environments__default__options={"highest": 5},
        tasks__use=":items", tasks__options={"count": 1},
    )  # fmt: skip
    assert "trying environments.default: World.step" in announced
    assert announced[-1] == "trying policies.default.training.loss 'grpo'"


def test_an_environment_that_rewards_at_the_end_needs_a_reward_of_the_unfinished() -> None:
    def notes(**changes: Any) -> list[str]:
        return [one for one in tried(**changes) if "agents.default.unfinished_reward" in one]

    assert len(notes()) == 1
    assert len(notes(environments__default__use=":Unrewarded")) == 1
    assert notes(agents__default__unfinished_reward=0.0) == []
    assert notes(environments__default__use=":RewardedEachStep") == []


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"policies__default__model": "no-such-folder"}, "policies.default.model: .*no-such-folder"),
    ({"policies__default__engine": {"use": "torsh"}}, "no engine 'torsh'. Use .*torch"),
    ({"policies__default__sampling": {"allowed": ["L", "left"]}}, "sampling: .*'left'"),
    ({"tasks__use": "jsonk"}, "tasks.use 'jsonk': no data set 'jsonk'. Use .*jsonl"),
    ({"tasks__use": "jsonl", "tasks__options": {"path": "no.jsonl"}}, "can't read .*no.jsonl"),
    ({"tasks__options": {"itms": 2}}, "'count': got an unexpected .*'itms'. Its options are items"),
    ({"tasks__use": ":dictionaries", "tasks__options": {}}, "yielded a dict, not an Item"),
    ({"tasks__use": ":raises", "tasks__options": {}}, r"ZeroDivisionError: .*parts.py:\d+, in rai"),
    ({"tasks__use": ":not_json", "tasks__options": {}}, "not JSON serializable"),
    ({"tasks__use": "no_such_module:items"}, "needs the module 'no_such_module'"),
    ({"tasks__use": ":item"}, "has no 'item'"),
    ({"agents__default__use": "multi-turn"}, "no agent 'multi-turn'. Use .*multi_turn"),
    ({"agents__default__use": ":not_async_agent"}, "agents.default.use is not an async function"),
    ({"agents__default__use": ":OwnAgent"}, "agents.default.options: .*'name'"),
    (
        {"agents__default__use": ":OwnAgent", "agents__default__options": {"nam": "x"}},
        "agents.default.options: .*'nam'",
    ),
    ({"environments__default__use": "gymnasim"}, "no environment 'gymnasim'. Use .*gymnasium"),
    ({"environments__default__use": ":Word"}, "has no 'Word'"),
    (
        {"environments__default__options": {"higest": 1}},
        r"environments.default.options don't fit World: .*'higest'$",
    ),
    ({"environments__default__options": {"highest": 0}}, "ValueError: highest must be positive"),
    (
        {
            "environments__default__use": "gymnasium",
            "environments__default__options": {"id": "FrozenLake-v7", "actions": {"L": 0}},
        },
        "environment id 'FrozenLake-v7'",
    ),
    (
        {
            "environments__default__use": "gymnasium",
            "environments__default__options": {"id": "FrozenLake-v1", "actions": {"L": 9}},
        },
        "actions: 'L' is 9, which is not in",
    ),
    ({"environments__default__use": ":NoReplayable"}, "no attribute `replayable`: set it to True"),
    ({"environments__default__use": ":NoStep"}, "NoStep has no method step: add `async def step"),
    ({"environments__default__use": ":NoClose"}, "NoClose has no method aclose: add `async def"),
    (
        {
            "environments__default__use": ":NoReplayable",
            "environments__default__options": {"coins": 3},
        },
        "environments.default.options don't fit NoReplayable: .*'coins'$",
    ),
    ({"environments__default__use": ":NotAsync"}, "NotAsync.step is not an async function"),
    ({"environments__default__use": ":RaisesInReset"}, r"reset: KeyError: 'absent' \(.*, in reset"),
    ({"environments__default__use": ":RaisesInStep"}, r"step: ValueError: .*, in step\)"),
    (
        {"environments__default__use": ":NoneFromStep"},
        "environments.default: NoneFromStep.step returned None, but it",
    ),
    (
        {"environments__default__use": ":TextFromReset"},
        "reset returned a str, but it must",
    ),
    ({"environments__default__use": ":NumberAsText"}, "`text` is a int, not a str"),
    ({"environments__default__use": ":RewardOfText"}, "reward is a str, not a float"),
    ({"environments__default__use": ":RewardNotFinite"}, "reward is nan, not finite"),
    ({"environments__default__use": ":DataNotJson"}, "`data` is not JSON: .*object"),
    ({"tasks__curators": ["gresso"]}, "tasks.curators 'gresso': no curator 'gresso'. Use "),
    ({"tasks__curators": [{"use": "greso", "windw": 1}]}, "windw: no such key. Its options are"),
    ({"policies__default__groups": {"advantage": "grp"}}, "no advantage 'grp'. Use .*grpo"),
    ({"policies__default__groups": {"advantage": ":few"}}, "gave 1 values for the 4 rewards"),
    ({"policies__default__groups": {"advantage": ":infinite"}}, "Make it return finite float32"),
    ({"policies__default__groups": {"advantage": ":advantage_raises"}}, "AttributeError: 'tuple' "),
    (
        {"policies__default__groups": {"filters": ["zero"]}},
        "no filter 'zero'. Use mean_reward, zero_advantage",
    ),
    ({"policies__default__groups": {"filters": [":filter"]}}, "has no 'filter'|no filter"),
    ({"policies__default__groups": {"filters": [":filter_of_bool"]}}, "bool' returned True for"),
    ({"policies__default__training__loss": ":few"}, r"TypeError: few\(\) takes 1 .* were given$"),
    ({"policies__default__training__loss": "ppg"}, "loss 'ppg': no loss 'ppg'. Use .*gspo"),
    (
        {"policies__default__training__loss": {"use": "gspo", "cliplow": 0.1}},
        "policies.default.training.loss 'gspo': .*cliplow: no such key. Its options are reduction",
    ),
    (
        {"policies__default__training__loss": {"use": ":of_each", "clip_low": 0.1}},
        "clip_low: no such key. Its options are reduction, constant",
    ),
    ({"policies__default__training__loss": ":detached"}, "its terms have no gradient"),
    ({"policies__default__training__loss": ":of_all"}, r"shape \(\) for 4 tokens: return the loss"),
    ({"policies__default__training__loss": ":number"}, "it returned float for 4 tokens"),
    ({"policies__default__training__loss": ":nan"}, "the sum of its terms is nan for finite"),
    (
        {"policies__default__groups": {"advantage": {"use": "turn_returns", "discunt": 1}}},
        "policies.default.groups: advantage 'turn_returns': discunt: no such key",
    ),
    ({"policies__default__groups": {"advantage": ":OneTurn"}}, "3 values for the 2 turns"),
    (
        {"policies__default__groups": {"filters": [{"use": "zero_advantage", "a": 1}]}},
        "filter 'zero_advantage' has no options, but the recipe gives it a",
    ),
    ({"policies__default__training__loss": ":loss_raises"}, "AttributeError: .*old_logprobs"),
]


@pytest.mark.parametrize(("changes", "match"), MISTAKES, ids=range(len(MISTAKES)))
def test_a_mistake_is_named(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        tried(**changes)


QUICKLY_FOUND: list[dict[str, Any]] = [
    {"policies__default__model": "no-such-folder"},
    {"policies__default__sampling": {"allowed": ["no such token"]}},
    {"tasks__use": "no_such_module:items"},
    {"agents__default__use": ":NoSuchAgent"},
    {"environments__default__use": ":NoSuchWorld"},
    {"environments__default__use": ":RaisesInStep"},
]


@pytest.mark.parametrize("changes", QUICKLY_FOUND, ids=lambda changes: next(iter(changes)))
def test_what_takes_seconds_is_tried_last(changes: dict[str, Any]) -> None:
    """Engines and losses import torch."""
    announced: list[str] = []
    recipe = parse_recipe(tree(**changes), "test")
    with pytest.raises(UsageError):
        asyncio.run(try_recipe(recipe, announced.append))
    assert announced
    assert not [line for line in announced if "engine" in line or "loss" in line]


@pytest.mark.parametrize(
    ("updates", "noted"), [({}, 1), ({"minibatches": 2}, 0), ({"epochs": 2}, 0)]
)
def test_a_clip_that_has_no_effect_is_noted(updates: dict[str, int], noted: int) -> None:
    loss = {"use": "grpo", "clip_high": 0.28}
    announced = tried(policies__default__training={"device": "cpu", "loss": loss, **updates})
    found = [one for one in announced if "`clip_high` of 'grpo' has no effect" in one]
    assert len(found) == noted


@pytest.mark.parametrize(("live", "staleness", "noted"), [(64, 8, 0), (65, 8, 1), (640, 0, 0)])
def test_more_batches_in_flight_than_the_staleness_allows_are_noted(
    live: int, staleness: int, noted: int
) -> None:
    announced = tried(
        tasks__samples=8,
        scheduler={"live_episodes": live},
        policies__default__batches={"groups": 8, "max_staleness": staleness},
    )
    assert len([one for one in announced if "batches of policies.default" in one]) == noted


def test_replayed_groups_take_no_room_in_flight() -> None:
    batches = {"groups": 8, "max_staleness": 8, "replay": {"share": 0.25}}
    announced = tried(
        tasks__samples=8, scheduler={"live_episodes": 64}, policies__default__batches=batches
    )
    assert [one for one in announced if "1.33 batches of policies.default" in one]


@pytest.mark.parametrize(("kept", "noted"), [(7, 0), (8, 1)])
def test_a_selection_that_keeps_all_samples_is_noted(kept: int, noted: int) -> None:
    groups = {"select": {"use": "best_of", "samples": kept}}
    announced = tried(tasks__samples=8, policies__default__groups=groups)
    assert len([one for one in announced if "so it keeps all" in one]) == noted


def test_what_is_not_there_yet_is_left_out() -> None:
    announced = tried(environments__default__use=":NotThereYet")
    assert "NotThereYet.reset can't be tried now: unreachable: the server" in "\n".join(announced)


def test_a_reason_that_parts_share_is_said_once() -> None:
    announced = tried(
        environments__default__use=":UnreachableWorld", environments__other__use=":UnreachableWorld"
    )
    (reason,) = (line for line in announced if "unreachable" in line)
    assert f"{reason.partition(':')[0].replace('default', 'other')}, either" in announced


def test_a_step_that_blocks_the_event_loop_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop_watch, "LIMIT_S", 0.2)
    monkeypatch.setattr(loop_watch, "SAMPLE_S", 0.02)
    tried(environments__default__use=":BlocksInStep")
    assert "BlocksInStep.step" in caplog.text


@pytest.mark.parametrize("use", ["chat", "client", "command"])
def test_a_model_that_can_not_answer_messages_is_noted(use: str) -> None:
    agent = {"use": use, "options": {"command": ["true"]} if use == "command" else {}}
    noted = "\n".join(tried(agents__default=agent))
    assert "model of policies.default has no chat template" in noted
    assert "add chat_template.jinja to" in noted
    fits = "\n".join(tried(agents__default=agent, policies__default__model="tiny-chat"))
    assert "chat template" not in fits
    assert "chat template" not in "\n".join(tried())


def check_in_child(folder: Path, **changes: Any) -> None:
    path = folder / "recipe.json"
    path.write_text(parse_recipe(tree(**changes), "test").canonical())
    asyncio.run(checking.check_in_child(path, spawn, lambda line: None))


@pytest.mark.slow
def test_a_part_that_ends_the_process_is_an_error(tmp_path: Path) -> None:
    check_in_child(tmp_path, policies__default__training=False)
    with pytest.raises(UsageError, match=r"(?s)exit code 3.*Exits\.reset"):
        check_in_child(tmp_path, environments__default__use=":Exits")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_ends_a_part_that_blocks_and_all_that_it_started(
    tmp_path: Path, number: signal.Signals
) -> None:
    path = tmp_path / "recipe.json"
    recipe = parse_recipe(tree(environments__default__use=":Blocks"), "test")
    path.write_text(recipe.canonical())
    command = headrace_command("check", str(path), "--offline")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as check:
        assert check.stdout is not None
        child = next(line for line in check.stdout if line.startswith("child")).split()[1]
        began = time.monotonic()
        os.killpg(check.pid, number)
        _, said = check.communicate(timeout=30)
    assert time.monotonic() - began < 5
    assert not psutil.pid_exists(int(child))
    if number == signal.SIGINT:
        assert (check.returncode, said.splitlines()[-1]) == (130, "interrupted")


@pytest.mark.slow
def test_a_part_that_crashes_the_check_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(parse_recipe(tree(environments__default__use=":Crashes"), "test").canonical())
    assert cli._run(["check", str(path), "--offline"]) == 1
    assert "error: SIGKILL ended the check" in capsys.readouterr().err


def test_a_data_set_without_an_item_is_noted() -> None:
    assert "warning: the data set 'count' has no item: a run ends at once" in tried(
        tasks__options={"items": 0}
    )


def test_an_environment_without_aclose_makes_one_error(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UsageError):
        tried(environments__default__use=":NoClose")
    assert caplog.records == []


def test_what_can_not_be_reached_yet_is_left_out() -> None:
    announced = tried(
        agents__default__use=":UnreachableAgent", environments__default__use=":UnreachableWorld"
    )
    assert "agents can't be tried now: the Hub does not answer" in announced
    assert (
        "environments.default can't be tried now: unreachable: its server does not answer"
        in announced
    )
    assert announced[-1] == "trying policies.default.training.loss 'grpo'"


def test_a_part_that_hangs_is_noted_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "SLOW_S", 0.1)
    monkeypatch.setattr(checking, "LIMIT_S", 0.3)
    pids: list[int] = []
    notes: list[str] = []

    async def start(_: Sequence[str], parent: int, output: int) -> Process:
        said = "echo trying the reset; echo a warning; exec sleep 600"
        process = await spawn(["sh", "-c", said], parent, output)
        pids.append(process.pid)
        return process

    with pytest.raises(UsageError, match=r"the reset did not return within 0 s"):
        asyncio.run(checking.check_in_child(Path("r.json"), start, notes.append))
    assert notes[0] == "checking the recipe: the reset has not returned for 0 s"
    assert not psutil.pid_exists(pids[0])


def test_what_a_part_leaves_running_does_not_hold_the_check_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checking, "SLOW_S", 0.1)
    monkeypatch.setattr(checking, "LIMIT_S", 1.0)
    pids: list[int] = []

    async def start(_: Sequence[str], parent: int, output: int) -> Process:
        process = await spawn(["sh", "-c", "echo trying the reset; sleep 600 &"], parent, output)
        pids.append(process.pid)
        return process

    try:
        asyncio.run(checking.check_in_child(Path("r.json"), start, lambda line: None))
    finally:
        os.killpg(pids[0], signal.SIGKILL)


@pytest.mark.slow
def test_a_check_whose_preloader_dies_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(parse_recipe(tree(policies__default__training=False), "test").canonical())

    class Unborn:
        returncode = NEVER_BORN
        pid = None

        async def wait(self) -> int:
            return NEVER_BORN

    async def start(_: Sequence[str], parent: int, output: int) -> Any:
        return Unborn()

    asyncio.run(checking.check_in_child(path, start, lambda line: None))
