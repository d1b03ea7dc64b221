"""The table of who may do what, and the ACLs that are made from it, without a broker."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from click.testing import CliRunner

from headrace.errors import UsageError
from headrace.schemas.recipe.resources.service_names import SERVICES
from headrace.schemas.topics import TOPICS, Topic, Topics
from headrace.services.namespace.access_table import (
    ACCESS,
    GROUPS_OF_SERVICES,
    SERVICE_ACCESS,
    Access,
)
from headrace.services.namespace.apply import CONSUMERS, OPTIONAL_CONSUMERS
from headrace.services.operate.acls.acl_permissions import permissions, principals_of
from headrace.services.operate.acls.strimzi_users import kafka_users
from headrace.services.operate.cli import cli
from headrace.services.operate.dead_letters.dead_letters import REFUSED

TWO = Topics("exp", ("hider", "seeker"), 4, ["old"])
WRITERS = {
    "every service": set(SERVICES),
    "any consumer": {*SERVICES, "operator", "redrive", "guest"},
    "any team": {"operator", "guest"},
    "agent": {"agent", "gateway"},
}
"""What the words for writers in `schemas/topics.py` mean, unless they name one role."""
MORE_WRITERS = {"tasks": {"source", "evaluation"}, "observations": {"external-env"}}
"""Who else writes a topic: Headrace's own sources of tasks, and env workers of other teams."""


def writers_of(topic: str) -> set[str]:
    return {role for role, one in ACCESS.items() if topic in {at.name for at in one.writes}}


def test_every_service_has_an_entry_and_follows_the_run() -> None:
    assert set(SERVICE_ACCESS) == set(SERVICES)
    assert all("runs" in {topic.name for topic in one.reads} for one in ACCESS.values())


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_the_writers_are_those_that_the_topic_names(topic: Topic[Any]) -> None:
    expected = set(MORE_WRITERS.get(topic.name, ()))
    for name in topic.writer.removesuffix(", fenced").split(", "):
        expected |= WRITERS.get(name, {name})
    assert writers_of(topic.name) - {"redrive"} == expected - {"redrive"}


def test_redrive_may_write_exactly_what_takes_a_dead_letter_back() -> None:
    takes = {topic.name for topic in TOPICS} - set(REFUSED) | {"dead-letters", "audit"}
    assert {topic.name for topic in ACCESS["redrive"].writes} == takes


def test_each_consumer_group_has_its_members() -> None:
    assert set(GROUPS_OF_SERVICES) == {*CONSUMERS, *OPTIONAL_CONSUMERS}
    for group, topic in (CONSUMERS | OPTIONAL_CONSUMERS).items():
        members = {name for name, one in SERVICE_ACCESS.items() if group in one.joins}
        assert members == WRITERS.get(group, {group}) & set(SERVICES)
        assert all(topic in SERVICE_ACCESS[name].reads for name in members)


@pytest.mark.parametrize("role", ACCESS)
def test_each_permission_names_one_resource_of_the_namespace(role: str) -> None:
    found = permissions(TWO, role, f"User:{role}")
    topics = {topic.name for topic in TWO}
    assert len(found) == len(set(found))
    for one in found:
        assert "*" not in "".join(one)
        assert one.operation not in ("ALL", "ANY", "ALTER")
        if one.resource == "TOPIC":
            assert one.name in topics | {"old.trajectories.v1"}
        else:
            assert one.name.startswith("exp.")
    # Everybody sees the whole namespace, and of another one only trajectories.
    assert {one.name for one in found if one.resource == "TOPIC"} >= topics
    other = [one.operation for one in found if one.name.startswith("old.")]
    assert other == ["READ"] * ("trajectories" in {topic.name for topic in ACCESS[role].reads})


def test_transactional_ids_are_those_of_each_policy() -> None:
    def ids(role: str) -> list[str]:
        found = permissions(TWO, role, "User:x")
        return [one.name for one in found if one.resource == "TRANSACTIONAL_ID"]

    assert ids("trainer") == ["exp.trainer.hider", "exp.trainer.seeker"]
    assert ids("scheduler") == ["exp.scheduler"]
    assert ids("agent") == []


def test_the_page_about_access_has_the_table() -> None:
    page = (Path(__file__).parents[4] / "docs" / "access.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert rows == [row(role, one) for role, one in ACCESS.items()]


def row(role: str, access: Access) -> str:
    """The row of a role in `docs/access.md`."""
    reads = "every topic" if access.reads == TOPICS else listed(one.name for one in access.reads)
    writes = listed(topic.name for topic in access.writes)
    groups = listed((*access.joins, *access.sees))
    return f"| `{role}` | {reads} | {writes} | {groups} | {listed(access.transactions)} |"


def listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def test_a_principal_is_for_all_roles_only_if_it_names_the_role() -> None:
    assert principals_of("User:x-{role}", ())["env"] == "User:x-env"
    assert principals_of("User:team", ("guest",)) == {"guest": "User:team"}
    with pytest.raises(UsageError, match="every role"):
        principals_of("User:team", ())
    for wrong in ("User:*", "team", "User:", "User:a b"):
        with pytest.raises(UsageError, match="can't be a principal"):
            principals_of(wrong, ("guest",))


def test_kafka_users_have_every_permission() -> None:
    found = permissions(TWO, "scheduler", "User:headrace-scheduler")
    (user,) = yaml.safe_load_all(kafka_users({"User:headrace-scheduler": found}, {}, "my-kafka"))
    assert user["metadata"] == {
        "name": "headrace-scheduler",
        "labels": {"strimzi.io/cluster": "my-kafka"},
    }
    kinds = {"topic": "TOPIC", "group": "GROUP", "transactionalId": "TRANSACTIONAL_ID"}
    read = {
        (kinds[acl["resource"]["type"]], acl["resource"]["name"], operation.upper())
        for acl in user["spec"]["authorization"]["acls"]
        for operation in acl["operations"]
    }
    assert read == {one[1:] for one in found}
    with pytest.raises(UsageError, match="Kubernetes resource"):
        kafka_users({"User:Team_B": found}, {}, "my-kafka")


def test_the_command_prints_json_a_table_and_one_principal_once() -> None:
    both = ("acls", "quickstart", "--role", "guest", "--role", "external-env")
    ran = CliRunner().invoke(cli, [*both, "--principal", "User:b", "--json"])
    rows = json.loads(ran.stdout)
    found = [tuple(one.values()) for one in rows if "operation" in one]
    assert len(found) == len(set(found))
    assert ("User:b", "TOPIC", "quickstart.observations.v1", "WRITE") in found
    quotas = {one["quota"]: one["value"] for one in rows if "quota" in one}
    assert quotas == ACCESS["external-env"].quotas
    assert ("User:b", "TOPIC", "quickstart.tasks.v1", "WRITE") in found
    table = CliRunner().invoke(cli, ["acls", "quickstart", "--namespace", "x"]).stdout
    assert "User:headrace-agent" in table
    assert "x.actions.v1" in table
    wrong = CliRunner().invoke(cli, ["acls", "quickstart", "--role", "boss"])
    assert wrong.exit_code == 2
    assert "choose from source" in wrong.output
    two = CliRunner().invoke(cli, ["acls", "quickstart", "--json", "--apply"])
    assert two.exit_code == 2
    assert "exclude each other" in two.output
