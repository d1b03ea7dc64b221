"""A container's name is its state: the one thing about it that can change, and only by the engine.

    headrace.NAMESPACE.TASK-SAMPLE-ATTEMPT.PARTITION-OFFSET.TOKEN.BEGUN      in use
    headrace.NAMESPACE.idle.TOKEN                                            persistent, unused
    headrace.NAMESPACE.taken.TOKEN                                           between the two

BEGUN is the index of the last action that was begun. To begin the next, a worker renames the
container *from the name that it knows* to the one name that follows. Of two that try, one finds the
old name gone or the new one given: no action is begun twice, and a worker that was overtaken can do
nothing more. What runs inside can't see it. The engine finds a container before it locks it: two
renames from one name to *different* ones may both succeed. So an idle one is taken first of all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from headrace.services.env.environment import Claim

_IN_USE = re.compile(
    r"/?headrace\.(?P<namespace>[a-z0-9_-]+)\.(?P<task>\d+)-(?P<sample>\d+)-(?P<attempt>\d+)"
    r"\.(?P<partition>\d+)-(?P<offset>\d+)\.(?P<token>[0-9a-f]+)\.(?P<begun>\d+)\Z"
)


@dataclass(frozen=True, slots=True)
class InUse:
    """The name of a container that an attempt uses."""

    namespace: str
    task: int
    sample: int
    attempt: int
    partition: int
    offset: int
    token: str
    begun: int = 0

    def __str__(self) -> str:
        return (
            f"headrace.{self.namespace}.{self.task}-{self.sample}-{self.attempt}"
            f".{self.partition}-{self.offset}.{self.token}.{self.begun}"
        )

    def next(self) -> InUse:
        """The name once the next action is begun."""
        return replace(self, begun=self.begun + 1)


def in_use(namespace: str, claim: Claim, token: str) -> InUse:
    """The name of a container that `claim` has, its reset begun."""
    return InUse(
        namespace,
        claim.task,
        claim.sample,
        claim.attempt,
        claim.partition,
        claim.offset,
        token,
    )


def parse(name: str) -> InUse | None:
    """The attempt that a container's name tells of; None where it tells of none."""
    match = _IN_USE.match(name)
    if match is None:
        return None
    numbers = ("task", "sample", "attempt", "partition", "offset", "begun")
    found = {number: int(match[number]) for number in numbers}
    return InUse(namespace=match["namespace"], token=match["token"], **found)


def of_episode(namespace: str, task: int, sample: int) -> str:
    """A pattern of the names of one episode's containers, whatever the attempt."""
    return f"^/?headrace\\.{re.escape(namespace)}\\.{task}-{sample}-"


def of_partition(namespace: str, partition: int) -> str:
    """A pattern of the names of the containers of one partition's episodes."""
    return f"^/?headrace\\.{re.escape(namespace)}\\.[0-9-]+\\.{partition}-"


def idle(namespace: str, token: str) -> str:
    """The name of a persistent container that waits to be used again."""
    return f"headrace.{namespace}.idle.{token}"


def taken(namespace: str, token: str) -> str:
    """The name by which it is taken: the same for whoever would have it."""
    return f"headrace.{namespace}.taken.{token}"


def of_idle(namespace: str) -> str:
    """A pattern of the names of idle containers."""
    return f"^/?headrace\\.{re.escape(namespace)}\\.idle\\."
