"""`make sbom`: the bill of materials and the hashes name every locked package."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = ["make", "--old-file", ".venv/.synced", "sbom", f"DIST={folder}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    return folder


def requirements(dist: Path) -> dict[tuple[str, str], str]:
    """Name and version of each required package, and its lines."""
    text = (dist / "requirements.txt").read_text()
    entries = re.split(r"^(?=[^\s#])", text, flags=re.MULTILINE)[1:]
    found = (re.match(r"([\w.-]+)==(\S+)", entry) for entry in entries)
    return {
        (match[1], match[2]): entry
        for entry, match in zip(entries, found, strict=True)
        if match is not None
    }


def test_the_bill_of_materials_names_what_is_required_with_hashes(dist: Path) -> None:
    tree = json.loads((dist / "sbom.cdx.json").read_text())
    assert (tree["bomFormat"], tree["specVersion"]) == ("CycloneDX", "1.5")
    assert tree["metadata"]["component"]["name"] == "headrace"
    components = {(one["name"], one["version"]) for one in tree["components"]}
    required = requirements(dist)
    assert components == required.keys()
    names = {name for name, _ in components}
    assert {"confluent-kafka", "cryptography", "faust-streaming", "torch"} <= names
    assert not {"pytest", "ruff", "vllm"} & names
    for one in tree["components"]:
        files = one["externalReferences"]
        assert files, one["name"]
        assert all(file["hashes"][0]["alg"] == "SHA-256" for file in files), one["name"]


def test_every_required_package_has_hashes(dist: Path) -> None:
    lines = [
        line
        for line in (dist / "requirements.txt").read_text().splitlines()
        if not line.startswith((" ", "#"))
    ]
    required = requirements(dist)
    assert len(lines) == len(required) > 100
    assert all("--hash=sha256:" in rest for rest in required.values())
