"""Which quotas principals get, without a broker."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from click.testing import CliRunner

from headrace.errors import UsageError
from headrace.services.namespace.access_table import ACCESS, QUOTA_KEYS, SERVICE_ACCESS
from headrace.services.operate.acls.principal_quotas import (
    default_quotas,
    parse_quotas,
    quota_changes,
    wanted_quotas,
)
from headrace.services.operate.cli import cli

GUEST, OTHER = ACCESS["guest"].quotas, ACCESS["external-env"].quotas


def test_other_teams_have_quotas_and_the_run_has_none() -> None:
    assert not any(one.quotas for one in SERVICE_ACCESS.values())
    limited = {role for role, one in ACCESS.items() if one.quotas}
    assert limited == {"guest", "external-env"}
    assert all(set(ACCESS[role].quotas) == set(QUOTA_KEYS) for role in limited)


def test_of_several_roles_the_highest_quota_counts() -> None:
    of_both = default_quotas({"guest": "User:b", "external-env": "User:b", "env": "User:e"})
    assert of_both == {"User:b": {key: max(GUEST[key], OTHER[key]) for key in QUOTA_KEYS}}
    assert default_quotas({"guest": "User:b", "reader": "User:b"}) == {}


def test_what_is_given_replaces_the_defaults() -> None:
    given = parse_quotas(["producer_byte_rate=5", "request_percentage=none"])
    assert wanted_quotas({"guest": "User:b", "env": "User:e"}, given) == {
        "User:b": {"producer_byte_rate": 5, "consumer_byte_rate": GUEST["consumer_byte_rate"]},
        "User:e": {"producer_byte_rate": 5},
    }


@pytest.mark.parametrize("text", ["a=1", "producer_byte_rate", "producer_byte_rate=0.5"])
def test_a_quota_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"is no quota|whole number"):
        parse_quotas([text])


def test_a_default_never_changes_a_quota_that_is_there() -> None:
    wanted = {"User:CN=b,O=x": {"producer_byte_rate": 5, "consumer_byte_rate": 6}}

    def changes(given: dict[str, int | None], **current: float) -> dict[str, object]:
        return {**quota_changes(wanted, given, wanted, {"CN=b,O=x": current})}

    assert changes({}) == {"CN=b,O=x": {"producer_byte_rate": 5, "consumer_byte_rate": 6}}
    assert changes({}, producer_byte_rate=9.0) == {}  # Somebody has removed the other one.
    there = {"producer_byte_rate": 9.0, "consumer_byte_rate": 6.0, "request_percentage": 1.0}
    assert changes({}, **there) == {}
    assert changes({"producer_byte_rate": 5, "request_percentage": None}, **there) == {
        "CN=b,O=x": {"producer_byte_rate": 5, "request_percentage": None}
    }


@pytest.mark.parametrize(
    ("shared", "added"),
    [
        ({}, {"producer_byte_rate": 5, "consumer_byte_rate": 6}),
        ({"producer_byte_rate": 4.0}, {"consumer_byte_rate": 6}),
        ({"producer_byte_rate": 5.0, "consumer_byte_rate": 7.0}, {"consumer_byte_rate": 6}),
    ],
)
def test_a_default_never_allows_more_than_the_clusters_own(
    shared: dict[str, float], added: dict[str, float]
) -> None:
    wanted = {"User:b": {"producer_byte_rate": 5, "consumer_byte_rate": 6}}
    assert quota_changes(wanted, {}, wanted, {"": shared}) == {"b": added}
    given = {"producer_byte_rate": 5}
    assert quota_changes({"User:b": given}, given, wanted, {"": shared}) == {"b": given}


def test_kafka_users_have_quotas() -> None:
    words = ("acls", "quickstart", "--role", "guest", "--role", "env", "--strimzi", "k")
    users = yaml.safe_load_all(CliRunner().invoke(cli, words).stdout)
    found = {user["metadata"]["name"]: user["spec"].get("quotas") for user in users}
    names = ("producerByteRate", "consumerByteRate", "requestPercentage")
    guest = dict(zip(names, (GUEST[key] for key in QUOTA_KEYS), strict=True))
    assert found == {"headrace-guest": guest, "headrace-env": None}


def test_the_page_about_access_has_the_quotas() -> None:
    page = (Path(__file__).parents[4] / "docs" / "access.md").read_text()
    for role in ("guest", "external-env"):
        values = " | ".join(f"{ACCESS[role].quotas[key]:,}" for key in QUOTA_KEYS)
        assert f"| {role} | {values} |" in page


def test_options_that_say_nothing_are_refused() -> None:
    for words, message in (
        (("--quota", "producer_byte_rate=1"), "would limit every service"),
        (("--prune",), "together with --apply"),
    ):
        done = CliRunner().invoke(cli, ["acls", "quickstart", *words])
        assert (done.exit_code, message in done.output) == (2, True), done.output
