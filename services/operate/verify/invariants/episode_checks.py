"""I1 and I6 for episodes: each has one outcome, and a reward only where it earned one."""

from __future__ import annotations

from headrace.schemas.events import EpisodeEnded, EpisodeStarted, ObservationRecorded
from headrace.schemas.recipe.agent_settings import Agent
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.operate.verify.invariants.log_facts import Facts, Violations

NO_REWARD = ("failed", "cancelled")
"""Endings from which nothing may be learned."""
COUNTED = ("deadline", "step_timeout", "exception")
"""Endings that count only if the recipe says so."""
LIMITS = ("turn_limit", "token_limit", "overflow")
"""Endings of episodes that a limit cut."""


def check(facts: Facts, recipe: Recipe, *, drained: bool) -> Violations:
    """Judges all episodes. `drained`: each must have ended."""
    starts = {(event.task, event.sample): event for event in facts.events(EpisodeStarted)}
    ends = {(event.task, event.sample): event for event in facts.events(EpisodeEnded)}
    if drained:
        for task, sample in sorted(starts.keys() - ends.keys()):
            yield f"I1: episode {task}/{sample} was started and has no EpisodeEnded"
    for task, sample in sorted(ends.keys() - starts.keys()):
        yield f"I1: EpisodeEnded of {task}/{sample}, which was never started"
    for key in sorted(starts.keys() & ends.keys()):
        agent = recipe.agents.get(starts[key].submitted.agent, Agent())
        yield from _end(starts[key], ends[key], agent)
        yield from _reward(ends[key], agent)
    for observation in facts.events(ObservationRecorded):
        failure = observation.failure
        if failure is not None and failure.origin != "policy" and observation.reward is not None:
            yield f"I6: observation {observation.event_id} has a reward, and {failure.code}"


def _end(started: EpisodeStarted, outcome: EpisodeEnded, agent: Agent) -> Violations:
    name = f"episode {outcome.task}/{outcome.sample}"
    submitted = started.submitted
    theirs = (submitted.tenant, submitted.purpose, submitted.item_id, submitted.epoch)
    ours = (outcome.tenant, outcome.purpose, outcome.item_id, outcome.epoch)
    if theirs != ours:
        yield f"I1: {name} was started as {theirs}: {ours} ended"
    if started.verdict is not None:
        if (outcome.failure, outcome.attempts) != (started.verdict, 0):
            yield f"I1: {name} was started {started.verdict.code}, and was run"
        return
    if outcome.attempts > submitted.attempts:
        yield f"I1: {name} made {outcome.attempts} attempts of {submitted.attempts}"
    if outcome.attempts != outcome.attempt + 1:
        yield f"I1: {name} ended attempt {outcome.attempt} and counts {outcome.attempts}"
    failed = outcome.failure is not None
    if failed not in _may_fail(outcome, agent):
        yield f"I6: {name} ended {outcome.ending} with failure {outcome.failure}"
    if outcome.trajectory is None and outcome.ending not in (*NO_REWARD, "deadline"):
        yield f"I2: {name} ended {outcome.ending} without a trajectory"


def _may_fail(outcome: EpisodeEnded, agent: Agent) -> tuple[bool, ...]:
    """Whether an outcome must say why it does not count, must not, or may do either."""
    counts = agent.timeouts == "unfinished"
    if outcome.ending == "cancelled":
        return (True, False)
    if outcome.ending == "deadline" and counts and outcome.attempt == 0:
        return (True, False)  # A pause or a death may have taken the policy's time.
    if outcome.ending == "step_timeout":
        return (False,) if counts else ()
    if outcome.ending == "exception":
        return (False,) if agent.exceptions == "unfinished" else ()
    return (outcome.ending in ("failed", "deadline"),)


def _reward(outcome: EpisodeEnded, agent: Agent) -> Violations:
    name = f"episode {outcome.task}/{outcome.sample}"
    if outcome.masked:
        if agent.overlong != "mask":
            yield f"I3: {name} is masked, and its agent masks none"
        if outcome.ending not in (*LIMITS, "finished"):
            yield f"I3: {name} is masked, and ended {outcome.ending}"
    elif outcome.ending in LIMITS and agent.overlong == "mask":
        yield f"I3: {name} ended {outcome.ending}, and is not masked"
    highest = agent.unfinished_reward if agent.overlong_buffer == 0 else None
    unfinished = outcome.ending in LIMITS or (outcome.ending in COUNTED and outcome.failure is None)
    if (
        unfinished
        and outcome.trajectory is not None
        and highest is not None
        and (outcome.reward is None or outcome.reward > highest)
    ):
        yield f"I6: {name} ended {outcome.ending} with reward {outcome.reward}"
    if outcome.reward is None:
        return
    if outcome.ending in NO_REWARD:
        yield f"I6: {name} ended {outcome.ending} with reward {outcome.reward}"
    if outcome.failure is not None and outcome.failure.origin != "policy":
        yield f"I6: {name} has reward {outcome.reward} after {outcome.failure.origin} failed"
    if outcome.trajectory is None:
        yield f"I6: {name} has reward {outcome.reward} and no trajectory"
