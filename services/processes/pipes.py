"""The child's side of a `ChildProcess`, if that is a module of ours."""

from __future__ import annotations

import os
from typing import BinaryIO


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The pipes from and to the parent, in place of stdin and stdout.

    From here on stdin is empty, and what is printed goes to stderr: only what is written to the
    second pipe reaches the parent.
    """
    received, sent = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return received, sent
