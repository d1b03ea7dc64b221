"""The digest of what an environment's answer shows to an agent."""

from __future__ import annotations

import hashlib
import json

from headrace.schemas.events import ObservationRecorded

SHOWN = {"text", "data", "reward", "terminated", "truncated", "failure"}


def shown(answer: ObservationRecorded) -> bytes:
    """Returns a digest that is equal for two answers in which an agent sees no difference.

    16 bytes.
    """
    text = answer.model_dump_json(include=SHOWN, exclude_defaults=True)
    rewards = json.dumps(sorted(answer.rewards.items())) if answer.rewards else ""
    return hashlib.blake2b(f"{text}{rewards}".encode(), digest_size=16).digest()
