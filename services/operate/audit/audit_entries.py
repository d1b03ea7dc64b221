"""Makes the entries of the audit trail from the log. Pure, apart from checking signatures.

Who submits, cancels, starts and ends is in `tasks`, `cancellations` and `runs` already. `audit` has
what no other record says for ever. A list has at most some entries of each kind of operation, so
reading a long log takes little memory.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.schemas.events import (
    Event,
    OperationRecorded,
    RunStateEntered,
    TaskCancelled,
    TaskSubmitted,
)
from headrace.schemas.untrusted.trusted_keys import TrustedKeys
from headrace.services.log.event_log import Delivery

STATES = {"started": "apply", "ending": "end", "ended": "ended"}
OPERATIONS = ("apply", "end", "ended", "submit", "cancel", "quota", "redrive", "prune")


@dataclass(slots=True)
class AuditEntry:
    """One operation, or several submissions in a row by the same submitter."""

    at: float
    """Epoch seconds of the newest record."""
    operation: str
    subject: str
    claimed: str
    """Who did it, as the record says. Anybody who may write the topic can claim it."""
    key: str
    """The public key that has signed it; empty if none is proved."""
    holder: str
    """Who has the key by the recipe: tenants, or `operator`; empty if the recipe does not say."""
    refused: str
    """Why it does not count; empty if it counts as far as keys decide it."""
    details: str = ""
    first: int = -1
    """Of submissions: the number of the first task. -1 for anything else."""
    count: int = 1

    @property
    def who(self) -> str:
        """Says for people who did it, and whether that is proved."""
        if self.key:
            return f"{self.holder or 'unknown key'} (proved, …{self.key[-9:]})"
        return f"{self.claimed or '?'} (claimed)"

    @property
    def what(self) -> str:
        """Names the object for people."""
        if self.count > 1:
            return f"{self.count:,} tasks from {self.first} of {self.subject}"
        return f"task {self.first} of {self.subject}" if self.first >= 0 else self.subject

    def to_tree(self) -> dict[str, Any]:
        """Returns it as JSON values."""
        names = ("operation", "subject", "claimed", "key", "holder", "refused", "details", "count")
        tree: dict[str, Any] = {"at": self.at, **{name: getattr(self, name) for name in names}}
        return tree | ({"first_task": self.first} if self.first >= 0 else {})


class AuditList:
    """The newest entries of the trail of one namespace."""

    def __init__(self, trusted: TrustedKeys, last: int, only: Collection[str] = ()) -> None:
        """At most `last` entries of each operation are kept, and only these, or all if empty."""
        self._trusted = trusted
        self._only = frozenset(only)
        self._kept: dict[str, deque[AuditEntry]] = defaultdict(lambda: deque(maxlen=last))
        self._last = last

    def add(self, delivery: Delivery[Event], claimed: str) -> None:
        """Adds a record. `claimed` is the source that its header names. Others are left out."""
        event, at = delivery.event, delivery.recorded_at
        if isinstance(event, RunStateEntered):
            self._append(
                AuditEntry(
                    at, STATES[event.state], event.namespace, claimed, "", "", "", event.reason
                )
            )
            return
        if not isinstance(event, TaskSubmitted | TaskCancelled | OperationRecorded):
            return
        signature = delivery.signature
        key = "" if signature is None else delivery.signed_by([signature.key])
        holder = self._trusted.holder(key)
        if isinstance(event, TaskSubmitted):
            why = self._trusted.refusal(event.tenant, key)
            subject = f"{event.source}, tenant {event.tenant}"
            entry = AuditEntry(
                at, "submit", subject, claimed, key, holder, why, "", delivery.offset
            )
            self._add_submission(entry)
        elif isinstance(event, TaskCancelled):
            why = "" if self._trusted.scopes(key, event.tenant) else "no key may cancel it"
            subject = f"{event.source}/{event.task_id}"
            self._append(AuditEntry(at, "cancel", subject, claimed, key, holder, why, event.reason))
        else:
            forged = event.operation == "quota" and key not in self._trusted.operators
            why = "no operator's key has signed it" if forged and self._trusted.operators else ""
            by, about = event.by, event.details
            self._append(
                AuditEntry(
                    event.at / 1000, event.operation, event.subject, by, key, holder, why, about
                )
            )

    def _add_submission(self, entry: AuditEntry) -> None:
        """Adds a submission to the one before it, if it differs in nothing but the task."""
        before = self._kept["submit"][-1] if self._kept["submit"] else None
        same = ("subject", "claimed", "key", "refused")
        if before and all(getattr(before, name) == getattr(entry, name) for name in same):
            before.count, before.at = before.count + 1, entry.at
        else:
            self._append(entry)

    def _append(self, entry: AuditEntry) -> None:
        if self._only and entry.operation not in self._only:
            return
        known = entry.operation if entry.operation in OPERATIONS else "other"
        self._kept[known].append(entry)

    def entries(self) -> Iterator[AuditEntry]:
        """Yields the newest entries, the oldest of them first."""
        every = sorted(
            (one for kept in self._kept.values() for one in kept), key=lambda one: one.at
        )
        yield from every[-self._last :]
