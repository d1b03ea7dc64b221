"""What was seen follows from what was done, in trajectories and in weights.

`tests.checker` knows any log; this knows the world that wrote it (`world.py`, `learner.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from schemas import packed
from schemas.events import (
    BatchAssembled,
    EpisodeEnded,
    Event,
    PolicyPublished,
    TrajectoryRecorded,
    Turn,
)
from services.weights import weights_digest
from tests.checker import Facts
from tests.simulation.learner import DigestLearner
from tests.simulation.world import LETTERS, TURNS, reward, verdict, where
from trainer.loader import build_updates
from trainer.sequences import UnusableBatch


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
                yield f"the story of episode {found.task}/{found.sample} is untrue: {wrong}"


def _walk(trajectory: TrajectoryRecorded, moody: bool) -> Iterator[str]:
    """One turn after the other: nothing lost, nothing doubled, and the reward is earned."""
    if len(trajectory.turns) != TURNS:
        yield f"it has {len(trajectory.turns)} turns"
    if [turn.parent for turn in trajectory.turns] != list(range(-1, len(trajectory.turns) - 1)):
        yield "its turns don't follow each other"
    if trajectory.reward != sum(turn.reward or 0.0 for turn in trajectory.turns):
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


def _seen(turn: Turn) -> str:
    return bytes(packed.unpack_i32(turn.context)).decode()


def untrue_weights(facts: Facts, learner: DigestLearner) -> Iterator[str]:
    """Versions that are not what training on the batches gives, each once and in order.

    `learner` is a new one that is deterministic.
    """
    published = sorted(
        (*facts.all(PolicyPublished), *facts.again[PolicyPublished]), key=lambda one: one.offset
    )
    version, digest = -1, b""
    for one in published:
        event: PolicyPublished = one.event
        if event.version != version:
            version = event.version
            if event.version and (batch := _batch(facts, event)) is not None:
                _train(facts, learner, batch)
            digest = weights_digest(learner.weights())
        if event.digest != digest:
            yield f"version {version}, {event.status}, is not what its batches make of it"
            return


def _batch(facts: Facts, event: PolicyPublished) -> BatchAssembled | None:
    found = None if event.batch is None else facts.resolve(event.batch)
    return found if isinstance(found, BatchAssembled) else None


def _train(facts: Facts, learner: DigestLearner, batch: BatchAssembled) -> None:
    found: Iterable[Event | None] = (facts.resolve(one.trajectory) for one in batch.samples)
    events = [event for event in found if event is not None]
    try:
        learner.train(build_updates(batch, events, learner.vocabulary, updates=1))
    except UnusableBatch:
        return
