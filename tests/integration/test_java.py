"""The examples in Java submit, judge and read in a run, with Avro's own library.

They are compiled by Eclipse's compiler, which is a jar, on the Java of the local stack.
"""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import pytest

from headrace.infra import local
from headrace.infra.local.detached import locked
from headrace.infra.local.jars import cache_folder, java, kafka_jars, load_pins, maven_context
from tests.integration.test_judges import BOUND_S, Programs, submit_and_judge
from tests.unit.test_architecture import ROOT

COMPILER = ("org.eclipse.jdt", "ecj", "3.42.0")
AVRO = ("org.apache.avro", "avro", "1.12.0")
FETCH_S = 300.0


def fetched(group: str, name: str, version: str) -> Path:
    """A jar of the Maven repository, which all checkouts of this user share."""
    folder = cache_folder() / "test-jars"
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / "fetch.lock", FETCH_S):
        context = maven_context(folder, threading.Event())
        return context.project(group, name).at_version(version).artifact().resolve()


@pytest.fixture(scope="module")
def class_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The class path of the compiled examples."""
    kafka = kafka_jars(load_pins(), cache_folder(), lambda _: None, threading.Event())
    jars = ":".join(map(str, (*kafka.class_path, fetched(*AVRO))))
    classes = tmp_path_factory.mktemp("classes")
    subprocess.run(
        [
            *(str(java()), "-cp", str(fetched(*COMPILER))),
            *(
                "org.eclipse.jdt.internal.compiler.batch.Main",
                "-17",
                "-proc:none",
                "-failOnWarning",
            ),
            *("-warn:none", "-cp", jars, "-d", str(classes)),
            *(str(path) for path in sorted((ROOT / "examples/java").glob("*.java"))),
        ],
        check=True,
        timeout=BOUND_S,
    )
    return f"{jars}:{classes}"


def test_java_submits_judges_and_reads(
    class_path: str, tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    program = (str(java()), "-XX:TieredStopAtLevel=1", "-cp", class_path)
    judge, reader, submit = ((*program, name) for name in ("Judge", "Results", "Submit"))
    programs = Programs(judge, reader, submit, names_public_key=True)
    submit_and_judge(programs, local_stack, namespace, tmp_path)
