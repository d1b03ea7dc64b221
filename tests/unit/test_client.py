"""The client finds the cluster as the commands do."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import AsyncClient, UsageError
from headrace.services.namespace.cluster_config import ClusterConfig

ADDRESSES = {"HEADRACE_BOOTSTRAP_SERVERS": "b:9092", "HEADRACE_REGISTRY_URL": "http://r:8081"}


def set_all(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_without_arguments_the_variables_of_the_commands_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert AsyncClient()._cluster == ClusterConfig(state=Path(".headrace"))
    set_all(monkeypatch, HEADRACE_STATE="/runs/a", HEADRACE_NAMESPACE="exp-7")
    assert AsyncClient()._cluster == ClusterConfig(state=Path("/runs/a"), namespace="exp-7")
    set_all(monkeypatch, **ADDRESSES, HEADRACE_BLOBS="s3://b", HEADRACE_KAFKA_PROPERTIES="a=1 b=2")
    assert AsyncClient()._cluster == ClusterConfig(
        Path("/runs/a"), "b:9092", "http://r:8081", "s3://b", "exp-7", {"a": "1", "b": "2"}
    )


def test_arguments_override_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, **ADDRESSES, HEADRACE_STATE="/runs/a", HEADRACE_NAMESPACE="exp-7")
    set_all(monkeypatch, HEADRACE_KAFKA_PROPERTIES="a=1 b=2")
    client = AsyncClient("c:1", "http://c:2", "mine", state="here", properties={"b": "3"})
    assert client._cluster == ClusterConfig(
        Path("here"), "c:1", "http://c:2", None, "mine", {"a": "1", "b": "3"}
    )


def test_a_property_without_a_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    set_all(monkeypatch, HEADRACE_KAFKA_PROPERTIES="a")
    with pytest.raises(UsageError, match="property 'a' has no value: write key=value"):
        AsyncClient()
