"""Names of containers. A container's name holds its state, since only the engine can change it.

    headrace.NAMESPACE.TASK-SAMPLE-ATTEMPT.PARTITION-OFFSET.TOKEN.BEGUN      in use
    headrace.NAMESPACE.TASK-SAMPLE-ATTEMPT.PARTITION-OFFSET.TOKEN.BEGUN.copy in use, for one grading
    headrace.NAMESPACE.idle.TOKEN                                            persistent, restarted
    headrace.NAMESPACE.ready.TOKEN                                           started, never used
    headrace.NAMESPACE.taken.TOKEN                                           about to be used

BEGUN is the index of the last action that was begun. To begin the next action, a worker renames the
container from the name that it has seen last to the one name that follows it. If two workers try,
one of them finds the old name gone or the new name in use. So no action is begun twice, and a
worker that has lost its partition can do nothing more. Processes in the container can't see the
name.

Docker looks a container up before it locks it, so two renames from one name to *different*
names may both succeed. That is why an idle container first gets the name `taken`, which is the same
for every worker. If one worker gives a container both its names before Docker carries out the first
rename of another worker, both take it. So a worker takes no container twice at once, and looks at
the end whether it still has the container.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headrace.services.env.environment import Claim

EPISODE, PARTITION = "headrace.episode", "headrace.partition"
"""Labels that follow from a container's name."""
_IN_USE = re.compile(
    r"/?headrace\.(?P<namespace>[a-z0-9_-]+)\.(?P<task>\d+)-(?P<sample>\d+)-(?P<attempt>\d+)"
    r"\.(?P<partition>\d+)-(?P<offset>\d+)\.(?P<token>[0-9a-f]+)\.(?P<begun>\d+)(?P<copy>\.copy)?\Z"
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
    copy: bool = False
    """Whether it is a fresh copy of the attempt's sandbox. No worker resumes it."""

    @property
    def instance(self) -> str:
        """The container's id in the topic `instances`."""
        return f"sandbox-{self.token}"

    def is_of(self, claim: Claim) -> bool:
        """Whether it is a container of this attempt's environment in the claim's partition."""
        return (self.attempt, self.partition) == (claim.attempt, claim.partition)

    def __str__(self) -> str:
        return (
            f"headrace.{self.namespace}.{self.task}-{self.sample}-{self.attempt}"
            f".{self.partition}-{self.offset}.{self.token}.{self.begun}"
            f"{'.copy' if self.copy else ''}"
        )

    def next(self) -> InUse:
        """Return the name after the next action is begun."""
        return replace(self, begun=self.begun + 1)


def in_use(namespace: str, claim: Claim, token: str, *, copy: bool = False) -> InUse:
    """Return the name of a container of `claim` whose reset is begun."""
    attempt = claim.task, claim.sample, claim.attempt
    return InUse(namespace, *attempt, claim.partition, claim.offset, token, copy=copy)


def parse(name: str) -> InUse | None:
    """Read the name of a container in use; None for every other name."""
    match = _IN_USE.match(name)
    if match is None:
        return None
    numbers = ("task", "sample", "attempt", "partition", "offset", "begun")
    found = {number: int(match[number]) for number in numbers}
    copy = match["copy"] is not None
    return InUse(namespace=match["namespace"], token=match["token"], copy=copy, **found)


@dataclass(frozen=True, slots=True)
class Which:
    """Which containers are looked for."""

    pattern: str
    """A regular expression of their names."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that follow from such a name, for an engine that finds containers by labels."""


def read(name: str) -> tuple[str, dict[str, str]]:
    """Return the token of a container's name, which stays, and the labels that the name implies."""
    found = parse(name)
    if found is None:
        return name.rpartition(".")[2], {}
    episode = f"{found.task}-{found.sample}"
    return found.token, {EPISODE: episode, PARTITION: str(found.partition)}


def of_episode(namespace: str, claim: Claim) -> Which:
    """Return which containers are of the claim's episode, of every attempt."""
    episode = f"{claim.task}-{claim.sample}"
    pattern = f"^/?headrace\\.{re.escape(namespace)}\\.{episode}-"
    return Which(pattern, {EPISODE: episode})


def of_partition(namespace: str, partition: int) -> Which:
    """Return which containers are of one partition's episodes."""
    pattern = f"^/?headrace\\.{re.escape(namespace)}\\.[0-9-]+\\.{partition}-"
    return Which(pattern, {PARTITION: str(partition)})


def idle(namespace: str, token: str) -> str:
    """Return the name of a persistent container that waits to be used again."""
    return f"headrace.{namespace}.idle.{token}"


def ready(namespace: str, token: str) -> str:
    """Return the name of a container that was started before an episode needed it."""
    return f"headrace.{namespace}.ready.{token}"


def of_ready(namespace: str) -> Which:
    """Return which containers were never used."""
    return Which(f"^/?headrace\\.{re.escape(namespace)}\\.ready\\.")


def taken(namespace: str, token: str) -> str:
    """Return the name that a worker gives an idle container to take it."""
    return f"headrace.{namespace}.taken.{token}"


def is_taken(name: str) -> bool:
    """Return whether a container, of any namespace, is about to be used."""
    return name.lstrip("/").split(".")[2:3] == ["taken"]


def of_idle(namespace: str) -> Which:
    """Return which containers are idle."""
    return Which(f"^/?headrace\\.{re.escape(namespace)}\\.idle\\.")
