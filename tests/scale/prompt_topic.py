"""The partitions of the prompts, and the consumer group of the inference workers.

A worker that goes without a word is noticed after its session. Partitions move as Kafka's assignor
`cooperative-sticky` moves them: as few as possible, so that all workers have about as many. A
prompt that is not answered moves with its partition, and its next owner begins it again.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.scale.engines import SimulatedPrompt, SimulatedWorker
from tests.scale.fleet import HOME, Region
from tests.scale.fluid import Events

SESSION_S = 6.0


class PromptTopic:
    """Who owns which partition, and the prompts of partitions without an owner."""

    def __init__(
        self, events: Events, partitions: int, moved: Callable[[SimulatedWorker], None]
    ) -> None:
        """`moved` is called for a worker whose partitions changed: it reports soon."""
        self._events = events
        self._owner: list[SimulatedWorker | None] = [None] * partitions
        self._orphans: dict[int, list[SimulatedPrompt]] = {}
        self._members: list[SimulatedWorker] = []
        self._moved = moved

    def owner(self, partition: int) -> SimulatedWorker | None:
        """Returns who owns a partition. It may be gone without anybody knowing."""
        return self._owner[partition]

    def deliver(self, prompt: SimulatedPrompt) -> None:
        """The owner has read a prompt, whoever that is by now."""
        owner = self._owner[prompt.partition]
        if owner is not None and owner.alive:
            owner.take(prompt)
        else:
            self._orphans.setdefault(prompt.partition, []).append(prompt)

    def region(self, partition: int) -> Region:
        """Where the owner of a partition is."""
        owner = self._owner[partition]
        return owner.pool.region if owner is not None else HOME

    def join(self, worker: SimulatedWorker) -> None:
        """Adds a worker, which has loaded its weights."""
        self._members.append(worker)
        self._assign()

    def lose(self, worker: SimulatedWorker) -> None:
        """Takes a worker away that went without a word."""
        worker.alive = False
        left = worker.abandon(set(worker.partitions))
        for prompt in left:
            self._orphans.setdefault(prompt.partition, []).append(prompt)
        self._events.after(SESSION_S, lambda: self._notice(worker))

    def _notice(self, worker: SimulatedWorker) -> None:
        self._members.remove(worker)
        for number in worker.partitions:
            self._owner[number] = None
        worker.partitions = []
        self._assign()

    def _assign(self) -> None:
        """Gives partitions without an owner away, and levels what the members have."""
        if not self._members:
            return
        free = [number for number, owner in enumerate(self._owner) if owner is None]
        most = -(-len(self._owner) // len(self._members))
        least = len(self._owner) // len(self._members)
        taken: list[tuple[int, SimulatedWorker]] = []
        spare = len(self._owner) - least * len(self._members)
        for member in sorted(self._members, key=lambda one: -len(one.partitions)):
            keeps = most if spare > 0 else least
            spare -= 1
            while len(member.partitions) > keeps:
                number = member.partitions.pop()
                taken.append((number, member))
                free.append(number)
        moved = {id(member): member for _, member in taken}
        left: list[SimulatedPrompt] = []
        for member in moved.values():
            left += member.abandon({number for number, owner in taken if owner is member})
        for number in free:
            member = min(self._members, key=lambda one: len(one.partitions))
            member.partitions.append(number)
            self._owner[number] = member
            moved[id(member)] = member
            left += self._orphans.pop(number, [])
        for prompt in left:
            self.deliver(prompt)
        for member in moved.values():
            self._moved(member)
