"""The child's side of a `ChildProcess`, if that is a module of ours."""

from __future__ import annotations

import os
from typing import BinaryIO


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Returns the pipe from the parent and the pipe to it, which were stdin and stdout.

    From now on stdin is empty and prints go to stderr, so only what is written to the second pipe
    reaches the parent.
    """
    received, sent = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return received, sent
