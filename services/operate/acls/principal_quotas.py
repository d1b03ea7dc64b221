"""Decides which quotas principals get on the brokers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from headrace.errors import UsageError
from headrace.services.namespace.access_table import ACCESS, QUOTA_KEYS

EVERY_OTHER_USER = ""
"""Stands for the users without quotas of their own, for which a cluster may have a default."""
Quotas = Mapping[str, int]
"""Quotas of a principal in Kafka's words, such as `producer_byte_rate`, to their values."""


def parse_quotas(texts: Iterable[str]) -> dict[str, int | None]:
    """Reads quotas, each as `KEY=NUMBER` or `KEY=none`. Raises UsageError for any other text."""
    found: dict[str, int | None] = {}
    for text in texts:
        key, _, value = text.partition("=")
        if key not in QUOTA_KEYS:
            raise UsageError(f"{key!r} is no quota: choose from {', '.join(QUOTA_KEYS)}")
        if value != "none" and not (value.isascii() and value.isdigit() and int(value)):
            raise UsageError(
                f"the quota {key} can't be {value!r}: write a whole number of at least 1, or none"
            )
        found[key] = None if value == "none" else int(value)
    return found


def default_quotas(principals: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Returns the quotas of each principal that the table limits. `principals` is by role.

    If a principal has several roles, the highest value counts, and without a limit is higher than
    any value.
    """
    found: dict[str, dict[str, int]] = {}
    for principal in dict.fromkeys(principals.values()):
        roles = [ACCESS[role].quotas for role, name in principals.items() if name == principal]
        shared = [key for key in QUOTA_KEYS if all(key in one for one in roles)]
        if shared:
            found[principal] = {key: max(one[key] for one in roles) for key in shared}
    return found


def wanted_quotas(
    principals: Mapping[str, str], given: Mapping[str, int | None]
) -> dict[str, dict[str, int]]:
    """Returns the quotas of each principal: those of the table, changed by what is `given`."""
    defaults = default_quotas(principals)
    every = {
        principal: {
            key: value
            for key, value in (defaults.get(principal, {}) | dict(given)).items()
            if value is not None
        }
        for principal in dict.fromkeys(principals.values())
    }
    return {principal: quotas for principal, quotas in every.items() if quotas}


def quota_changes(
    wanted: Mapping[str, Quotas],
    given: Mapping[str, int | None],
    principals: Iterable[str],
    current: Mapping[str, Mapping[str, float]],
) -> dict[str, dict[str, float | None]]:
    """Returns what to change on brokers that have the quotas `current`, by user.

    A default of the table counts only for a principal that has no quota, and only if it is lower
    than what the brokers' default for all users allows. What is `given` changes any quota.
    """
    shared = current.get(EVERY_OTHER_USER, {})
    changes: dict[str, dict[str, float | None]] = {}
    for principal in dict.fromkeys(principals):
        user = principal.partition(":")[2]
        there = current.get(user, {})
        change: dict[str, float | None] = {
            key: value
            for key, value in wanted.get(principal, {}).items()
            if key in given or (not there and value < shared.get(key, math.inf))
            if there.get(key) != value
        }
        change |= {key: None for key, value in given.items() if value is None and key in there}
        if change:
            changes[user] = change
    return changes
