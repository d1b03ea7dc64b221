"""Episodes as chat messages: branches, tools, what may be learned, and what is left out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from headrace.schemas.events import TrajectoryRecorded, Turn
from headrace.services.namespace.cluster_config import read_recipe
from headrace.services.operate.sft.sft_rows import read_row
from headrace.services.operate.trajectories.export_sft import Selection
from headrace.services.operate.trajectories.recorded_episodes import (
    Prompts,
    RecordedEpisode,
    UnpackedTurn,
)
from headrace.services.operate.trajectories.sft import (
    SftFile,
    conversation_of,
    learned_paths,
    tool_format,
)

RECIPE = read_recipe("quickstart")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = 'So: <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
SYSTEM = {"role": "system", "content": "Be brief."}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def policy(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def context(text: str) -> dict[str, Any]:
    """An answer from which nothing is learned."""
    return {**policy(text), "weight": 0}


def an_episode(
    *turns: tuple[int, str, bool],
    reward: float | None = 1.0,
    purpose: Literal["train", "evaluate"] = "train",
) -> RecordedEpisode:
    """An episode of turns with parent, text and whether they are trainable."""
    made = [
        Turn(parent=parent, call=str(index), policy="default", text=text, trainable=trainable)
        for index, (parent, text, trainable) in enumerate(turns)
    ]
    recorded = TrajectoryRecorded(
        task=17, sample=3, attempt=1, source="train", task_id="a", item_id="a", agent="default",
        purpose=purpose, turns=tuple(made), reward=reward, ending="finished",
        started=1_000, ended=2_000,
    )  # fmt: skip
    unpacked = tuple(
        UnpackedTurn(one, [1], [7], [], [], "<|markup|>", f"{one.text}<|end|>", 1) for one in made
    )
    return RecordedEpisode("exp", recorded, unpacked, ())


def asked(*chats: Mapping[str, Any]) -> Prompts:
    return {(17, 3, 1, str(index)): ("", json.dumps(chat)) for index, chat in enumerate(chats)}


def selection(passing: float | None = None) -> Selection:
    return Selection(RECIPE, passing)


def test_each_path_has_the_messages_of_its_prompts_and_answers() -> None:
    episode = an_episode((-1, "four", True), (0, "nine", True), (0, "eight", True))
    prompts = asked(
        {"messages": [SYSTEM, user("2+2?")]},
        {"messages": [user("3*3?")]},
        {"messages": [user("2*4?")]},
    )
    assert selection().lines(episode, prompts) == [
        {"messages": [SYSTEM, user("2+2?"), policy("four"), user("3*3?"), policy("nine")]},
        {"messages": [SYSTEM, user("2+2?"), context("four"), user("2*4?"), policy("eight")]},
    ]


def test_a_path_ends_at_its_last_trainable_turn() -> None:
    episode = an_episode((-1, "a", True), (0, "b", False), (0, "c", True), (-1, "d", False))
    assert learned_paths(episode) == [[0, 2]]
    assert learned_paths(an_episode((-1, "a", True), (0, "b", False), (0, "c", False))) == [[0]]
    assert learned_paths(an_episode((-1, "a", False), (0, "b", True))) == [[0, 1]]


def test_each_trainable_turn_is_learned_once_as_the_trainer_learns_it() -> None:
    episode = an_episode(
        (-1, "a", True), (0, "pinned", False), (1, "b", True), (1, "c", True), (0, "d", True)
    )
    prompts = asked(*({"messages": [user(str(number))]} for number in range(5)))
    lines = selection().lines(episode, prompts)
    rows = [read_row(line, "hermes") for line in lines]
    learned = [one.answer for row in rows for one in row.exchanges if one.learned]
    assert learned == ["a", "b", "c", "d"]
    assert [one.answer for one in rows[1].exchanges] == ["a", "pinned", "c"]


def test_calls_of_tools_are_in_the_usual_form() -> None:
    result = {"role": "tool", "tool_call_id": "call_0_0", "content": "3"}
    prompts = asked({"messages": [user("1+2?")], "tools": TOOLS}, {"messages": [result]})
    episode = an_episode((-1, CALL, True), (0, "3", True))
    call = {"id": "call_0_0", "type": "function",
            "function": {"name": "add", "arguments": {"a": 1}}}  # fmt: skip
    assert conversation_of(episode, prompts, [0, 1], "hermes") == {
        "messages": [
            user("1+2?"), {**policy("So:"), "tool_calls": [call]}, result, policy("3"),
        ],
        "tools": TOOLS,
    }  # fmt: skip
    plain = conversation_of(episode, prompts, [0], "none")["messages"]
    assert plain == [user("1+2?"), policy(CALL)]
    without = asked({"messages": [user("1+2?")]})
    assert conversation_of(episode, without, [0], "hermes")["messages"] == plain


def test_the_agents_options_say_how_calls_are_spelled() -> None:
    assert tool_format({"tool_calls": "json"}) == "json"
    assert tool_format({}) == tool_format({"tool_calls": ["json"]}) == "hermes"


def test_text_is_a_message_of_the_user() -> None:
    prompts = {(17, 3, 1, "0"): ("2+2?", ""), (17, 3, 1, "1"): ("", "")}
    episode = an_episode((-1, "4", True), (0, "!", True))
    found = conversation_of(episode, prompts, [0, 1], "hermes")
    assert found == {"messages": [user("2+2?"), policy("4"), policy("!")]}


def test_what_is_left_out_is_counted() -> None:
    turn, prompts = (-1, "four", True), asked({"messages": [user("2+2?")]})
    chosen = selection(0.5)
    assert len(chosen.lines(an_episode(turn, reward=0.5), prompts)) == 1
    for left in (
        an_episode(turn, reward=0.25),
        an_episode(turn, reward=None),
        an_episode(turn, purpose="evaluate"),
        an_episode((-1, "four", False)),
    ):
        assert chosen.lines(left, prompts) == []
    for wrong in ({}, asked({"messages": 1}), {(17, 3, 1, "0"): ("", "[")}):
        assert chosen.lines(an_episode(turn), wrong) == []
    assert chosen.counts["exported"] == 1
    assert chosen.report() == (
        "3 whose prompts the log no longer has, 2 without a reward of at least 0.5, "
        "1 without a trainable turn, 1 of evaluations"
    )


def test_a_prompt_of_another_attempt_does_not_count() -> None:
    episode = an_episode((-1, "four", True))
    earlier = replace(episode, recorded=episode.recorded.model_copy(update={"attempt": 0}))
    prompts = asked({"messages": [user("2+2?")]})
    assert selection().lines(earlier, prompts) == []


def test_a_file_has_a_line_for_each_conversation(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [{"messages": [user("é"), policy("\n")]}, {"messages": []}]
    with SftFile(tmp_path / "sft.jsonl") as output:
        output.write(lines[:1])
        output.write(lines[1:])
        assert not (tmp_path / "sft.jsonl").exists()
    written = (tmp_path / "sft.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line) for line in written] == lines


def test_episodes_of_other_agents_are_left_out() -> None:
    chosen = Selection(RECIPE, None, "teacher")
    assert chosen.reason(an_episode().recorded) == "of other agents than teacher"
    assert Selection(RECIPE, None, "default").reason(an_episode().recorded) == ""
