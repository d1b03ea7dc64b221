"""The list of episodes: filters, orders, and the search for a text. The filters are pure."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.errors import DecodeError, UsageError
from headrace.schemas.events import TrajectoryRecorded
from headrace.services.base.texts import encodable
from headrace.services.operate.dashboard.index.index_rows import EpisodeRow, TaskRow
from headrace.services.operate.dashboard.index.run_index import RunIndex
from headrace.services.operate.dashboard.views.cut_texts import Tree
from headrace.services.operate.dashboard.views.fact_reader import FactReader
from headrace.services.operate.dashboard.views.kept_list import KeptList
from headrace.services.operate.dashboard.views.page_of import (
    DEFAULT,
    MOST,
    decimal,
    page_of,
    whole_number,
)

SEARCH_S = 2.0
"""Seconds that a search reads before it answers. Its cursor continues there."""
SEARCHED_AT_ONCE = 24
SNIPPET = 80
"""Characters around a text that was found."""
LONGEST_TEXT = 200


class Found(NamedTuple):
    """One episode."""

    task: TaskRow
    sample: int
    episode: EpisodeRow

    @property
    def tokens(self) -> int:
        """Sampled and demonstrated tokens of the attempt that counts."""
        attempt = self.episode.attempt
        return attempt.tokens if attempt is not None else 0

    @property
    def turns(self) -> int:
        """Turns of the attempt that counts."""
        attempt = self.episode.attempt
        return attempt.turns if attempt is not None else 0

    @property
    def newest(self) -> int:
        """The newest version among its tokens, or -1."""
        attempt = self.episode.attempt
        return attempt.newest if attempt is not None else -1

    @property
    def tools(self) -> tuple[str, ...]:
        """The tools that its sampled texts call."""
        attempt = self.episode.attempt
        return attempt.tools if attempt is not None else ()


ORDERS: Mapping[str, Callable[[Found], Any]] = {
    "ended": lambda one: one.episode.ended_at or one.episode.started_at,
    "reward": lambda one: -1e300 if one.episode.reward is None else one.episode.reward,
    "tokens": lambda one: one.tokens,
    "turns": lambda one: one.turns,
    "seconds": lambda one: one.episode.seconds,
    "task": lambda one: (one.task.task, one.sample),
}


STATES = ("waiting", "running", "ended")
"""What `EpisodeRow.state` may be. How an episode ended is its `ending`."""


def find_episodes(index: RunIndex, query: Mapping[str, str]) -> list[Found]:
    """Returns the episodes that all filters accept, in the order that was asked for.

    Raises UsageError if a filter is wrong.
    """
    tests = _tests(query)
    order = query.get("order") or "-ended"
    key = ORDERS.get(order.removeprefix("-"))
    if key is None:
        raise UsageError(
            f"order={order[:40]!r}: it is one of {', '.join(ORDERS)}, with or without -"
        )
    episodes = (
        Found(task, sample, episode)
        for task in index.tasks.values()
        for sample, episode in task.samples.items()
    )
    found = [one for one in episodes if all(test(one) for test in tests)]
    return sorted(found, key=key, reverse=order.startswith("-"))


def _tests(query: Mapping[str, str]) -> list[Callable[[Found], bool]]:
    if (state := query.get("state") or STATES[0]) not in STATES:
        raise UsageError(f"state={state[:40]!r}: it is one of {', '.join(STATES)}")
    texts: dict[str, Callable[[Found, str], bool]] = {
        "policy": lambda one, text: text in one.episode.policies,
        "purpose": lambda one, text: one.task.purpose == text,
        "state": lambda one, text: one.episode.state == text,
        "ending": lambda one, text: one.episode.ending == text,
        "tool": lambda one, text: text in one.tools,
        "origin": lambda one, text: one.episode.origin == text,
        "code": lambda one, text: one.episode.code == text,
        "item": lambda one, text: one.task.item == text,
        "tool_failed": lambda one, text: (one.episode.tool_failures > 0) == (text == "1"),
    }
    numbers: dict[str, Callable[[Found, float], bool]] = {
        "reward_min": lambda one, least: _reward(one) >= least,
        "reward_max": lambda one, most: _reward(one) <= most,
        "tokens_min": lambda one, least: one.tokens >= least,
        "tokens_max": lambda one, most: one.tokens <= most,
        "turns_min": lambda one, least: one.turns >= least,
        "turns_max": lambda one, most: one.turns <= most,
        "version_min": lambda one, least: one.newest >= least,
        "version_max": lambda one, most: 0 <= one.episode.oldest <= most,
    }
    tests: list[Callable[[Found], bool]] = []
    for name, by_text in texts.items():
        if query.get(name):
            tests.append(_bound(by_text, query[name]))
    for name, by_number in numbers.items():
        if (value := decimal(query, name)) is not None:
            tests.append(_bound(by_number, value))
    return tests


def _bound(test: Callable[[Found, Any], bool], value: Any) -> Callable[[Found], bool]:
    return lambda one: test(one, value)


def _reward(one: Found) -> float:
    """Returns the reward, or NaN, which no limit accepts."""
    return float("nan") if one.episode.reward is None else one.episode.reward


def episode_item(found: Found, snippet: str | None = None) -> Tree:
    """Returns an episode in a list."""
    task, sample, episode = found
    return {
        "task": task.task,
        "sample": sample,
        "item_id": encodable(task.item),
        "purpose": task.purpose,
        "state": episode.state,
        "ended_at": episode.ended_at or None,
        "ending": episode.ending,
        "reward": episode.reward,
        "tokens": found.tokens,
        "turns": found.turns,
        "seconds": episode.seconds,
        "attempts": episode.attempts or len(episode.by_attempt),
        "oldest_version": episode.oldest,
        "newest_version": found.newest,
        "tools": [encodable(name) for name in found.tools],
        "tool_failures": episode.tool_failures,
        "failure": {"origin": episode.origin, "code": encodable(episode.code)}
        if episode.origin
        else None,
        "snippet": snippet,
        "trained_in": episode.trained or {},
    }


async def episodes_tree(
    index: RunIndex, reader: FactReader, kept: KeptList[Found], query: Mapping[str, str]
) -> Tree:
    """Returns one page of the episodes that the filters accept."""
    found = kept.rows(index, query)
    text = query.get("text", "")
    if not text:
        return page_of(found, query, episode_item)
    if len(text) > LONGEST_TEXT:
        raise UsageError(f"text: search for at most {LONGEST_TEXT} characters")
    return await _search(index, reader, found, text, query)


async def _search(
    index: RunIndex, reader: FactReader, found: Sequence[Found], text: str, query: Mapping[str, str]
) -> Tree:
    limit = whole_number(query, "limit", DEFAULT, 1, MOST)
    at = whole_number(query, "cursor", 0)
    until = time.monotonic() + SEARCH_S
    items: list[Tree] = []
    while at < len(found) and len(items) < limit and time.monotonic() < until:
        some = [one for one in found[at : at + SEARCHED_AT_ONCE] if one.episode.attempt is not None]
        positions = [
            index.positions.unpack(one.episode.attempt.position)
            for one in some
            if one.episode.attempt is not None
        ]
        texts = {}
        for record in await reader.fetch(positions, []):
            if may_contain(record.value or b"", text):
                try:
                    event = (await reader.log.decode(record)).event
                except DecodeError:
                    continue
                texts[record.partition, record.offset] = snippet_of(event, text)
        for number, one in enumerate(found[at : at + SEARCHED_AT_ONCE]):
            if len(items) >= limit:
                at += number
                break
            if one.episode.attempt is not None:
                position = index.positions.unpack(one.episode.attempt.position)
                snippet = texts.get((position.partition, position.offset))
                if snippet is not None:
                    items.append(episode_item(one, snippet))
        else:
            at = min(len(found), at + SEARCHED_AT_ONCE)
    return {
        "items": items,
        "total": len(items),
        "next": str(at) if at < len(found) else None,
        "searched": {"done": at, "total": len(found)},
    }


def may_contain(value: bytes, text: str) -> bool:
    """Whether the bytes of a record may hold a text, whatever its case. Quick for ASCII."""
    return not text.isascii() or text.lower().encode() in value.lower()


def snippet_of(event: Any, text: str) -> str | None:
    """Returns the surroundings of where a text comes first in the sampled texts, or None."""
    if isinstance(event, TrajectoryRecorded):
        for turn in event.turns:
            at = turn.text.lower().find(text.lower())
            if at >= 0:
                begin, end = max(0, at - SNIPPET), at + len(text) + SNIPPET
                head, tail = "…" if begin else "", "…" if end < len(turn.text) else ""
                return encodable(f"{head}{turn.text[begin:end]}{tail}")
    return None
