"""Decides who is responsible for a command that did not begin in its sandbox. No I/O.

The policy's processes may kill or stop a command before it begins, and fill the sandbox so that
none can begin. They can't affect the keeper's processes, so what the keeper sees is the evidence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["policy", "infrastructure", "again"]
"""`again`: the command certainly never began, and nothing in the sandbox prevents the next try."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about a sandbox in which a command did not begin."""

    exists: bool = True
    running: bool = True
    out_of_memory: bool = False
    """It ended because its memory was used up."""
    full: bool = False
    """Its processes or its memory are used up."""
    responds: bool = False
    """The keeper could run a command in it."""
    survivors: int = 0
    """Live processes of the policy's user, without the command that did not begin."""
    ended: bool = False
    """The engine says that the command has ended, so it can't begin any more."""
    tries_left: int = 0


def responsible(evidence: Evidence) -> Verdict:
    """Returns who is responsible, or that the command should be tried again.

    What the policy's live processes may have caused is the policy's. Otherwise a policy could turn
    a reward of zero into a new attempt.
    """
    if not evidence.exists:  # the policy can't remove a container
        return "infrastructure"
    if not evidence.running:
        return "policy" if evidence.out_of_memory else "infrastructure"
    if evidence.full or evidence.survivors:
        return "policy"
    # What killed the command is gone: the kernel ends a killer and its victims in any order.
    if evidence.responds and evidence.ended and evidence.tries_left:
        return "again"
    return "infrastructure"
