"""Builds the records that close an episode and its task."""

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
"""Endings by a limit that the policy reached. They are data; the recipe may set their reward."""
UNREWARDED: frozenset[Ending] = frozenset({"failed", "deadline", "cancelled"})
"""Endings that say nothing about the policy, and have no reward."""


@dataclass(frozen=True, slots=True)
class AgentSetup:
    """A loaded agent of the recipe."""

    agent: Agent
    options: Mapping[str, Any]
    unfinished_reward: float | None
    tokenizers: Mapping[str, str]
    """The digest of each policy's tokenizer, by the policy's name."""
    score_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that a judge has to answer, by its name, if the recipe limits them."""

    @property
    def replayable(self) -> bool:
        """Whether the agent can be run again with recorded answers: coroutine functions can."""
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
    """Returns the record of what an attempt did. `failures` are those of all attempts so far."""
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
        reward=reward_of(setup, episode, ending),
        rewards=episode.rewards,
        ending=ending,
        failures=tuple(failures),
        started=began_ms,
        ended=now_ms(),
        metrics=episode.metrics,
    )


def outcome_of(
    started: EpisodeStarted,
    ending: Ending,
    failure: Failure | None,
    *,
    attempt: int,
    attempts: int | None = None,
    seconds: float = 0.0,
    episode: Episode | None = None,
    trajectory: Ref | None = None,
    reward: float | None = None,
) -> EpisodeEnded:
    """Returns an episode's terminal record.

    `episode` is None if no attempt began. `attempts` are `attempt` + 1 if not given.
    """
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
        reward=reward,
        rewards=episode.rewards if episode else {},
        policies=policy_uses(episode.turns) if episode else (),
        attempts=following(attempt) if attempts is None else attempts,
        seconds=seconds,
    )


def without_details(outcome: EpisodeEnded) -> EpisodeEnded:
    """Returns an outcome without what only reports need, if the whole is too large for a record.

    Its ending, its reward and what grouping needs stay.
    """
    failure = outcome.failure
    if failure is not None:
        failure = failure.model_copy(update={"message": failure.message[:100]})
    uses = tuple(use.model_copy(update={"turn_rewards": b""}) for use in outcome.policies)
    return outcome.model_copy(update={"rewards": {}, "policies": uses, "failure": failure})


def reward_of(setup: AgentSetup, episode: Episode | None, ending: Ending) -> float | None:
    """Returns the reward that counts for an ending."""
    if episode is None or ending in UNREWARDED:
        return None
    if ending in UNFINISHED and setup.unfinished_reward is not None:
        return setup.unfinished_reward
    return episode.reward


def refused(started: EpisodeStarted, verdict: Failure) -> EpisodeEnded:
    """Returns the terminal record of an episode that must not run."""
    ending: Ending = "cancelled" if verdict.code == "cancelled" else "failed"
    return outcome_of(started, ending, verdict, attempt=0, attempts=0)


def task_ended(
    number: int, submitted: TaskSubmitted, outcomes: tuple[EpisodeEnded, ...]
) -> TaskEnded:
    """Returns a task's terminal record, from the outcomes of its samples in log order."""
    closed_by: Literal["all", "cancelled", "refused"] = "all"
    if any(outcome.ending == "cancelled" for outcome in outcomes):
        closed_by = "cancelled"
    elif all(outcome.attempts == 0 for outcome in outcomes):
        closed_by = "refused"
    pinned = {
        use.policy: use.version for use in submitted.roles.values() if use.version is not None
    }
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
        versions=pinned,
    )
