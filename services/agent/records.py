"""Builds the records that close an episode and its task."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
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
from headrace.schemas.recipe.agent_settings import Agent as AgentSettings
from headrace.schemas.role_rewards import OVERLONG, learned_tokens, own_penalty
from headrace.services.agent.episode import Agent, Episode
from headrace.services.agent.requests import following
from headrace.services.agent.teacher_scores import Teacher
from headrace.services.agent.turns import arrange, is_cut, policy_uses
from headrace.services.base.clock import now_ms
from headrace.services.base.types import ENVIRONMENT_ERROR, STEP_TIMEOUT, check_names
from headrace.services.tasks.admission import own_labels

UNFINISHED: frozenset[Ending] = frozenset({"turn_limit", "token_limit", "overflow"})
"""Endings by a limit that the policy reached. They are data; the recipe may set their reward."""
COUNTED: frozenset[Ending] = frozenset({"deadline", "step_timeout", "exception"})
"""Endings that are as those by a limit if the recipe says so. Otherwise they have a failure."""
EXCEPTIONS = {("agent", "agent_error"), ("environment", ENVIRONMENT_ERROR)}
"""The origins and codes of failures by an exception of the user's code."""
UNREWARDED: frozenset[Ending] = frozenset({"failed", "cancelled"})
"""Endings that say nothing about the policy, and have no reward."""


@dataclass(frozen=True, slots=True)
class AgentSetup:
    """A loaded agent of the recipe."""

    agent: Agent
    options: Mapping[str, Any]
    settings: AgentSettings
    tokenizers: Mapping[str, str]
    """The digest of each policy's tokenizer, by the policy's name."""
    score_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that a judge has to answer, by its name, if the recipe limits them."""
    untrained: Collection[str] = ()
    """The policies that do not learn, by name. How much they say costs nobody a reward."""
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    """The teacher of each policy that has one, by the policy's name."""

    @property
    def replayable(self) -> bool:
        """Whether the agent can be run again with recorded answers: coroutine functions can."""
        return bool(getattr(self.agent, "replayable", True))


@dataclass(frozen=True, slots=True)
class EarnedReward:
    """What an episode earned, as its ending and the recipe have it."""

    reward: float | None = None
    """None if nothing may be learned from the episode."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The named parts of the reward, with the roles' own rewards."""
    masked: bool = False
    """Whether the reward counts in the group, but nothing is learned from the tokens."""


def trajectory_of(
    started: EpisodeStarted,
    setup: AgentSetup,
    episode: Episode,
    ending: Ending,
    *,
    earned: EarnedReward,
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
        reward=earned.reward,
        rewards=dict(earned.parts),
        ending=ending,
        failures=tuple(failures),
        started=began_ms,
        ended=now_ms(),
        metrics=episode.metrics,
        artifacts=tuple(episode.files.by_name.values()),
        labels=own_labels(submitted),
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
    earned: EarnedReward | None = None,
) -> EpisodeEnded:
    """Returns an episode's terminal record.

    `episode` is None if no attempt began. `attempts` are `attempt` + 1 if not given.
    """
    submitted, earned = started.submitted, earned or EarnedReward()
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
        reward=earned.reward,
        rewards=dict(earned.parts),
        policies=policy_uses(episode.turns) if episode else (),
        attempts=following(attempt) if attempts is None else attempts,
        seconds=seconds,
        masked=earned.masked,
        labels=own_labels(submitted),
        artifacts=tuple(episode.files.by_name.values()) if episode else (),
    )


def without_details(outcome: EpisodeEnded) -> EpisodeEnded:
    """Returns an outcome without what only reports need, if the whole is too large for a record.

    Its ending, its rewards and what grouping needs stay.
    """
    failure = outcome.failure
    if failure is not None:
        failure = failure.model_copy(update={"message": failure.message[:100]})
    uses = tuple(use.model_copy(update={"turn_rewards": b""}) for use in outcome.policies)
    needed = {OVERLONG, *(use.role for use in outcome.policies)}
    rewards = {name: value for name, value in outcome.rewards.items() if name in needed}
    changes: dict[str, object] = {"rewards": rewards, "policies": uses, "failure": failure}
    return outcome.model_copy(update={**changes, "labels": {}, "artifacts": ()})


def ending_of_failure(settings: AgentSettings, failure: Failure) -> Ending | None:
    """Returns how a failure ends an episode of which the recipe says that it counts."""
    if failure.code == STEP_TIMEOUT and settings.timeouts == "unfinished":
        return "step_timeout"
    raised = (failure.origin, failure.code) in EXCEPTIONS
    return "exception" if raised and settings.exceptions == "unfinished" else None


def earned_reward(
    started: EpisodeStarted,
    setup: AgentSetup,
    episode: Episode | None,
    ending: Ending,
    failure: Failure | None = None,
) -> EarnedReward:
    """Returns the reward that counts for an ending. What failed has none.

    Takes away named rewards and metrics of the episode that no record can hold.
    """
    if episode is None:
        return EarnedReward()
    names_error(episode)
    if failure is not None or ending in UNREWARDED:
        return EarnedReward(parts=episode.rewards)
    submitted, highest = started.submitted, setup.settings.unfinished_reward
    reward, parts = episode.reward, dict(episode.rewards)
    own = {role: parts[role] for role in submitted.roles if role in parts}
    if ending in UNFINISHED | COUNTED and highest is not None:
        # With a higher reward than it has, a policy would gain by running into the limit.
        reward = highest if reward is None else min(reward, highest)
        own = {role: min(value, highest) for role, value in own.items()}
    learning = {
        call: one
        for call, one in episode.turns.items()
        if one.turn.policy not in setup.untrained and not _is_pinned(submitted, one.turn.role)
    }
    tokens = learned_tokens(policy_uses(episode.turns), setup.untrained)
    penalty = _length_penalty(submitted, setup.settings, tokens.total(), ending)
    if reward is not None and penalty:
        reward, parts[OVERLONG] = reward - penalty, -penalty
        own = {role: value - own_penalty(penalty, tokens, role) for role, value in own.items()}
    cut = ending in UNFINISHED or (ending == "finished" and is_cut(learning))
    parts |= own
    return EarnedReward(reward, parts, masked=cut and setup.settings.overlong == "mask")


def names_error(episode: Episode) -> ValueError | None:
    """Returns what is wrong with the named rewards or metrics. Takes away those that are wrong."""
    for kind in ("rewards", "metrics"):
        values = getattr(episode, kind)
        try:
            check_names(values)
            setattr(episode, kind, {name: _number(kind, name, one) for name, one in values.items()})
        except (AttributeError, TypeError, ValueError, OverflowError) as error:
            setattr(episode, kind, {})
            return ValueError(f"the named {kind} of the episode have {error}")
    return None


def _number(kind: str, name: str, value: object) -> float:
    if not isinstance(value, Real):
        raise ValueError(f"episode.{kind}[{name!r}], a {type(value).__name__}, not a number")
    return float(value)


def _is_pinned(submitted: TaskSubmitted, role: str) -> bool:
    """Whether no policy learns in a role, because the task names the version that plays it."""
    return submitted.purpose == "train" and submitted.roles[role].version is not None


def _length_penalty(
    submitted: TaskSubmitted, settings: AgentSettings, tokens: int, ending: Ending
) -> float:
    """Returns what a training episode loses because it is long.

    Soft Overlong Punishment, DAPO (arXiv 2503.14476), equation 13, times -`overlong_penalty`: for y
    `learned_tokens`, a limit of m and a buffer of b tokens it is the penalty times
    (y - (m - b)) / b, at least 0 and at most 1 times the penalty. An overflow is beyond m.
    """
    buffer = settings.overlong_buffer
    if not buffer or submitted.purpose != "train":
        return 0.0
    into = tokens - (submitted.max_tokens - buffer)
    share = 1.0 if ending == "overflow" else min(max(into / buffer, 0.0), 1.0)
    return settings.overlong_penalty * share


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
        labels=own_labels(submitted),
    )
