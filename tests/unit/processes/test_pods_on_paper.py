"""What is decided of pods without a cluster: addresses, bodies, states, and network policies."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.services.env.sandbox import container_names as names
from headrace.services.env.sandbox.sandbox import SandboxSettings
from headrace.services.processes.docker.hardened import Limits, read_limits
from headrace.services.processes.kubernetes.cluster_address import ClusterAddress, read_address
from headrace.services.processes.kubernetes.command_stream import NEVER_BEGAN, exit_of
from headrace.services.processes.kubernetes.hardened_pod import (
    NETWORK,
    hardened_pod,
    label_value,
    limited,
    user_of,
)
from headrace.services.processes.kubernetes.network_checks import denies_all, deny_all
from headrace.services.processes.kubernetes.pod_states import (
    described,
    out_of_memory,
    state_of,
    why_not_started,
)

CONTEXTS = st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=40)
NAMESPACES = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)


@given(CONTEXTS, NAMESPACES)
def test_an_address_is_read_as_it_is_written(context: str, namespace: str) -> None:
    address = ClusterAddress(context, namespace)
    assert read_address(str(address)) == address


@pytest.mark.parametrize("url", ["kubernetes://context", "kubernetes://c/", "kubernetes://c/A_b"])
def test_a_wrong_address_is_explained(url: str) -> None:
    options = {"image": "i", "hosts": [{"url": url, "slots": 1}]}
    with pytest.raises(UsageError, match=r"o: hosts.*is not kubernetes://CONTEXT/NAMESPACE"):
        read_limits(SandboxSettings, options, "o")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"root_mb": 1}, "root_mb can't be had on Kubernetes"),
        ({"pull_submitted": True}, "pull_submitted can't be had on Kubernetes"),
    ],
)
def test_an_option_that_pods_lack_is_refused(options: dict[str, Any], complaint: str) -> None:
    hosts = [{"url": "kubernetes://a@b/c", "slots": 1}]
    with pytest.raises(UsageError, match=complaint):
        read_limits(SandboxSettings, {"image": "i", "hosts": hosts, **options}, "o")
    tls = [{"url": "kubernetes://a@b/c", "slots": 1, "tls": "/x"}]
    with pytest.raises(UsageError, match="the kubeconfig says how"):
        read_limits(SandboxSettings, {"image": "i", "hosts": tls}, "o")


@given(st.text(max_size=100))
def test_every_text_has_a_value_of_a_label(text: str) -> None:
    value = label_value(text)
    assert len(value) <= 63
    assert re.fullmatch(r"([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?", value)
    assert label_value(value) == value


@given(st.from_regex(r"[0-9a-f]{12}", fullmatch=True))
def test_a_pod_has_a_user_without_rights(token: str) -> None:
    assert 1_000_000_000 <= user_of(token) < 2**31
    body = hardened_pod(Limits(), "i", token, {"headrace.name": "n/ " * 99}, 60, "none")
    assert body["spec"]["securityContext"]["runAsUser"] == user_of(token)
    assert "headrace.name" not in body["metadata"]["labels"]


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_command_has_its_limits_and_its_folder(shell: str) -> None:
    command = limited(Limits(pids=77), ("sh", "-c", 'pwd; ulimit -n; echo "$1"', "sh", "a b"), "/")
    done = subprocess.run((shell, *command[1:]), capture_output=True, text=True, check=True)
    assert done.stdout == "/\n1024\na b\n"


POD: dict[str, Any] = {"metadata": {"name": "p", "uid": "u"}, "status": {"phase": "Pending"}}


def pod(state: dict[str, Any], **status: Any) -> dict[str, Any]:
    containers = [{"name": "sandbox", "state": state, "imageID": "docker.io/a/b@sha256:1"}]
    return {**POD, "status": {"phase": "Failed", "containerStatuses": containers, **status}}


def test_what_ended_a_sandbox_is_read_from_its_pod() -> None:
    killed = {"terminated": {"reason": "OOMKilled", "exitCode": 137}}
    assert out_of_memory(pod(killed))
    assert not out_of_memory(pod(killed, reason="Evicted"))
    assert not out_of_memory(pod({"terminated": {"reason": "Error", "exitCode": 137}}))
    assert [state_of(each) for each in (POD, pod({"running": {}}), pod(killed))] == [
        "created", "running", "exited",
    ]  # fmt: skip
    leaving = {"metadata": {**POD["metadata"], "deletionTimestamp": "now"}}
    assert state_of({**pod({"running": {}}), **leaving}) == "removing"
    assert not out_of_memory({**pod(killed), **leaving})
    assert described(pod({"running": {}}))["Labels"]["headrace.digest"] == "sha256:1"


def test_a_pod_that_never_starts_has_a_reason() -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    assert why_not_started(pod(waiting, phase="Pending")) == (
        "pull_failed", "ImagePullBackOff: not found",
    )  # fmt: skip
    again = {"waiting": {"reason": "ErrImagePull", "message": "once"}}
    assert why_not_started(pod(again, phase="Pending")) is None
    ended = why_not_started(pod({}, reason="Evicted", message="no memory"))
    assert ended == ("engine_error", "it ended before it ran: Evicted: no memory")


def test_the_last_message_of_a_command_has_its_exit_code() -> None:
    cause = {"causes": [{"reason": "ExitCode", "message": "7"}]}
    assert exit_of(b'{"status": "Success"}') == (0, b"")
    assert exit_of(json.dumps({"status": "Failure", "details": cause}).encode()) == (7, b"")
    assert exit_of(b'{"status": "Failure", "message": "why"}') == (NEVER_BEGAN, b"why")
    assert exit_of(b"garbage") == (NEVER_BEGAN, b"garbage")


@given(st.binary(max_size=60))
def test_no_last_message_harms_the_worker(status: bytes) -> None:
    code, _ = exit_of(status)
    assert isinstance(code, int)


LABELS = {NETWORK: "none"}
SPECS = st.fixed_dictionaries(
    {
        "podSelector": st.sampled_from(
            [
                {},
                {"matchLabels": LABELS},
                {"matchLabels": {NETWORK: "other"}},
                {"matchLabels": {**LABELS, "more": "x"}},
                {"matchExpressions": [{"key": NETWORK, "operator": "Exists"}]},
            ]
        )
    },
    optional={
        "policyTypes": st.sampled_from([["Ingress"], ["Egress"], ["Egress", "Ingress"]]),
        "egress": st.sampled_from([[], [{}]]),
        "ingress": st.sampled_from([[], [{}]]),
    },
)


@given(st.lists(SPECS, max_size=4))
def test_only_policies_that_deny_everything_are_no_network(specs: list[dict[str, Any]]) -> None:
    found = denies_all([{"spec": spec} for spec in specs], LABELS)
    matching = [s for s in specs if s["podSelector"].get("matchLabels") in (None, LABELS)]
    mine = [s for s in matching if "matchExpressions" not in s["podSelector"]]
    directions = {one for s in mine for one in s.get("policyTypes", ["Ingress"])}
    if found:
        assert directions == {"Ingress", "Egress"}
        assert not any(s.get("egress") or s.get("ingress") for s in matching)
    assert denies_all([json.loads(deny_all("n"))], LABELS)
    assert not denies_all([], LABELS)


def test_a_name_implies_the_labels_by_which_it_is_found() -> None:
    name = "headrace.ns.12-3-0.5-77.abcdef012345.4"
    assert names.read(name) == (
        "abcdef012345", {names.EPISODE: "12-3", names.PARTITION: "5"},
    )  # fmt: skip
    assert names.read("headrace.ns.ready.abcdef012345") == ("abcdef012345", {})
