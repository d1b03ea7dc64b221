"""A secure local stack: a run learns on it, and a guest may do what the table allows."""

from __future__ import annotations

import json
import os
import ssl
import urllib.error
import urllib.request
from base64 import b64encode
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient

from headrace.infra import local
from headrace.infra.local.security.certificates import CertificateAuthority
from headrace.services.namespace.access_table import ACCESS
from headrace.services.namespace.cluster_config import ClusterConfig, read_recipe
from headrace.services.namespace.connect import locate
from headrace.services.namespace.lookup import topics_of
from tests.commands import run_command
from tests.integration.test_roles import failures_of_fetch, failures_of_produce

pytestmark = pytest.mark.long

RUN_S = 420.0
ASK_S = 6.0
SETTINGS = ("--set", "stop.versions=2", "--set", "stop.reward=2.0")


def test_a_run_learns_on_a_secure_stack_and_a_guest_may_do_no_more(tmp_path: Path) -> None:
    state, variables = tmp_path / "state", {"HEADRACE_STATE": str(tmp_path / "state")}

    def run(*words: str, role: str | None = None, stdin: str = "") -> tuple[int, str, str]:
        own = {"HEADRACE_CREDENTIALS": f"{state}/stack-credentials/{role}.properties"}
        done = run_command(words, variables | (own if role else {}), stdin=stdin, timeout_s=RUN_S)
        return done.returncode, done.stdout, done.stderr

    local.up(state, kafka_port=0, registry_port=0, owner_pid=os.getpid(), roles=tuple(ACCESS))
    try:
        code, out, errors = run("run", "quickstart", "--secure", "--json", "--quiet", *SETTINGS)
        assert code == 0, errors
        assert json.loads(out)["versions"]["default"] >= 2
        code, out, errors = run("up", "--json")
        assert json.loads(out)["credentials"] == str(state / "stack-credentials")
        assert run("status")[0] == 0
        recipe = read_recipe("quickstart", SETTINGS[1::2])
        assert run("apply", "quickstart", "--namespace", "open", "--no-check")[0] == 0
        line = {"payload": {"question": "a", "answer": "a"}, "task_id": "t"}
        target = ("--namespace", "open")
        assert run("submit", "-", *target, role="guest", stdin=json.dumps(line))[0] == 0
        code, _, errors = run("end", *target, role="guest")
        assert code == 75
        assert "TOPIC_AUTHORIZATION_FAILED" in errors or "has no namespace" in errors
        located = locate(ClusterConfig(state=state))
        check_guest(located, recipe.name)
        check_strangers(located, tmp_path)
        check_controller(state, located)
        check_registry(located)
    finally:
        code, _, errors = run("down")
        local.down(state)
    assert code == 0, errors
    assert not (state / "stack-credentials").exists()
    assert list(state.rglob("*.pem")) == []


def client_of(cluster: ClusterConfig) -> dict[str, str | int]:
    """Returns the settings of a client for this role."""
    servers = str(cluster.bootstrap_servers)
    return {"bootstrap.servers": servers, **cluster.broker_properties(), "log_level": 0}


def check_guest(cluster: ClusterConfig, namespace: str) -> None:
    """The broker lets a guest write and read what the table says, and refuses the rest."""
    topics = topics_of(read_recipe(namespace, ()), namespace)
    client, access = client_of(replace(cluster, role="guest")), ACCESS["guest"]
    wrote, read = failures_of_produce(client, topics), failures_of_fetch(client, topics)
    for topic in topics:
        may = (topic.topic in access.writes, topic.topic in access.reads)
        expected = [None if one else KafkaError.TOPIC_AUTHORIZATION_FAILED for one in may]
        assert [wrote[topic.name], read[topic.name]] == expected, topic.name


def failure_of_listing(client: dict[str, str | int]) -> int | None:
    """Returns why the topics can't be listed; None: they can."""
    try:
        AdminClient({**client}).list_topics(timeout=ASK_S)
    except KafkaException as exception:
        error = exception.args[0]
        assert isinstance(error, KafkaError)
        return error.code()
    return None


def check_strangers(cluster: ClusterConfig, folder: Path) -> None:
    """Without a certificate of the stack's authority, nobody is let in."""
    own = client_of(cluster)
    assert failure_of_listing(own) is None
    key = folder / "other.pem"
    key.write_bytes(CertificateAuthority("headrace-local", 1e9).issue("headrace-administrator"))
    other = {"ssl.certificate.location": str(key), "ssl.key.location": str(key)}
    without = {name: value for name, value in own.items() if name not in other}
    plain = {name: value for name, value in without.items() if not name.startswith("ssl")}
    for client in (own | other, without, plain | {"security.protocol": "plaintext"}):
        assert failure_of_listing(client) is not None


def check_controller(state: Path, cluster: ClusterConfig) -> None:
    """The controller's listener accepts its own certificate alone, not the administrator's."""
    text = (state / "kafka.properties").read_text()
    port = [line for line in text.splitlines() if line.startswith("listeners=")][-1].rpartition(":")
    administrator = client_of(replace(cluster, role="administrator"))
    assert failure_of_listing(administrator) is None
    trusted = str(state / "stack-credentials/servers/controller-ca.pem")
    administrator |= {"bootstrap.servers": f"127.0.0.1:{port[2]}", "ssl.ca.location": trusted}
    assert failure_of_listing(administrator) is not None


def check_registry(cluster: ClusterConfig) -> None:
    """The registry has TLS and passwords, and only services change its settings."""
    url = str(cluster.registry_url)
    authority = cluster.registry_properties()["ssl.ca.location"]
    context = ssl.create_default_context(cafile=authority)

    def status(method: str, path: str, role: str | None) -> int:
        request = urllib.request.Request(url + path, method=method, data=b"{}")
        request.add_header("Content-Type", "application/json")
        if role is not None:
            user = replace(cluster, role=role).registry_properties()["basic.auth.user.info"]
            request.add_header("Authorization", f"Basic {b64encode(user.encode()).decode()}")
        try:
            with urllib.request.urlopen(request, context=context, timeout=ASK_S) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    subject = "/subjects/quickstart.tasks.v1-value"
    assert status("GET", "/subjects", None) == 401
    assert status("GET", "/subjects", "guest") == 200
    for method, path in (("DELETE", subject), ("PUT", "/config/x"), ("PUT", "/config/x;a=b")):
        assert status(method, path, None) == 401
        assert status(method, path, "guest") == 403
    assert status("DELETE", "/subjects/none", "agent") == 404
    with pytest.raises(OSError, match=r"closed|reset|refused"):
        urllib.request.urlopen(url.replace("https", "http") + "/subjects", timeout=ASK_S)


def test_a_stack_that_runs_without_certificates_is_not_made_secure(tmp_path: Path) -> None:
    local.up(tmp_path, kafka_port=0, registry_port=0)
    try:
        done = run_command(("up", "--secure", "--state", str(tmp_path)), {}, timeout_s=60.0)
        assert done.returncode == 2
        assert "runs without certificates: stop it first with `headrace down`" in done.stderr
    finally:
        local.down(tmp_path, wipe=True)
