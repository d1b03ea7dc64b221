"""What was seen follows from what was done, in trajectories and in weights.

`services/operate/verify` knows any log; this knows the world that wrote it (`world.py`,
`learner.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from math import fsum

from headrace.schemas import packed
from headrace.schemas.events import (
    ActionRequested,
    BatchAssembled,
    EpisodeEnded,
    Event,
    ObservationRecorded,
    PolicyPublished,
    TrajectoryRecorded,
    Turn,
)
from headrace.services.kafka.broker import Partition, Record
from headrace.services.log.dead_letter import WHY
from headrace.services.models.weights import weights_digest
from headrace.services.operate.verify.invariants.log_facts import Facts
from headrace.trainer.loader import build_updates
from headrace.trainer.sequences import UnusableBatch
from tests.simulation.learner import BEGUN_FROM, DigestLearner, number_of
from tests.simulation.world import (
    ACTED,
    LETTERS,
    PLACE,
    TURNS,
    memory_of,
    own_reward,
    place_of,
    reward,
    verdict,
    where,
)


def untrue_stories(facts: Facts, *, moody: bool) -> Iterator[str]:
    """Finished episodes whose trajectories can't have happened."""
    for one in facts.all(EpisodeEnded):
        outcome = one.event
        if outcome.ending != "finished" or outcome.trajectory is None:
            continue
        found = facts.resolve(outcome.trajectory)
        if isinstance(found, TrajectoryRecorded):
            debate = found.agent == "debater"
            for wrong in _debate(found) if debate else _walk(found, moody):
                yield f"I2: the story of episode {found.task}/{found.sample} is untrue: {wrong}"
            if not debate and _acted(found) != memory_of(_answered(facts, found)):
                yield f"I2: the agent of episode {found.task}/{found.sample} did something else"


def _acted(trajectory: TrajectoryRecorded) -> float:
    """What an agent says that it did: without a word, all that the policy said."""
    said = memory_of([turn.text for turn in trajectory.turns])
    return trajectory.metrics.get(ACTED, said)


def _answered(facts: Facts, trajectory: TrajectoryRecorded) -> list[str]:
    """The actions that the answers which count are answers to."""
    steps: dict[int, str] = {}
    for observation in facts.events(ObservationRecorded):
        key = (observation.task, observation.sample, observation.attempt)
        if key != (trajectory.task, trajectory.sample, trajectory.attempt):
            continue
        for action in facts.every(ActionRequested, observation.event_id):
            if action.kind == "step" and action.digest == observation.digest:
                steps[action.index] = json.loads(action.payload)["action"]
    return [steps[index] for index in sorted(steps)]


def _walk(trajectory: TrajectoryRecorded, moody: bool) -> Iterator[str]:
    """One turn after the other: nothing lost, nothing doubled, and the reward is earned."""
    if len(trajectory.turns) != TURNS:
        yield f"it has {len(trajectory.turns)} turns"
    last: dict[str, int] = {}
    said: dict[str, list[str]] = {}
    for index, turn in enumerate(trajectory.turns):
        if turn.parent != last.get(turn.role, -1):
            yield f"turn {index} does not follow the one before it of role {turn.role}"
        last[turn.role] = index
        said.setdefault(turn.role, []).append(turn.text)
    roles = sorted(said)
    if [turn.role for turn in trajectory.turns] != [
        roles[index % len(roles)] for index in range(len(trajectory.turns))
    ]:
        yield "its roles did not answer by turns"
    for role in roles:
        own = trajectory.rewards.get(role)
        if own is not None and own != own_reward(role, said[role]):
            yield f"role {role} did not earn the reward {own}"
    if trajectory.reward != fsum(turn.reward or 0.0 for turn in trajectory.turns):
        yield f"its reward is {trajectory.reward}"
    paths = [f"{trajectory.task}/{trajectory.sample}/"]
    for index, turn in enumerate(trajectory.turns):
        seen = _seen(turn)
        if index == 0:  # A sandbox begins at a place of chance, whose name it shows.
            paths, seen = [paths[0] + seen[:-3]], seen[-3:]
        # A moody agent may add a letter to what the policy says.
        actions = [turn.text, *(turn.text + letter for letter in LETTERS if moody)]
        paths = [
            f"{path}/{action}"
            for path in paths
            for action in actions
            if where(path) == seen and reward(f"{path}/{action}") == turn.reward
        ]
        if not paths:
            yield f"nothing leads to what turn {index} sees or earns"
            return
    for blob in trajectory.artifacts:
        if blob.name == PLACE and blob not in map(place_of, paths):
            yield f"its file {blob.name!r} is of another path"


def _debate(trajectory: TrajectoryRecorded) -> Iterator[str]:
    """Two turns at a time that see the same; one of them was acted on."""
    turns = trajectory.turns
    if len(turns) != 2 * TURNS:
        yield f"it has {len(turns)} turns"
    paths: dict[str, list[str]] = {f"{trajectory.task}/{trajectory.sample}/": []}
    for index, (one, other) in enumerate(zip(turns[::2], turns[1::2], strict=False)):
        if (one.parent, other.parent) != (-1, -1) or _seen(one) != _seen(other):
            yield f"turns {2 * index} and {2 * index + 1} are not side by side"
        seen, after = _seen(one), {}
        for path, said in paths.items():
            begin = seen[:-3] if index == 0 else ""
            if begin + where(path + begin) == seen:
                for turn in (one, other):
                    after[f"{path}{begin}/{turn.text}"] = [*said, turn.text]
        paths = after
    rewards = {verdict({"said": said}) for said in paths.values()}
    if trajectory.reward not in rewards:
        yield f"its reward is {trajectory.reward}, not one of {sorted(rewards)}"
    for role in {turn.role for turn in turns} & trajectory.rewards.keys():
        if trajectory.rewards[role] not in {own_reward(role, said) for said in paths.values()}:
            yield f"role {role} did not earn the reward {trajectory.rewards[role]}"


def _seen(turn: Turn) -> str:
    return bytes(packed.unpack_i32(turn.context)).decode()


def unparked(garbage: Iterable[Record], letters: Iterable[Record]) -> Iterator[str]:
    """Records that are no event, and that no dead letter holds whole."""
    parked = set()
    for letter in letters:
        told = {name.removeprefix(WHY): text.decode() for name, text in letter.headers}
        place = Partition(told["topic"], int(told["partition"]))
        parked.add((place, int(told["offset"]), letter.value or b""))
    for record in garbage:
        if (record.partition, record.offset, record.value or b"") not in parked:
            location = f"{record.partition.topic}/{record.partition.number}@{record.offset}"
            yield f"I1: {location} is no event, and in no dead letter"


def untrue_weights(
    facts: Facts, policy: str, learner: DigestLearner, *, taught: bool
) -> Iterator[str]:
    """Versions that are not what training on the batches gives, each once and in order.

    `learner` is a new one that is deterministic. `taught`: the policy has a teacher.
    """
    published = sorted(
        (*facts.all(PolicyPublished), *facts.again[PolicyPublished]), key=lambda one: one.offset
    )
    published = [one for one in published if one.event.policy == policy]
    version, digest = -1, b""
    for one in published:
        event: PolicyPublished = one.event
        if event.version != version:
            version = event.version
            if event.version and (batch := _batch(facts, event)) is not None:
                _train(facts, learner, batch, taught)
            digest = weights_digest(learner.weights())
        if event.digest != digest:
            name = f"version {policy}/{version}, {event.status},"
            yield f"I4: {name} is not what its batches make of it"
            return


def unpublished_weights(facts: Facts) -> Iterator[str]:
    """Versions that were trained from other weights than those of the version before them."""
    digests: dict[tuple[str, int], bytes] = {}
    for one in facts.in_order(PolicyPublished):
        event: PolicyPublished = one.event
        name, before = event.policy, event.version - 1
        begun_from = event.metrics.get(BEGUN_FROM)
        if begun_from not in (None, number_of(digests.get((name, before), b""))):
            yield f"I4: version {name}/{event.version} was not trained from version {before}"
        digests[name, event.version] = event.digest


def _batch(facts: Facts, event: PolicyPublished) -> BatchAssembled | None:
    found = None if event.batch is None else facts.resolve(event.batch)
    return found if isinstance(found, BatchAssembled) else None


def _train(facts: Facts, learner: DigestLearner, batch: BatchAssembled, taught: bool) -> None:
    found: Iterable[Event | None] = (facts.resolve(one.trajectory) for one in batch.samples)
    events = [event for event in found if event is not None]
    try:
        updates, _ = build_updates(batch, events, learner.vocabulary, 1, taught)
        learner.train(updates)
    except UnusableBatch:
        return
