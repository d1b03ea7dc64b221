"""What commands write into `audit`, before what they do, so that nothing is done unrecorded."""

from __future__ import annotations

import getpass
import platform
import time

from headrace.schemas.events import OperationRecorded

MOST_DETAILS = 1_000
"""At most so many characters of the details are recorded."""


def operation(name: str, subject: str, details: str = "") -> OperationRecorded:
    """Returns the record of an operation by this user of this machine, now."""
    return OperationRecorded(
        operation=name,
        subject=subject,
        at=int(time.time() * 1000),
        by=f"{_user()}@{platform.node()}",
        details=details.strip()[:MOST_DETAILS],
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # A container may have no name for its user.
        return "?"
