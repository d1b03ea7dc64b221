"""Which variables of a worker a program gets."""

from __future__ import annotations

import os

import pytest

from headrace.errors import UsageError
from headrace.services.processes.allowed_environment import allowed_environment


def test_only_what_programs_need_and_what_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    harmless = {
        "PATH": "/bin", "HOME": "/root", "LC_ALL": "C", "PYTHONPATH": "/a", "OMP_NUM_THREADS": "1",
        "NO_PROXY": "a", "HTTPS_PROXY": "http://proxy:3128", "http_proxy": "proxy:3128",
    }  # fmt: skip
    secret = {
        "AWS_SECRET_ACCESS_KEY": "a", "HEADRACE_KAFKA_PROPERTIES": "sasl.password=a",
        "HEADRACE_GATEWAY_KEY": "a", "OPENAI_API_KEY": "a", "HTTP_PROXY": "http://me:word@proxy",
        "ALL_PROXY": "me:word@proxy:1", "PYTHONSTARTUP": "a",
    }  # fmt: skip
    monkeypatch.setattr(os, "environ", harmless | secret)
    assert allowed_environment() == harmless
    listed = ["OPENAI_API_KEY", "HTTP_PROXY", "NOT_SET"]
    given = {name: secret[name] for name in listed[:2]}
    assert allowed_environment(listed) == harmless | given


@pytest.mark.parametrize("inherit", ["HOME", [1], [""]])
def test_names_must_be_a_list_of_names(inherit: list[str]) -> None:
    with pytest.raises(UsageError, match="a list of names"):
        allowed_environment(inherit)
