"""I2, and I5 for tokens: of the trajectories that count, and of the answers that they hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, isclose, isnan

from headrace.schemas.events import (
    ActionRequested,
    BatchAssembled,
    EpisodeEnded,
    EpisodeStarted,
    GenerationCompleted,
    GenerationRequested,
    ObservationRecorded,
    PolicyPublished,
    PolicyUse,
    TrajectoryRecorded,
    Turn,
)
from headrace.schemas.packed import count, unpack_f32, unpack_i32, unpack_spans
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.operate.verify.invariants.episode_checks import LIMITS
from headrace.services.operate.verify.invariants.log_facts import Facts, Violations

Attempt = tuple[int, int, int]
"""Task, sample, attempt."""


@dataclass
class _Asked:
    """What an attempt asked of its environment, and the answers to its prompts."""

    actions: list[ActionRequested] = field(default_factory=list)
    answers: list[GenerationCompleted] = field(default_factory=list)

    @property
    def calls(self) -> list[str]:
        """Paths of all its requests."""
        return [one.call for one in self.actions] + [one.call for one in self.answers]

    @property
    def linear(self) -> bool:
        """Whether it asked for one thing after the other, so that calls are in order."""
        # What Headrace itself asks ends in `.close` or `.score0`.
        own = (call for call in self.calls if call.rpartition(".")[2].isdecimal())
        return all(call.isdecimal() for call in own)


def check(facts: Facts) -> Violations:
    """Judges the trajectories that outcomes name."""
    yield from _echoes(facts)
    attempts: dict[Attempt, _Asked] = defaultdict(_Asked)
    for action in facts.events(ActionRequested):
        attempts[action.task, action.sample, action.attempt].actions.append(action)
    for answer in facts.events(GenerationCompleted):
        attempts[answer.task, answer.sample, answer.attempt].answers.append(answer)
    for key, asked in attempts.items():
        indices = sorted(one.index for one in asked.actions if one.kind in ("reset", "step"))
        if indices != list(range(len(indices))):
            name = f"episode {key[0]}/{key[1]}, attempt {key[2]}"
            yield f"I2: {name}: its actions are {indices}"
    published = {(event.policy, event.version) for event in facts.events(PolicyPublished)}
    for outcome in facts.events(EpisodeEnded):
        if outcome.trajectory is None:
            continue
        name = f"episode {outcome.task}/{outcome.sample}"
        found = facts.resolve(outcome.trajectory)
        if not isinstance(found, TrajectoryRecorded):
            yield f"I2: {name}: its trajectory's reference does not resolve"
            continue
        yield from _agreement(found, outcome, name)
        yield from _limits(facts, found, name)
        yield from _pinned(facts, found, name)
        yield from _turns(facts, found, name)
        asked = attempts[found.task, found.sample, found.attempt]
        yield from _whole(facts, found, asked, name)
        yield from _scores(facts, found, asked, name)
        spoken = {(turn.policy, version) for turn in found.turns for version in versions(turn)}
        for policy, version in sorted(spoken - published):
            yield f"I5: {name} has tokens of {policy}/{version}, which was never published"


def versions(turn: Turn) -> list[int]:
    """The policy version of each sampled token of a turn."""
    if turn.demonstrated:
        return []
    return unpack_spans(turn.versions, count(turn.tokens))


def use_of(trajectory: TrajectoryRecorded, policy: str) -> PolicyUse | None:
    """What a policy did in the roles of a trajectory in which it may learn, counted from the turns;
    in all its roles if there is no such one. None if it took no part."""
    own = [turn for turn in trajectory.turns if turn.policy == policy]
    learning = {turn.role for turn in own if turn.trainable and turn.tokens}
    turns = [turn for turn in own if turn.role in learning] or own
    return _use(trajectory, turns) if turns else None


def _use(trajectory: TrajectoryRecorded, turns: Sequence[Turn]) -> PolicyUse:
    drawn = [version for turn in turns for version in versions(turn)]
    return PolicyUse(
        policy=turns[0].policy,
        role=turns[0].role,
        tokens=sum(count(turn.tokens) for turn in turns if turn.trainable),
        longest=max(
            count(_before(trajectory, turn)) + count(turn.context + turn.tokens) for turn in turns
        ),
        oldest_version=min(drawn, default=-1),
    )


def _echoes(facts: Facts) -> Violations:
    """An answer that counts is to one of the requests of its id."""
    pairs = (
        (GenerationCompleted, GenerationRequested),
        (ObservationRecorded, ActionRequested),
    )
    for kind, asked in pairs:
        for answer in facts.events(kind):
            requests = facts.every(asked, answer.event_id)
            digests = {request.digest for request in requests}  # type: ignore[attr-defined]
            if requests and answer.digest not in digests:  # type: ignore[attr-defined]
                name = f"{kind.__name__} {answer.event_id}"
                yield f"I2: {name} is the answer to another meaning than was asked for"


def _agreement(trajectory: TrajectoryRecorded, outcome: EpisodeEnded, name: str) -> Violations:
    def told(one: TrajectoryRecorded | EpisodeEnded) -> tuple[object, ...]:
        return one.task, one.sample, one.attempt, one.reward, one.rewards, one.ending

    if told(trajectory) != told(outcome):
        yield f"I2: {name} ended as {told(outcome)}, its trajectory as {told(trajectory)}"
    played = list(dict.fromkeys((turn.policy, turn.role) for turn in trajectory.turns))
    if played != [(use.policy, use.role) for use in outcome.policies]:
        yield f"I2: {name} says that {played} spoke, it was {outcome.policies}"
        return
    for use in outcome.policies:
        numbered = [
            (index, turn)
            for index, turn in enumerate(trajectory.turns)
            if (turn.policy, turn.role) == (use.policy, use.role)
        ]
        counted = _use(trajectory, [turn for _, turn in numbered])
        stated = use.model_copy(update={"turn_rewards": b"", "turns": b""})
        if counted != stated:
            yield f"I5: {name} states {stated}, its turns say {counted}"
        several = sum(policy == use.policy for policy, _ in played) > 1
        # Older records have them only if the policy has several roles.
        if (several or use.turns) and unpack_i32(use.turns) != [index for index, _ in numbered]:
            yield f"I3: {name} gives the role {use.role} the turns {unpack_i32(use.turns)}"
        earned = [turn.reward for _, turn in numbered]
        rewards = [None if isnan(one) else one for one in unpack_f32(use.turn_rewards)]
        if [one is None for one in earned] != [one is None for one in rewards]:
            yield f"I6: {name}: turns earned {earned}, its outcome says {rewards}"


def _limits(facts: Facts, trajectory: TrajectoryRecorded, name: str) -> Violations:
    started = facts.get(EpisodeStarted, trajectory.task, trajectory.sample)
    if started is None:
        return
    submitted = started.submitted
    tokens = sum(count(turn.tokens) for turn in trajectory.turns)
    if len(trajectory.turns) > submitted.max_turns or tokens > submitted.max_tokens:
        most = f"{submitted.max_turns} turns, {submitted.max_tokens} tokens"
        yield f"I2: {name} has {len(trajectory.turns)} turns, {tokens} tokens, of {most}"


def _pinned(facts: Facts, trajectory: TrajectoryRecorded, name: str) -> Violations:
    """No role is trained that the task gives to one version."""
    started = facts.get(EpisodeStarted, trajectory.task, trajectory.sample)
    roles = started.submitted.roles if started is not None else {}
    for index, turn in enumerate(trajectory.turns):
        use = roles.get(turn.role)
        pinned = use is not None and use.version is not None and trajectory.purpose == "train"
        if pinned and turn.trainable:
            yield f"I3: {name}: turn {index} would be trained, and a pinned version played it"


def _turns(facts: Facts, trajectory: TrajectoryRecorded, name: str) -> Violations:
    """Each turn is the answer that counts to a request made in the context that it stands in."""
    calls = [turn.call for turn in trajectory.turns]
    if len(set(calls)) != len(calls):
        yield f"I2: {name}: a turn is doubled among {calls}"
    for index, turn in enumerate(trajectory.turns):
        where = f"{name}: turn {index}"
        if not -1 <= turn.parent < index:
            yield f"I2: {where} follows turn {turn.parent}"
            continue
        identity = (trajectory.task, trajectory.sample, trajectory.attempt, turn.call)
        answer = facts.get(GenerationCompleted, *identity)
        if answer is None:
            yield f"I2: {where} was never generated in attempt {trajectory.attempt}"
            continue
        theirs = (answer.prompt_added, answer.tokens, answer.logprobs, answer.versions)
        if (turn.context, turn.tokens, turn.logprobs, turn.versions) != theirs:
            yield f"I2: {where} is not the answer that counts to call {turn.call}"
        requests = facts.every(GenerationRequested, *identity)
        asked = [one for one in requests if one.digest == answer.digest]
        if not asked:
            yield f"I2: {where} answers what was never asked"
        elif asked[0].tokens != _before(trajectory, turn):
            yield f"I2: {where} was asked for in another context than it stands in"
        elif turn.demonstrated != (asked[0].demonstration is not None):
            yield f"I2: {where} is {turn.demonstrated=}, and was not asked for as such"
        if turn.demonstrated and (turn.logprobs or turn.versions):
            yield f"I5: {where} was demonstrated, and looks as if it were drawn"
        drawn = versions(turn)
        if drawn != sorted(drawn):
            yield f"I5: {where} was drawn by versions {drawn}"


def _scores(facts: Facts, trajectory: TrajectoryRecorded, asked: _Asked, name: str) -> Violations:
    """A teacher's logprobs are those of the answers that count, for the turn's own tokens."""
    scored: set[tuple[bytes, bytes, bytes]] = set()
    for answer in asked.answers:
        for request in facts.every(GenerationRequested, answer.event_id):
            start = 0
            for one in request.scored if answer.digest == request.digest else ():
                first, end = 4 * one.first, 4 * (one.first + one.count)
                logprobs = answer.logprobs[4 * start : 4 * (start + one.count)]
                scored.add((request.tokens[:first], request.tokens[first:end], logprobs))
                start += one.count
    for index, turn in enumerate(trajectory.turns):
        known = (_before(trajectory, turn) + turn.context, turn.tokens, turn.teacher)
        if turn.teacher and known not in scored:
            yield f"I2: {name}: turn {index} has other scores than its teacher gave"


def taught(recipe: Recipe, facts: Facts) -> Violations:
    """No sample is trained on that its policy's teacher did not score."""
    for batch in facts.events(BatchAssembled):
        training = recipe.policies[batch.policy].training
        if training is None or training.teacher is None:
            continue
        for sample in batch.samples:
            found = facts.resolve(sample.trajectory)
            turns = found.turns if isinstance(found, TrajectoryRecorded) else ()
            for turn in turns:
                own = turn.policy == batch.policy and turn.trainable and not turn.demonstrated
                if own and count(turn.teacher) != count(turn.tokens):
                    name = f"batch {batch.version} of {batch.policy}"
                    yield f"I3: {name} has sample {sample.task}/{sample.sample} without its scores"


def _before(trajectory: TrajectoryRecorded, turn: Turn) -> bytes:
    """i32[]: the ids of all turns that a turn continues, from the first."""
    ids, end = b"", len(trajectory.turns)
    while 0 <= turn.parent < end:  # each turn follows an earlier one: what doesn't, ends it
        end = turn.parent
        turn = trajectory.turns[end]
        ids = turn.context + turn.tokens + ids
    return ids


def _whole(facts: Facts, trajectory: TrajectoryRecorded, asked: _Asked, name: str) -> Violations:
    """No answer of a finished, linear attempt is missing, and each turn earned what was given."""
    if not asked.linear or trajectory.ending not in ("finished", *LIMITS):
        return
    calls = {turn.call for turn in trajectory.turns}
    for answer in asked.answers:
        if answer.tokens and answer.call not in calls:
            yield f"I2: {name}: the answer to call {answer.call} is in no turn"
    earned = _earned(facts, trajectory, asked)
    for turn in trajectory.turns:
        given = fsum(earned[turn.call]) if turn.call in earned else None
        if turn.reward != given and not _is_near(turn.reward, given):
            yield f"I6: {name}: call {turn.call} earned {turn.reward}, its environment gave {given}"


def _is_near(reward: float | None, given: float | None) -> bool:
    """Whether rewards are equal but for the order of their sum, which older records had."""
    return reward is not None and given is not None and isclose(reward, given, rel_tol=1e-9)


def _earned(
    facts: Facts, trajectory: TrajectoryRecorded, asked: _Asked
) -> Mapping[str, list[float]]:
    """What the environment gave after each turn: to the newest turn before the action."""
    turns = sorted(int(turn.call) for turn in trajectory.turns)
    earned: dict[str, list[float]] = defaultdict(list)
    for action in sorted(asked.actions, key=lambda one: one.index):
        if action.kind in ("score", "close", "collect"):
            continue
        observation = facts.get(ObservationRecorded, action.event_id)
        before = [call for call in turns if call < int(action.call)]
        if observation is not None and observation.reward is not None and before:
            earned[str(before[-1])].append(observation.reward)
    return earned
