"""Credentials in files, one for each role."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace.services.base.redactor import REDACTOR
from headrace.services.kafka.registry import Registry
from headrace.services.namespace.cluster_config import ClusterConfig, credentials_of
from headrace.services.namespace.credentials import MAX_BYTES, parse_properties, read_credentials
from headrace.services.operate.dashboard_child import variables_of


def written(folder: Path, role: str, text: str) -> Path:
    """Writes the credentials of a role. Returns their file."""
    path = folder / f"{role}.properties"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_each_role_has_properties_of_its_own(tmp_path: Path) -> None:
    written(tmp_path, "agent", "# ours\n\nsasl.username = a\nsasl.password=p=1 2\n")
    written(tmp_path, "operator", "sasl.username=o\nschema.registry.basic.auth.user.info=o:pw\n")
    given = {"security.protocol": "SASL_SSL", "sasl.username": "nobody"}
    cluster = ClusterConfig(kafka_properties=given, credentials=tmp_path)

    assert cluster.broker_properties() == {"security.protocol": "SASL_SSL", "sasl.username": "o"}
    assert cluster.registry_properties() == {"basic.auth.user.info": "o:pw"}
    assert ("schema.registry.basic.auth.user.info", "o:pw") in list(cluster.secrets())
    agent = replace(cluster, role="agent")
    assert agent.broker_properties() == given | {"sasl.username": "a", "sasl.password": "p=1 2"}
    assert agent.registry_properties() == {}


def test_a_child_gets_the_folder_and_no_secret(tmp_path: Path) -> None:
    written(tmp_path, "agent", "sasl.password=canary12\n")
    written(tmp_path, "operator", "sasl.password=canary34\n")
    cluster = ClusterConfig(credentials=tmp_path, namespace="n")

    line = cluster.to_json()
    assert "canary" not in line
    assert json.loads(line)["credentials"] == str(tmp_path)
    child = replace(ClusterConfig.from_json(line), role="agent")
    assert child.broker_properties() == {"sasl.password": "canary12"}
    assert ClusterConfig.from_json(line) == cluster
    variables = variables_of(cluster)
    assert variables["HEADRACE_CREDENTIALS"] == str(tmp_path)
    assert "canary" not in str(variables)


def test_secrets_are_redacted_once_they_are_read(tmp_path: Path) -> None:
    """Also those of the administrator, and the registry's password without its user."""
    texts = "sasl.password=broker-canary-1\nschema.registry.basic.auth.user.info=adm:url:canary-2\n"
    written(tmp_path, "administrator", texts)
    administrator = ClusterConfig(credentials=tmp_path, role="administrator")
    assert "broker-canary-1" in administrator.broker_properties().values()
    said = REDACTOR.text("refused broker-canary-1 and url:canary-2 of adm")
    assert said == (
        "refused [secret sasl.password] and [secret schema.registry.basic.auth.user.info] of adm"
    )


def test_one_file_serves_every_role(tmp_path: Path) -> None:
    file = written(tmp_path, "guest", "sasl.username=team-b")
    cluster = ClusterConfig(credentials=file, role="agent")
    assert cluster.broker_properties() == {"sasl.username": "team-b"}


def test_pem_fits_into_a_line(tmp_path: Path) -> None:
    written(tmp_path, "agent", "ssl.key.pem=-----BEGIN-----\\nabc\\n-----END-----\n")
    assert (
        read_credentials(tmp_path, "agent")["ssl.key.pem"] == "-----BEGIN-----\nabc\n-----END-----"
    )


def test_what_is_wrong_with_a_file_is_said_without_its_secrets(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"credentials of env in .*env\.properties: No such file"):
        read_credentials(tmp_path, "env")
    written(tmp_path, "env", "sasl.password=a\ncanary 1234\n")
    with pytest.raises(UsageError, match=r"env\.properties: the Kafka property") as caught:
        read_credentials(tmp_path, "env")
    assert "canary" not in str(caught.value)
    (tmp_path / "env.properties").write_bytes(b"a=\xff")
    with pytest.raises(UsageError, match="not UTF-8"):
        read_credentials(tmp_path, "env")
    written(tmp_path, "env", "a=" + "x" * MAX_BYTES)
    with pytest.raises(UsageError, match="256 KiB"):
        read_credentials(tmp_path, "env")


def test_a_file_that_everybody_can_read_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "env", "a=b")
    monkeypatch.setattr(
        "headrace.services.base.files.stat.S_IXOTH", 0o700
    )  # as if `/tmp` were open
    with caplog.at_level(logging.WARNING):
        read_credentials(tmp_path, "env")
        assert not caplog.records
        path.chmod(0o644)
        assert read_credentials(tmp_path, "env") == {"a": "b"}
    assert "every user of this machine can read the credentials" in caplog.text


def test_properties_need_a_value() -> None:
    assert parse_properties(["a=b", "c="]) == {"a": "b", "c": ""}
    with pytest.raises(UsageError, match=r"'ssl\.ca' has no value"):
        parse_properties(["ssl.ca"])


def test_an_empty_variable_names_no_credentials() -> None:
    assert credentials_of("") is None
    assert credentials_of(None) is None


def test_the_registry_knows_its_properties(tmp_path: Path) -> None:
    Registry("http://r:1", properties={"basic.auth.user.info": "a:b"}).close()
    with pytest.raises(
        UsageError, match=r"schema\.registry\.bearer is not known. Use one of basic"
    ):
        Registry("http://r:1", properties={"bearer": "a"})
    with pytest.raises(UsageError, match="files of TLS for the registry"):
        Registry("https://r:1", properties={"ssl.ca.location": str(tmp_path / "none.pem")})
