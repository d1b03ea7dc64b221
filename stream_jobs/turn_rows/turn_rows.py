"""Makes the rows of an episode: one for each turn, with plain arrays and texts. No I/O.

An array or a text that is longer than its limit is cut into pieces, and the turn has a row for each
piece. So a row stays below the limits of a record, and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from headrace.schemas.events import (
    EpisodeEnded,
    GroupClosed,
    TaskEnded,
    TrajectoryRecorded,
    Turn,
    TurnProjected,
)
from headrace.schemas.packed import unpack_f32, unpack_i32, unpack_spans
from headrace.services.log.unpacked import Texts

PIECE_TOKENS = 32_768
"""The most values of each array in one row. Five arrays then stay below MAX_VALUES."""
PIECE_CHARACTERS = 262_144
"""The most characters of each text in one row: at most 1 MiB in UTF-8."""


def turn_rows(
    ended: TaskEnded,
    outcome: EpisodeEnded,
    trajectory: TrajectoryRecorded,
    groups: Sequence[GroupClosed],
    texts: Texts,
) -> Iterator[TurnProjected]:
    """Yields the rows of an episode, in the order of its turns and of their pieces.

    `outcome` and `trajectory` are those of the episode that count, and `groups` those of its task,
    one for each policy that trains.
    """
    advantages = _advantages(outcome.sample, trajectory, groups)
    for index, turn in enumerate(trajectory.turns):
        fields: dict[str, Any] = {
            "task": ended.task,
            "sample": outcome.sample,
            "attempt": trajectory.attempt,
            "turn": index,
            "source": ended.source,
            "task_id": ended.task_id,
            "item_id": ended.item_id,
            "epoch": ended.epoch,
            "tenant": ended.tenant,
            "purpose": ended.purpose,
            "agent": trajectory.agent,
            "environment": trajectory.environment,
            "policy": turn.policy,
            "role": turn.role,
            "parent": turn.parent,
            "call": turn.call,
            "trainable": turn.trainable,
            "demonstrated": turn.demonstrated,
            "finish": turn.finish,
            "turn_reward": turn.reward,
            "reward": outcome.reward,
            "rewards": outcome.rewards,
            "advantage": advantages.get(index) if turn.trainable else None,
            "ending": outcome.ending,
            "started": trajectory.started,
            "ended": trajectory.ended,
            "labels": ended.labels,
        }
        yield from _pieces(fields, turn, trajectory.tokenizer, texts)


def _pieces(
    fields: dict[str, Any], turn: Turn, tokenizer: str, texts: Texts
) -> Iterator[TurnProjected]:
    """Yields the rows of one turn. `fields` are those that all of them have."""
    tokens: list[int] = _unpacked(unpack_i32, turn.tokens)
    versions: list[int] = []
    with suppress(ValueError):  # Another team may have written wrong spans.
        versions = unpack_spans(turn.versions, len(tokens)) if turn.versions else []
    text = texts.of(turn.policy, turn.tokens, tokenizer)
    context_text = texts.of(turn.policy, turn.context, tokenizer)
    arrays: dict[str, Sequence[Any]] = {
        "context": _unpacked(unpack_i32, turn.context),
        "tokens": tokens,
        "logprobs": _unpacked(unpack_f32, turn.logprobs),
        "versions": versions,
        "teacher": _unpacked(unpack_f32, turn.teacher),
    }
    strings = {"text": turn.text if text is None else text, "context_text": context_text}
    parts = max(
        1,
        *(-(-len(array) // PIECE_TOKENS) for array in arrays.values()),
        *(-(-len(string or "") // PIECE_CHARACTERS) for string in strings.values()),
    )
    version = max(versions, default=None)
    for part in range(parts):
        pieces: dict[str, Any] = {
            name: tuple(_piece(array, part, PIECE_TOKENS)) for name, array in arrays.items()
        }
        for name, string in strings.items():
            pieces[name] = None if string is None else _piece(string, part, PIECE_CHARACTERS)
        yield TurnProjected(**fields, **pieces, part=part, parts=parts, version=version)


def _piece(whole: Any, part: int, size: int) -> Any:
    return whole[part * size : (part + 1) * size]


def _unpacked(unpack: Callable[[bytes], list[Any]], data: bytes) -> list[Any]:
    """Unpacks an array. Returns an empty list if `data` is not one: its writer may be wrong."""
    return unpack(data) if len(data) % 4 == 0 else []


def _advantages(
    sample: int, trajectory: TrajectoryRecorded, groups: Sequence[GroupClosed]
) -> dict[int, float]:
    """Returns the advantages of the turns that a policy learns from, by their index."""
    found: dict[int, float] = {}
    for group in groups:
        own = [index for index, one in enumerate(trajectory.turns) if one.policy == group.policy]
        for learned in group.samples:
            values = unpack_f32(learned.advantages)
            if learned.sample == sample and len(values) in (1, len(own)):
                found |= zip(own, values * len(own) if len(values) == 1 else values, strict=True)
    return found
