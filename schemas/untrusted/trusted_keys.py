"""The public keys that a namespace trusts: which key may act for which tenant. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class TrustedKeys:
    """Whose signatures count for the tasks and cancellations of each tenant, and for limits."""

    tenants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Tenant to the public keys of those who may act for it. A tenant without keys is absent."""
    operators: tuple[str, ...] = ()
    """Public keys that may act for every tenant. If there are some, only they change limits."""
    required: bool = False
    """Whether nobody but the operators may act for a tenant without keys."""

    @classmethod
    def of_tree(cls, recipe: Mapping[str, Any]) -> TrustedKeys:
        """Returns the keys of a recorded recipe's tree, which may be of another team."""
        scheduler = _table(recipe, "scheduler")
        tenants = {
            str(name): keys
            for name in _table(scheduler, "tenants")
            if (keys := texts_in(_table(_table(scheduler, "tenants"), name).get("keys")))
        }
        required = scheduler.get("require_keys") is True
        return cls(tenants, texts_in(scheduler.get("operators")), required)

    @cached_property
    def keys(self) -> frozenset[str]:
        """All keys."""
        return frozenset(self.operators).union(*self.tenants.values())

    def is_open(self, tenant: str) -> bool:
        """Whether everybody may act for a tenant who may write the topic."""
        return not self.required and tenant not in self.tenants

    def refusal(self, tenant: str, key: str) -> str:
        """Returns why `key` can't act for a tenant; an empty text if it can.

        `key` is empty if no trusted key is proved.
        """
        named = self.tenants.get(tenant, ())
        if self.is_open(tenant) or key in self.operators or key in named:
            return ""
        who = "by one of its keys or an operator's" if named else "by an operator's key"
        where = f"scheduler.tenants.{tenant}.keys" if named else "scheduler.require_keys"
        return (
            f"tenant {tenant[:80]!r} needs a signature {who} ({where}). Set HEADRACE_REQUEST_KEY "
            "to the file of such a key, and send it again"
        )

    def scope(self, tenant: str) -> str:
        """Returns the scope of a tenant's task ids. Tenants without keys share one.

        So a task that claims another tenant can't take an id from a tenant with keys.
        """
        return tenant if tenant in self.tenants else ""

    def scopes(self, key: str, tenant: str | None = None) -> list[str]:
        """Returns the scopes whose tasks `key` may cancel. `key` is empty if no key is proved.

        With `tenant`, only the scope of that tenant's tasks can be one of them.
        """
        every = key in self.operators
        shared = [""] if every or not self.required else []
        found = shared + [name for name, keys in self.tenants.items() if every or key in keys]
        return found if tenant is None else [one for one in found if one == self.scope(tenant)]

    def covered(self, key: str) -> str:
        """Names for whom a cancellation by `key` counts; an empty text if for all tenants."""
        scopes = self.scopes(key)
        if {"", *self.tenants} <= set(scopes):
            return ""
        return ", ".join(f"tenant {one}" if one else "tenants without keys" for one in scopes)

    def holder(self, key: str) -> str:
        """Names who has a key, for people: `operator`, or the tenants; empty if nobody known."""
        if key in self.operators:
            return "operator"
        return ", ".join(name for name, keys in self.tenants.items() if key in keys)


def _table(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = tree.get(name)
    return found if isinstance(found, Mapping) else {}


def texts_in(found: object) -> tuple[str, ...]:
    """Returns the texts of a list in a recorded recipe; none if it is no list."""
    listed = isinstance(found, Sequence) and not isinstance(found, str)
    return tuple(map(str, found)) if listed and isinstance(found, Sequence) else ()
