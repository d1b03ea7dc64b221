"""Who may talk to the dashboard."""

from __future__ import annotations

import pytest

from headrace.services.operate.dashboard.http_guard import CSP, HttpGuard

GUARD = HttpGuard(8080, token="secret", action_token="act")


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost:8080", "LOCALHOST:8080"])
def test_its_own_names_are_answered(host: str) -> None:
    assert GUARD.refuse_origin(host, None) is None
    assert GUARD.refuse_origin(host, f"http://{host}") is None


@pytest.mark.parametrize("host", ["", "evil.example", "evil.example:8080", "127.0.0.1:8081"])
def test_other_names_are_refused(host: str) -> None:
    refused = GUARD.refuse_origin(host, None)
    assert refused is not None
    assert refused.status == 421


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:8081", "http://localhost:8080"]
)
def test_a_page_of_another_origin_is_refused(origin: str) -> None:
    refused = GUARD.refuse_origin("127.0.0.1:8080", origin)
    assert refused is not None
    assert refused.status == 403


def test_a_reader_needs_the_token() -> None:
    assert GUARD.refuse_reader("Bearer secret") is None
    for authorization in ("", "secret", "Bearer act", "Bearer é", "Basic secret"):
        refused = GUARD.refuse_reader(authorization)
        assert refused is not None
        assert refused.status == 401


def test_an_action_needs_a_token_of_its_own() -> None:
    assert GUARD.refuse_action("act") is None
    for header in (None, "", "secret"):
        assert GUARD.refuse_action(header) is not None


def test_the_policy_allows_no_inline_code() -> None:
    assert "unsafe" not in CSP
    assert "default-src 'none'" in CSP


def test_tokens_are_new_each_time() -> None:
    assert HttpGuard(1).token != HttpGuard(1).token
