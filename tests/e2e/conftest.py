"""What the tests of whole runs share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import harness


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """A state folder, of which nothing runs in the end."""
    yield tmp_path
    harness.end_all_of(tmp_path)
