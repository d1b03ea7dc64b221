"""Writes permissions and quotas as `KafkaUser` resources of Strimzi, in YAML.

The form is of its API version `kafka.strimzi.io/v1beta2`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from headrace.errors import UsageError
from headrace.services.kafka.broker import Permission
from headrace.services.operate.acls.principal_quotas import Quotas

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_RESOURCES = {"TOPIC": "topic", "GROUP": "group", "TRANSACTIONAL_ID": "transactionalId"}


def kafka_users(
    by_principal: Mapping[str, Sequence[Permission]], quotas: Mapping[str, Quotas], cluster: str
) -> str:
    """Returns one YAML document for each principal. `cluster` is the name of a `Kafka` resource.

    The user authenticates with the certificate that Strimzi makes for it. Raises UsageError if
    Kubernetes does not allow a name.
    """
    users = [
        _user(name, found, cluster) + _limits(quotas.get(name, {}))
        for name, found in by_principal.items()
    ]
    return "---\n" + "---\n".join(users)


def _limits(quotas: Quotas) -> str:
    """Returns the part of a user that limits it. Its keys are Kafka's, spelled for YAML."""
    lines = ["  quotas:"] if quotas else []
    for key, value in quotas.items():
        first, *words = key.split("_")
        lines.append(f"    {first}{''.join(map(str.title, words))}: {value}")
    return "".join(f"{line}\n" for line in lines)


def _user(principal: str, found: Sequence[Permission], cluster: str) -> str:
    name = principal.removeprefix("User:")
    for one in (name, cluster):
        if not _NAME.fullmatch(one):
            raise UsageError(
                f"{one!r} can't be the name of a Kubernetes resource: use lower-case letters, "
                "digits, - and ."
            )
    operations: dict[tuple[str, str], list[str]] = {}
    for permission in found:
        key = (_RESOURCES[permission.resource], permission.name)
        operations.setdefault(key, []).append(permission.operation.title().replace("_", ""))
    lines = [
        "apiVersion: kafka.strimzi.io/v1beta2",
        "kind: KafkaUser",
        "metadata:",
        f"  name: {json.dumps(name)}",
        "  labels:",
        f"    strimzi.io/cluster: {json.dumps(cluster)}",
        "spec:",
        "  authentication:",
        "    type: tls",
        "  authorization:",
        "    type: simple",
        "    acls:",
    ]
    for (kind, resource), words in operations.items():
        lines += [
            "      - resource:",
            f"          type: {kind}",
            f"          name: {json.dumps(resource)}",
            "          patternType: literal",
            f"        operations: [{', '.join(words)}]",
        ]
    return "\n".join(lines) + "\n"
