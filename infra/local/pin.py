"""Prints `jars.sha256` for what the Maven repository serves today.

Run it after a version change:

    python -m headrace.infra.local.pin > pins && mv pins infra/local/jars.sha256

It trusts what it downloads: compare the printed digests with those that the projects publish.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from pathlib import Path

from headrace.infra.local.jars import (
    KAFKA_VERSION,
    REGISTRY_FOLDER,
    REGISTRY_VERSION,
    file_sha256,
    maven_context,
    tree_sha256,
    unpack,
)

# The broker, and a logger that writes to standard error, because the broker has none.
KAFKA = (f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}", "org.slf4j:slf4j-simple:1.7.36")


def main() -> None:
    """Resolves both servers in a temporary folder and prints the table."""
    with tempfile.TemporaryDirectory() as scratch:
        context = maven_context(Path(scratch), threading.Event())
        roots = [context.create_dependency(coordinate) for coordinate in KAFKA]
        direct, transitive = context.resolver.resolve(roots)
        print("# Every file of the local stack. Made by: python -m headrace.infra.local.pin")
        print(f"# Apache Kafka {KAFKA_VERSION}")
        # The broker comes first, then its dependencies.
        for jar in [*direct, *sorted(transitive, key=lambda jar: (jar.groupId, jar.artifactId))]:
            if jar.scope in ("compile", "runtime", None):
                path = jar.artifact.resolve()
                name = f"{jar.groupId}:{jar.artifactId}:jar:{jar.version}"
                print(f"{file_sha256(path)}  {name}")
        print(f"# Apicurio Registry {REGISTRY_VERSION}, and the folder that it unpacks to")
        component = context.project("io.apicurio", "apicurio-registry-app").at_version(
            REGISTRY_VERSION
        )
        archive = component.artifact(classifier="all", packaging="tar.gz").resolve()
        print(
            f"{file_sha256(archive)}  io.apicurio:apicurio-registry-app:tar.gz:all:"
            f"{REGISTRY_VERSION}"
        )
        unpack(archive, Path(scratch) / "unpacked")
        print(f"{tree_sha256(Path(scratch) / 'unpacked')}  {REGISTRY_FOLDER}/")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
