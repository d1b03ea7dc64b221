"""The consumer groups of the in-memory log: who holds which partition, and the groups' places.

Partitions change hands one by one, as with Kafka's cooperative protocol: a partition is granted
only once its last owner has released it, or was expelled. The assignment is balanced and sticky.
Sets of members and partitions are dicts and lists here: those have an order that repeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from headrace.errors import HeadraceError
from headrace.services.kafka.broker import METADATA_LIMIT, Committed, Partition


@dataclass(eq=False, slots=True)
class Member:
    """A member as its group sees it."""

    topics: tuple[str, ...]
    news: asyncio.Event = field(default_factory=asyncio.Event)
    """Set whenever one of the following changes."""
    granted: dict[Partition, None] = field(default_factory=dict)
    """Won, and not yet taken over by the member."""
    revoking: dict[Partition, None] = field(default_factory=dict)
    """To be released by the member."""
    expelled: bool = False


class MemoryGroup:
    """One consumer group."""

    def __init__(self, name: str, partitions: Callable[[Sequence[str]], list[Partition]]) -> None:
        """`partitions` says which ones some topics have."""
        self.name = name
        self.members: list[Member] = []
        self.places: dict[Partition, Committed] = {}
        self._partitions = partitions
        self._owners: dict[Partition, Member] = {}
        self._targets: dict[Partition, Member] = {}

    def join(self, member: Member) -> None:
        """Lets a member in, and shares the partitions anew."""
        self.members.append(member)
        self._rebalance()

    def leave(self, member: Member) -> None:
        """Lets a member go, with all that it held."""
        if member not in self.members:
            return
        self.members.remove(member)
        for partition in [place for place, owner in self._owners.items() if owner is member]:
            del self._owners[partition]
        member.granted.clear()
        member.revoking.clear()
        self._rebalance()

    def expel(self, member: Member) -> None:
        """Takes everything from a member that was silent for too long, and tells it."""
        self.leave(member)
        member.expelled = True
        member.news.set()

    def shuffle(self, random: Random) -> None:
        """Shares the partitions anew, by chance: balance comes back with the next change."""
        for partition in sorted(self._targets):
            able = [member for member in self.members if partition.topic in member.topics]
            self._targets[partition] = random.choice(able)
        self._hand_over()

    def release(self, member: Member, partitions: Sequence[Partition]) -> None:
        """The member has let go of these."""
        for partition in partitions:
            if self._owners.get(partition) is member:
                del self._owners[partition]
                member.revoking.pop(partition, None)
                member.granted.pop(partition, None)
        self._hand_over()

    def commit(self, member: Member, commits: Mapping[Partition, Committed]) -> None:
        """Notes the places of partitions that the member holds; others are left out."""
        check_metadata(commits)
        self.places |= {
            partition: committed
            for partition, committed in commits.items()
            if self._owners.get(partition) is member
        }

    def _rebalance(self) -> None:
        topics = sorted({topic for member in self.members for topic in member.topics})
        self._targets = balance(self._partitions(topics), self.members, self._targets)
        self._hand_over()

    def _hand_over(self) -> None:
        """Moves towards the targets, as far as the owners have let go."""
        for partition in sorted({**self._owners, **self._targets}):
            owner, target = self._owners.get(partition), self._targets.get(partition)
            if owner is target:
                continue
            if owner is not None:
                owner.revoking[partition] = None
                owner.news.set()
            elif target is not None:
                self._owners[partition] = target
                target.granted[partition] = None
                target.news.set()


def balance(
    partitions: Sequence[Partition],
    members: Sequence[Member],
    previous: Mapping[Partition, Member],
) -> dict[Partition, Member]:
    """Shares partitions so that few change hands, and no one has two more than another could.

    Each goes to a member with its topic; there must be one.
    """
    held: dict[Member, list[Partition]] = {member: [] for member in members}
    loose: list[Partition] = []
    for partition in partitions:
        owner = previous.get(partition)
        keeps = owner is not None and owner in held and partition.topic in owner.topics
        (held[owner] if owner is not None and keeps else loose).append(partition)
    for partition in loose:
        _least_loaded(held, partition).append(partition)
    while _level(held):
        pass
    return {partition: member for member, shares in held.items() for partition in shares}


def _least_loaded(held: Mapping[Member, list[Partition]], partition: Partition) -> list[Partition]:
    return min((held[member] for member in held if partition.topic in member.topics), key=len)


def _level(held: Mapping[Member, list[Partition]]) -> bool:
    """Moves one partition from a member with many to one with few. False: all is level."""
    for shares in sorted(held.values(), key=len, reverse=True):
        for partition in reversed(shares):
            fewer = _least_loaded(held, partition)
            if len(shares) - len(fewer) > 1:
                shares.remove(partition)
                fewer.append(partition)
                return True
    return False


def check_metadata(commits: Mapping[Partition, Committed]) -> None:
    """Refuses what a stock broker refuses."""
    for partition, committed in commits.items():
        size = len(committed.metadata.encode())
        if size > METADATA_LIMIT:
            raise HeadraceError(
                f"the commit of {partition.topic}/{partition.number} has {size} bytes of "
                f"metadata: a broker takes {METADATA_LIMIT}"
            )
