"""Built-in environments and tools are named by import paths: each one is there."""

from __future__ import annotations

import pytest

from headrace.services.base.plugins import load
from headrace.services.env.sandbox.pool import TOOLS
from headrace.services.env.service import BUILTIN


@pytest.mark.parametrize("name", BUILTIN)
def test_a_built_in_environment_is_there(name: str) -> None:
    assert isinstance(load("environment", name, BUILTIN), type)


@pytest.mark.parametrize("name", TOOLS)
def test_a_built_in_tool_is_there(name: str) -> None:
    assert isinstance(load("tool", name, TOOLS), type)
