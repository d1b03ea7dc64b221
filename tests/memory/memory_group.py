"""The consumer groups of the in-memory log: each partition's owner, and the groups' commits.

Partitions move one by one, as with Kafka's cooperative protocol: a partition is granted only once
its last owner has released it, or was expelled. The assignment is balanced and sticky. Members and
partitions are in dicts and lists, not sets, because their order must repeat.
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
    """Assigned to the member, which has not handled that yet."""
    revoking: dict[Partition, None] = field(default_factory=dict)
    """To be released by the member."""
    expelled: bool = False


class MemoryGroup:
    """One consumer group."""

    def __init__(self, name: str, partitions: Callable[[Sequence[str]], list[Partition]]) -> None:
        """`partitions` returns the partitions of some topics."""
        self.name = name
        self.members: list[Member] = []
        self.commits: dict[Partition, Committed] = {}
        self._partitions = partitions
        self._owners: dict[Partition, Member] = {}
        self._targets: dict[Partition, Member] = {}

    def join(self, member: Member) -> None:
        """Adds a member, and rebalances."""
        self.members.append(member)
        self._rebalance()

    def leave(self, member: Member) -> None:
        """Removes a member and its partitions, and rebalances."""
        if member not in self.members:
            return
        self.members.remove(member)
        for partition in [
            partition for partition, owner in self._owners.items() if owner is member
        ]:
            del self._owners[partition]
        member.granted.clear()
        member.revoking.clear()
        self._rebalance()

    def expel(self, member: Member) -> None:
        """Removes a member that was silent for too long, and notifies it."""
        self.leave(member)
        member.expelled = True
        member.news.set()

    def shuffle(self, random: Random) -> None:
        """Assigns the partitions at random. The next rebalance balances them."""
        for partition in sorted(self._targets):
            able = [member for member in self.members if partition.topic in member.topics]
            self._targets[partition] = random.choice(able)
        self._move()

    def release(self, member: Member, partitions: Sequence[Partition]) -> None:
        """Notes that the member has released these partitions."""
        for partition in partitions:
            if self._owners.get(partition) is member:
                del self._owners[partition]
                member.revoking.pop(partition, None)
                member.granted.pop(partition, None)
        self._move()

    def commit(self, member: Member, commits: Mapping[Partition, Committed]) -> None:
        """Commits for partitions that the member holds; leaves out others."""
        _check_metadata(commits)
        self.commits |= {
            partition: committed
            for partition, committed in commits.items()
            if self._owners.get(partition) is member
        }

    def _rebalance(self) -> None:
        topics = sorted({topic for member in self.members for topic in member.topics})
        self._targets = balance(self._partitions(topics), self.members, self._targets)
        self._move()

    def _move(self) -> None:
        """Moves partitions to their targets, as far as the owners have released them."""
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
    """Assigns partitions so that few move, and no member has two more than another could have.

    Each goes to a member that subscribes to its topic. There must be one.
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
    """Moves one partition from a member with many to one with few. False if none has to move."""
    for shares in sorted(held.values(), key=len, reverse=True):
        for partition in reversed(shares):
            fewer = _least_loaded(held, partition)
            if len(shares) - len(fewer) > 1:
                shares.remove(partition)
                fewer.append(partition)
                return True
    return False


def _check_metadata(commits: Mapping[Partition, Committed]) -> None:
    """Refuses metadata that a stock broker refuses."""
    for partition, committed in commits.items():
        size = len(committed.metadata.encode())
        if size > METADATA_LIMIT:
            raise HeadraceError(
                f"the commit of {partition.topic}/{partition.number} has {size} bytes of "
                f"metadata, but brokers accept at most {METADATA_LIMIT}"
            )
