"""The records that close an episode, built from what its last attempt did, and its task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.schemas.events import (
    Ending,
    EpisodeEnded,
    EpisodeStarted,
    Failure,
    Ref,
    TaskEnded,
    TaskSubmitted,
    TrajectoryRecorded,
)
from headrace.services.agent.episode import Agent, Episode
from headrace.services.agent.requests import following
from headrace.services.agent.turns import arrange, policy_uses
from headrace.services.base.clock import now_ms

UNFINISHED: frozenset[Ending] = frozenset({"turn_limit", "token_limit", "overflow"})
"""Endings by a limit that the policy ran into: they are data, with a reward of the recipe's."""
UNREWARDED: frozenset[Ending] = frozenset({"failed", "deadline", "cancelled"})
"""Endings that say nothing of the policy."""


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


def _reward(setup: AgentSetup, episode: Episode | None, ending: Ending) -> float | None:
    if episode is None or ending in UNREWARDED:
        return None
    if ending in UNFINISHED and setup.unfinished_reward is not None:
        return setup.unfinished_reward
    return episode.reward


def refused(started: EpisodeStarted, verdict: Failure) -> EpisodeEnded:
    """The terminal record of an episode that was not to run."""
    submitted = started.submitted
    return EpisodeEnded(
        task=started.task,
        sample=started.sample,
        tenant=submitted.tenant,
        purpose=submitted.purpose,
        item_id=submitted.item_id,
        epoch=submitted.epoch,
        ending="cancelled" if verdict.code == "cancelled" else "failed",
        failure=verdict,
        attempts=0,
    )


def task_ended(
    number: int, submitted: TaskSubmitted, outcomes: tuple[EpisodeEnded, ...]
) -> TaskEnded:
    """A task's terminal record, of its samples' outcomes in log order."""
    closed_by: Literal["all", "cancelled", "refused"] = "all"
    if any(outcome.ending == "cancelled" for outcome in outcomes):
        closed_by = "cancelled"
    elif all(outcome.attempts == 0 for outcome in outcomes):
        closed_by = "refused"
    return TaskEnded(
        task=number,
        source=submitted.source,
        task_id=submitted.task_id,
        tenant=submitted.tenant,
        purpose=submitted.purpose,
        item_id=submitted.item_id,
        epoch=submitted.epoch,
        closed_by=closed_by,
        minimum=submitted.minimum,
        outcomes=outcomes,
    )
