"""Who is responsible for a command that did not begin."""

from __future__ import annotations

import pytest

from headrace.services.env.sandbox.responsibility import Evidence, Verdict, responsible

GONE = Evidence(exists=False, running=False)
DEAD = Evidence(running=False)
SILENT = Evidence()
"""It runs, and neither the policy's user nor the keeper can start a command."""
WELL = Evidence(responds=True, ended=True, tries_left=2)
"""The command has ended without beginning, and the keeper finds nothing that could be the cause."""


@pytest.mark.parametrize(
    ("evidence", "verdict"),
    [
        (GONE, "infrastructure"),
        (DEAD, "infrastructure"),
        (Evidence(running=False, out_of_memory=True), "policy"),
        (SILENT, "infrastructure"),
        (Evidence(tries_left=2), "infrastructure"),
        (Evidence(ended=True, tries_left=2), "infrastructure"),
        (Evidence(full=True), "policy"),
        (Evidence(full=True, tries_left=2), "policy"),
        (WELL, "again"),
        (Evidence(responds=True, ended=True), "infrastructure"),
        (Evidence(responds=True, tries_left=2), "infrastructure"),
        (Evidence(responds=True, survivors=1), "policy"),
        (Evidence(responds=True, survivors=1, ended=True, tries_left=2), "policy"),
    ],
)
def test_who_is_responsible(evidence: Evidence, verdict: Verdict) -> None:
    assert responsible(evidence) == verdict


def test_live_processes_of_the_policy_never_give_a_new_attempt() -> None:
    for ended in (False, True):
        for tries_left in range(3):
            evidence = Evidence(responds=True, survivors=1, ended=ended, tries_left=tries_left)
            assert responsible(evidence) == "policy"
