"""The turns of an episode, and the call paths that name them.

A call path numbers a request so that a second run of the agent gives it the same name. The
requests of one branch of the agent's code are "1", "2", … If the second of them is a `gather`, the
requests of its first branch are "2.1.1", "2.1.2", …, and those of its second "2.2.1", …, in
whatever order the branches make them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import fsum

from headrace.schemas import packed
from headrace.schemas.events import PolicyUse, Sampling, Turn


@dataclass(slots=True)
class Branch:
    """A part of the agent's code that makes one request after the other."""

    prefix: str = ""
    calls: int = 0
    last_turn: str | None = None
    """Call path of the newest turn before its next request, which gets the reward of a step."""

    def next(self) -> str:
        """Returns the call path of its next request."""
        self.calls += 1
        return f"{self.prefix}{self.calls}"

    def split(self, count: int) -> list[Branch]:
        """Returns the branches of a `gather`, which is its next request."""
        path = self.next()
        return [Branch(f"{path}.{i}.", last_turn=self.last_turn) for i in range(1, count + 1)]

    def join(self, branches: Iterable[Branch]) -> None:
        """Goes on after a `gather`. Its last turn does not depend on which branch ended first."""
        turns = [one.last_turn for one in branches if one.last_turn is not None]
        self.last_turn = max(turns, key=_path, default=self.last_turn)


current_branch: ContextVar[Branch] = ContextVar("headrace_branch")
"""The branch of the current asyncio task."""


@dataclass(eq=False, slots=True)
class RecordedTurn:
    """A turn, and the call path of the turn that it continues."""

    turn: Turn
    parent: str | None
    length: int
    """Tokens of the sequence that ends with this turn, its context included."""
    oldest_version: int
    """The oldest policy version that drew one of its tokens; -1 if none is known."""
    sampling: Sampling
    cut: bool = False
    """Whether its answer reached a limit of the recipe or the task, not only the agent's own."""
    rewards: list[float] = field(default_factory=list)
    """The rewards that followed it."""

    def add_reward(self, reward: float) -> None:
        """Adds to the turn's reward."""
        self.rewards.append(reward)
        # `fsum` is exact: the sum is the same in whatever order parallel steps are answered.
        self.turn = self.turn.model_copy(update={"reward": fsum(self.rewards)})


def is_cut(recorded: Mapping[str, RecordedTurn]) -> bool:
    """Returns whether an answer that nothing continues was cut by a limit of tokens."""
    continued = {one.parent for one in recorded.values()}
    return any(one.cut for call, one in recorded.items() if call not in continued)


def arrange(
    recorded: Mapping[str, RecordedTurn],
) -> tuple[tuple[Turn, ...], tuple[Sampling, ...]]:
    """Sorts turns by call path, and replaces parents and samplings by indices into the results."""
    calls = sorted(recorded, key=_path)
    index = {call: number for number, call in enumerate(calls)}
    samplings: dict[Sampling, int] = {}
    turns = []
    for call in calls:
        one = recorded[call]
        parent = -1 if one.parent is None else index[one.parent]
        sampling = samplings.setdefault(one.sampling, len(samplings))
        turns.append(one.turn.model_copy(update={"parent": parent, "sampling": sampling}))
    return tuple(turns), tuple(samplings)


def policy_uses(recorded: Mapping[str, RecordedTurn]) -> tuple[PolicyUse, ...]:
    """Sums up what each policy did in each role, in the order of the first turns."""
    by_role: dict[tuple[str, str], list[tuple[int, RecordedTurn]]] = {}
    for index, call in enumerate(sorted(recorded, key=_path)):
        turn = recorded[call].turn
        by_role.setdefault((turn.policy, turn.role), []).append((index, recorded[call]))
    return tuple(
        _policy_use(policy, role, turns, several=len(by_role) > 1)
        for (policy, role), turns in by_role.items()
    )


def _policy_use(
    policy: str, role: str, indexed: Sequence[tuple[int, RecordedTurn]], *, several: bool
) -> PolicyUse:
    turns = [one for _, one in indexed]
    spoken = [one for one in turns if one.turn.tokens]
    rewards = [float("nan") if one.turn.reward is None else one.turn.reward for one in turns]
    return PolicyUse(
        policy=policy,
        role=role,
        tokens=sum(packed.count(one.turn.tokens) for one in spoken if one.turn.trainable),
        longest=max(one.length for one in turns),
        oldest_version=min(
            (one.oldest_version for one in spoken if not one.turn.demonstrated), default=-1
        ),
        turn_rewards=packed.pack_f32(rewards),
        turns=packed.pack_i32(index for index, _ in indexed) if several else b"",
    )


def _path(call: str) -> tuple[int, ...]:
    return tuple(int(part) for part in call.split("."))
