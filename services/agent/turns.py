"""An episode's turns as they were recorded, put in order for the records that close it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.schemas import packed
from headrace.schemas.events import PolicyUse, Sampling, Turn


@dataclass(eq=False, slots=True)
class RecordedTurn:
    """A turn and the call that it continues, before turns are put in order."""

    turn: Turn
    parent: str | None
    length: int
    """Tokens of the sequence that ends with this turn, its context included."""
    oldest_version: int
    sampling: Sampling


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
