"""Decides what a broker's namespaces no longer need: weights, checkpoints, whole namespaces.

Namespaces share the blob store, which names blobs by their content. So a blob is needed as long as
any namespace needs it. A policy needs its newest versions and the versions of its checkpoints on
this machine. While its run has not ended, it also needs each version that an episode may still be
pinned to, which was the newest one within the last deadline, or an opponent of the league.

Other brokers' namespaces, and namespaces that ACLs hide, may share the store too. They need the
blobs that have their markers (`services/models/blob_owners.py`). A blob that has no marker, or that
no event names, is removed only on request. Does no I/O.

Single records are never removed. A namespace is kept whole, or it is removed whole on request after
its run has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from headrace.schemas.events import Blob, Event, PolicyPublished, RunStateEntered
from headrace.schemas.recipe.task_settings import League
from headrace.services.log.signatures import signers_of
from headrace.services.models.blob_owners import UNKNOWN, Marker, Removal, StoredBlob
from headrace.services.namespace.run_life import RunLife
from headrace.services.tasks.league import Opponents

GRACE_S = 3600.0
"""A version is kept if it was the newest one within an episode's deadline plus this time."""
PUT_S = 600.0
"""A blob that was put within this time is kept, since its publication may follow."""
UNNAMED_S = 86_400.0
"""A blob that no event names is kept for this time, since an event may still name it."""
ENDED_S = 30.0
"""The processes of an ended run are gone after this time."""
DEADLINE_S = 86_400.0
"""The longest episode, if the recipe does not set a deadline."""
MOST_S = 1e10
"""No episode has a later deadline."""
Kind = Literal["blob", "marker", "checkpoints", "folder", "topics"]


@dataclass(frozen=True, slots=True)
class Published:
    """The fields of a PolicyPublished that matter here. Blobs are named by SHA-256 in hex."""

    policy: str
    version: int
    at: float
    """Epoch seconds."""
    blobs: frozenset[str] = frozenset()
    """Blobs of full weights, of the deltas that build on them, of an adapter's base, of the digests
    of tensors, and of the trainer's logprobs."""
    tokenizer: str | None = None


@dataclass(slots=True)
class Namespace:
    """The run and the publications of one namespace, read from `runs` and `policies`."""

    name: str
    life: RunLife = field(default_factory=RunLife)
    ended_at: float | None = None
    """Epoch seconds; None while the run has not ended."""
    publications: list[Published] = field(default_factory=list)
    """In log order."""

    def ended(self, now_s: float) -> bool:
        """Whether none of its processes runs any more."""
        return self.ended_at is not None and self.ended_at + ENDED_S <= now_s

    def deadline_s(self) -> float:
        """Returns how many seconds an episode of the recipe can take."""
        tasks = self._recipe_table("tasks")
        deadline_s = tasks.get("deadline_s", DEADLINE_S)
        usable = isinstance(deadline_s, int) and 0 < deadline_s < MOST_S
        return float(deadline_s) if usable else DEADLINE_S

    def league(self) -> League | None:
        """Returns which past versions the recipe lets play; None if none of them may."""
        with suppress(ValidationError):
            return League.model_validate(self._recipe_table("tasks").get("league"))
        return None

    def signers(self) -> dict[str, tuple[str, ...]]:
        """Returns the keys that must sign each policy's versions."""
        return signers_of({"policies": self._recipe_table("policies")})

    def models(self) -> list[str]:
        """Returns the models of the recipe's policies."""
        policies = self._recipe_table("policies").values()
        return [str(policy.get("model", "")) for policy in policies if isinstance(policy, dict)]

    def _recipe_table(self, name: str) -> dict[str, Any]:
        """Returns a table of the recipe. Other teams' recipes may be anything: then it is empty."""
        table = self.life.tree.get(name)
        return table if isinstance(table, dict) else {}

    def add(self, event: Event, recorded_at: float) -> None:
        """Adds the next event of `runs` or `policies`, with its time in epoch seconds."""
        if isinstance(event, RunStateEntered):
            self.life.on_event(event, recorded_at)
            if event.state == "ended" and self.ended_at is None:
                self.ended_at = recorded_at
        elif isinstance(event, PolicyPublished):
            self.publications.append(
                Published(
                    event.policy,
                    event.version,
                    recorded_at,
                    frozenset(blob.sha256.hex() for blob in _blobs_of(event)),
                    event.tokenizer.sha256.hex() if event.tokenizer is not None else None,
                )
            )

    def blobs(self) -> set[str]:
        """Returns the blobs of all versions, without tokenizers."""
        return {name for one in self.publications for name in one.blobs}

    def tokenizers(self) -> set[str]:
        """Returns the tokenizers of all versions."""
        return {one.tokenizer for one in self.publications if one.tokenizer is not None}


@dataclass(frozen=True, slots=True)
class OwnerNeeds:
    """What is known of the blobs of one owner. Blobs are named by SHA-256 in hex."""

    published: Collection[str] = ()
    needed: Collection[str] = ()
    forgotten: bool = False
    """Its namespace is removed, so it needs nothing."""


@dataclass(frozen=True, slots=True)
class Prunable:
    """One thing that may be removed."""

    kind: Kind
    what: str
    size: int
    """Bytes. It is 0 for topics, whose size the client can't see."""
    why: str
    removal: Removal | None = None
    path: Path | None = None
    topics: tuple[str, ...] = ()

    def to_tree(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        return {name: getattr(self, name) for name in ("kind", "what", "size", "why")}


def _blobs_of(published: PolicyPublished) -> list[Blob]:
    beside = (published.logprobs, published.tensor_digests)
    return published.weight_blobs() + [blob for blob in beside if blob is not None]


def needed_versions(
    publications: Sequence[Published],
    keep: int,
    checkpoints: Collection[int],
    newest_since: float | None,
) -> set[int]:
    """Returns the versions of one policy whose weights are needed.

    `publications` are in log order. Versions that were the newest at `newest_since` or later (in
    epoch seconds) are needed too. It is None if the run has ended.
    """
    first_at: dict[int, float] = {}
    for one in publications:
        first_at.setdefault(one.version, one.at)
    versions = sorted(first_at)
    needed = set(versions[-keep:]) | (set(checkpoints) & set(versions))
    if newest_since is not None:
        for version, following in zip(versions, [*versions[1:], None], strict=True):
            if following is None or first_at[following] >= newest_since:
                needed.add(version)
    return needed


def needed_opponents(publications: Sequence[Published], league: League, since: float) -> set[int]:
    """Returns the versions of one policy that a task since `since`, in epoch seconds, may name."""
    opponents = Opponents(league, seed=0)
    before = 0
    for one in publications:
        opponents.on_published(one.version)
        if one.at < since:
            before = len(opponents.versions)
    return set(opponents.versions[max(0, before - league.past) :])


def needed_blobs(
    namespace: Namespace, keep: int, checkpoints: Mapping[str, Collection[int]], now_s: float
) -> set[str]:
    """Returns the SHA-256, in hex, of the blobs that a namespace's versions need.

    `checkpoints` maps each policy to the versions of its checkpoints.
    """
    since = None
    if not namespace.ended(now_s):
        since = now_s - namespace.deadline_s() - GRACE_S
    league = namespace.league()
    needed: set[str] = set()
    for policy in {one.policy for one in namespace.publications}:
        mine = [one for one in namespace.publications if one.policy == policy]
        versions = needed_versions(mine, keep, checkpoints.get(policy, ()), since)
        if since is not None and league is not None:
            versions |= needed_opponents(mine, league, since)
        needed |= {name for one in mine if one.version in versions for name in one.blobs}
    return needed | namespace.tokenizers()


def prunable_blobs(
    stored: Iterable[StoredBlob],
    markers: Iterable[Marker],
    claims: Mapping[str, OwnerNeeds],
    artifacts: Collection[str] | None,
    now_s: float,
) -> Iterator[Prunable]:
    """Yields the blobs that nobody needs, and the markers that their owners don't need.

    `claims` are of the owners that prune can see, and of those to forget. `artifacts` are needed,
    too. If they are not None, it also yields blobs that no event names.
    """
    blobs: dict[str, StoredBlob] = {}
    for blob in stored:
        if blob.name:
            blobs[blob.name] = blob
        elif artifacts is not None and blob.put_at < now_s - UNNAMED_S:
            removal = Removal("", frozenset(), blob, now_s - UNNAMED_S)
            yield Prunable("blob", blob.path.name, blob.size, "its writer died", removal)
    marked: dict[str, list[Marker]] = {}
    for marker in markers:
        marked.setdefault(marker.name, []).append(marker)
    needed = {*(artifacts or ())}.union(*(claim.needed for claim in claims.values()))
    for name in sorted(blobs.keys() | marked.keys()):
        found = _prunable_blob(
            blobs.get(name),
            marked.get(name, []),
            claims,
            needed=name in needed,
            unnamed=artifacts is not None,
            now_s=now_s,
        )
        if found is not None:
            yield found


def _prunable_blob(
    blob: StoredBlob | None,
    markers: Sequence[Marker],
    claims: Mapping[str, OwnerNeeds],
    *,
    needed: bool,
    unnamed: bool,
    now_s: float,
) -> Prunable | None:
    """Returns what may be removed of a blob and its markers. `blob` is None if it is absent."""
    befores: dict[Marker, float] = {}
    why = "no event on this broker names it"
    for marker in markers:
        claim = claims.get(marker.owner)
        if claim is not None and claim.forgotten:
            before, why = now_s, "--forget names its namespace"
        elif needed or (claim is None and marker.owner != UNKNOWN):
            before = -inf
        elif claim is not None and marker.name in claim.published:
            before, why = now_s - PUT_S, "belongs to a version that nothing needs any more"
        else:
            before = now_s - UNNAMED_S if unnamed or blob is None else -inf
        if marker.put_at < before:
            befores[marker] = before
    stale = frozenset(befores)
    if blob is None or needed:
        if not stale:
            return None
        why = "its blob is absent" if blob is None else why
        name = next(iter(stale)).name
        return Prunable("marker", name, 0, why, Removal(name, stale))
    before = min(befores.values(), default=now_s - UNNAMED_S if unnamed and not markers else -inf)
    if blob.put_at >= before:
        return None
    removal = Removal(blob.name, stale, blob, before)
    if len(stale) < len(markers):
        return Prunable("marker", blob.name, 0, f"{why}; another owner needs the blob", removal)
    return Prunable("blob", blob.name, blob.size, why, removal)
