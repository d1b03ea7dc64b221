"""The records that close an episode, built from what its last attempt did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas import packed
from schemas.events import (
    Ending,
    EpisodeEnded,
    EpisodeStarted,
    Failure,
    PolicyUse,
    Ref,
    Sampling,
    TrajectoryRecorded,
    Turn,
)
from services.agent.episode import Agent, Episode, RecordedTurn
from services.clock import now_ms

UNFINISHED: frozenset[Ending] = frozenset({"turn_limit", "token_limit", "overflow"})
"""Endings by a limit that the policy ran into: they are data, with a reward of the recipe's."""
UNREWARDED: frozenset[Ending] = frozenset({"failed", "deadline", "cancelled"})
"""Endings that say nothing of the policy."""


LAST = 2**31 - 1
"""Largest number that an event's `int` holds: another's record may have it."""


@dataclass(frozen=True, slots=True)
class AgentSetup:
    """An agent of the recipe, loaded."""

    agent: Agent
    options: Mapping[str, Any]
    unfinished_reward: float | None
    tokenizers: Mapping[str, str]
    """Policy to digest of its tokenizer."""
    score_s: Mapping[str, float] = field(default_factory=dict)
    """Judge to the longest that its answer may take, where there is such a bound."""

    @property
    def replayable(self) -> bool:
        """Whether the agent does the same again against recorded answers: coroutines do."""
        return bool(getattr(self.agent, "replayable", True))


def trajectory_of(
    started: EpisodeStarted,
    setup: AgentSetup,
    episode: Episode,
    ending: Ending,
    *,
    attempt: int,
    failures: Sequence[Failure],
    began_ms: int,
) -> TrajectoryRecorded:
    """What an attempt did. `failures` are those of the attempts before it, and its own."""
    submitted = started.submitted
    turns, samplings = arrange(episode.turns)
    return TrajectoryRecorded(
        task=started.task,
        sample=started.sample,
        attempt=attempt,
        source=submitted.source,
        task_id=submitted.task_id,
        item_id=submitted.item_id,
        epoch=submitted.epoch,
        purpose=submitted.purpose,
        tokenizer=setup.tokenizers.get(turns[0].policy, "") if turns else "",
        agent=submitted.agent,
        environment=submitted.environment.use if submitted.environment else "",
        samplings=samplings,
        turns=turns,
        reward=_reward(setup, episode, ending),
        rewards=episode.rewards,
        ending=ending,
        failures=tuple(failures),
        started=began_ms,
        ended=now_ms(),
        metrics=episode.metrics,
    )


def outcome_of(
    started: EpisodeStarted,
    setup: AgentSetup,
    episode: Episode | None,
    ending: Ending,
    failure: Failure | None,
    trajectory: Ref | None,
    *,
    attempt: int,
    seconds: float,
) -> EpisodeEnded:
    """The terminal record. `episode` is None where no attempt began."""
    submitted = started.submitted
    return EpisodeEnded(
        task=started.task,
        sample=started.sample,
        attempt=attempt,
        tenant=submitted.tenant,
        purpose=submitted.purpose,
        item_id=submitted.item_id,
        epoch=submitted.epoch,
        ending=ending,
        failure=failure,
        trajectory=trajectory,
        reward=_reward(setup, episode, ending),
        rewards=episode.rewards if episode else {},
        policies=policy_uses(episode.turns) if episode else (),
        attempts=following(attempt),
        seconds=seconds,
    )


def following(number: int) -> int:
    """The attempt or index after this one; the last that there is has none after it."""
    return min(number + 1, LAST)


def _reward(setup: AgentSetup, episode: Episode | None, ending: Ending) -> float | None:
    if episode is None or ending in UNREWARDED:
        return None
    if ending in UNFINISHED and setup.unfinished_reward is not None:
        return setup.unfinished_reward
    return episode.reward


def arrange(
    recorded: Mapping[str, RecordedTurn],
) -> tuple[tuple[Turn, ...], tuple[Sampling, ...]]:
    """Turns in the order of their call paths, with parents and samplings as indices."""
    calls = sorted(recorded, key=_path)
    index = {call: number for number, call in enumerate(calls)}
    samplings: list[Sampling] = []
    turns = []
    for call in calls:
        one = recorded[call]
        if one.sampling not in samplings:
            samplings.append(one.sampling)
        parent = -1 if one.parent is None else index[one.parent]
        places = {"parent": parent, "sampling": samplings.index(one.sampling)}
        turns.append(one.turn.model_copy(update=places))
    return tuple(turns), tuple(samplings)


def policy_uses(recorded: Mapping[str, RecordedTurn]) -> tuple[PolicyUse, ...]:
    """What each policy did, in the order of its first turn."""
    by_policy: dict[str, list[RecordedTurn]] = {}
    for call in sorted(recorded, key=_path):
        by_policy.setdefault(recorded[call].turn.policy, []).append(recorded[call])
    return tuple(_policy_use(policy, turns) for policy, turns in by_policy.items())


def _policy_use(policy: str, turns: Sequence[RecordedTurn]) -> PolicyUse:
    spoken = [one for one in turns if one.turn.tokens]
    rewards = [float("nan") if one.turn.reward is None else one.turn.reward for one in turns]
    return PolicyUse(
        policy=policy,
        role=turns[0].turn.role,
        tokens=sum(packed.count(one.turn.tokens) for one in spoken if one.turn.trainable),
        longest=max(one.length for one in turns),
        oldest_version=min(
            (one.oldest_version for one in spoken if not one.turn.demonstrated), default=-1
        ),
        turn_rewards=packed.pack_f32(rewards),
    )


def _path(call: str) -> tuple[int, ...]:
    return tuple(int(part) for part in call.split("."))
