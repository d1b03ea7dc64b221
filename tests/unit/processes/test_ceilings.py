"""Ceilings of a host: what they refuse, for sandboxes and for contained agents."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.services.agent.gateway.program import Command
from headrace.services.env.instances import Instances
from headrace.services.env.sandbox.pool import DockerSetup
from headrace.services.env.service import load_environments
from headrace.services.env.slots import EnvironmentSlots
from headrace.services.processes.docker.ceilings import (
    CLOCKS_S,
    VARIABLE,
    Ceilings,
    read_ceilings,
    repository,
)
from tests.sandboxes.bench import claim

DIGEST = "sha256:" + "0123456789abcdef" * 4
NUMBERS: dict[str, float] = {
    "memory_mb": 2**21, "cpus": 1.5, "pids": 64, "disk_mb": 32, "command_s": 20, "lifetime_s": 600,
}  # fmt: skip


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the host's ceilings. It has nothing yet, which allows no network."""
    path = tmp_path / "ceilings.toml"
    path.write_text("")
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def setup(**options: Any) -> DockerSetup:
    instances = cast(Instances, None)
    given = {"image": "python", **options}
    return DockerSetup("default", given, EnvironmentSlots(1), "n", instances)


def agent(**options: Any) -> Command:
    return Command(["x"], judge="j", container={"image": "python", **options})


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_above_its_ceiling_is_refused(host: Path, key: str) -> None:
    host.write_text("\n".join(f"{name} = {value}" for name, value in NUMBERS.items()))
    most = NUMBERS | {"pids": 64}
    setup(**most)
    with pytest.raises(UsageError) as refused:
        setup(**{**most, key: most[key] + 1})
    said = str(refused.value)
    assert (
        f"environments.default.options: {key} = {most[key] + 1:.15g} is beyond the ceiling" in said
    )
    assert f"{key} = {most[key]:.15g}, which the operator of this host sets in {host}" in said
    assert refused.value.exit_code == 2


@pytest.mark.parametrize(
    ("key", "most"), [("memory_mb", 600), ("cpus", 2), ("pids", 32), ("disk_mb", 16)]
)
def test_a_contained_agent_has_the_same_ceilings(host: Path, key: str, most: int) -> None:
    host.write_text(f"{key} = {most}")
    agent(**{key: most})
    refusal = rf"container of agent 'command': {key} = {most + 1} .*{key} = {most}"
    with pytest.raises(UsageError, match=refusal):
        agent(**{key: most + 1})


def test_a_file_allows_no_network_unless_it_lists_one(host: Path) -> None:
    with pytest.raises(UsageError, match=r"network = 'host' .* networks = \[\]"):
        setup(network="host")
    host.write_text('networks = ["proxy"]')
    for network in ("none", "proxy"):
        setup(network=network)
    agent()


def test_without_a_file_nothing_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    setup(network="bridge", memory_mb=10**6)
    assert read_ceilings().lifetime(10**6, "x") == 10**6


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("memory = 5", "memory: no such key"),
        ("memory_mb = 0", "memory_mb: Input should be greater than 0"),
        ("memory_mb = [", "is not TOML"),
        ('images = ["python:3.12"]', "images.0: .*is not a repository"),
        ('images = ["python@sha256:12"]', "images.0: .*is not a repository"),
        ('images = [""]', "images.0: .*is not a repository"),
        ('_source = "x"', "_source: no such key"),
    ],
)
def test_a_wrong_file_is_refused(host: Path, text: str, complaint: str) -> None:
    host.write_text(text)
    with pytest.raises(UsageError, match=complaint):
        setup()


def test_a_file_that_cannot_be_read_allows_nothing(host: Path) -> None:
    host.unlink()
    with pytest.raises(UsageError, match=r"can't read .*ceilings.toml: No such file"):
        agent()


@pytest.mark.parametrize(
    ("image", "full"),
    [
        ("python", "docker.io/library/python"),
        ("python:3.12", "docker.io/library/python"),
        (f"python@{DIGEST}", "docker.io/library/python"),
        ("team/app:1", "docker.io/team/app"),
        ("docker.io/python", "docker.io/library/python"),
        ("index.docker.io/team/app", "docker.io/team/app"),
        ("registry.example.com/team/app:1", "registry.example.com/team/app"),
        (f"localhost:5000/app:1@{DIGEST}", "localhost:5000/app"),
        ("localhost/app", "localhost/app"),
    ],
)
def test_a_repository_has_one_full_name(image: str, full: str) -> None:
    assert repository(image) == full


@pytest.mark.parametrize(
    ("pattern", "image", "allowed"),
    [
        ("python", "docker.io/library/python:3", True),
        ("python", "pythonx", False),
        ("python", "evil/python", False),
        ("team/", "team/app", True),
        ("team/", "teams/app", False),
        ("registry.example.com/team/", "registry.example.com/team/a/b:1", True),
        ("registry.example.com/team/", "registry.example.com/teams/a", False),
        ("registry.example.com/", "registry.example.com/a", True),
        ("registry.example.com/", "registry.example.com.evil.com/a", False),
        ("localhost:5000/", "localhost:5000/a:1", True),
        ("docker.io/", "team/app", True),
        ("docker.io/", "python", True),
        ("docker.io/", "quay.io/team/app", False),
        (DIGEST, DIGEST, True),
        (DIGEST, f"anywhere.example.com/app@{DIGEST}", True),
        (DIGEST, "app:1", False),
        ("python", DIGEST, False),
        ("docker.io/", DIGEST, False),
    ],
)
def test_images_are_allowed_by_repository_or_digest(
    pattern: str, image: str, allowed: bool
) -> None:
    ceilings = Ceilings(images=(pattern,))
    if allowed:
        ceilings.require_image(image, "x")
        return
    with pytest.raises(UsageError, match=r"image .* is beyond the ceiling images"):
        ceilings.require_image(image, "x")


def test_digests_may_be_required() -> None:
    ceilings = Ceilings(digests_only=True)
    for image in (DIGEST, f"python@{DIGEST}", f"python:3@{DIGEST}"):
        ceilings.require_image(image, "x")
    for image in ("python", "python:3.12", "0123456789ab", DIGEST[:-1], f"python@{DIGEST[:-1]}"):
        with pytest.raises(UsageError, match=r"digests_only = true.*Name its digest"):
            ceilings.require_image(image, "x")


def test_an_id_does_not_pass_for_a_repository() -> None:
    """The engine finds an image by the first digits of its id as well."""
    ceilings = Ceilings(images=("docker.io/",))
    ceilings.require_image("0123456789ab", "x")
    with pytest.raises(UsageError, match="image id '0123456789ab' is beyond"):
        ceilings.require_found("0123456789ab", ["quay.io/team/app:1"], "x")
    ceilings.require_found("team/app:1", ["team/app:1", f"team/app@{DIGEST}"], "x")


def test_no_container_outlives_the_ceiling(host: Path) -> None:
    host.write_text("lifetime_s = 100")
    recipe = {"name": "r", "policies": {"default": {"model": "m"}}, "tasks": {"deadline_s": 101}}
    recipe["environments"] = {
        "default": {"use": "docker", "options": {"image": "i", "lifetime_s": 100}}
    }
    with pytest.raises(UsageError, match=r"tasks.deadline_s = 101 .* lifetime_s = 100"):
        load_environments(parse_recipe(recipe, "r"), "n", cast(Instances, None))
    with pytest.raises(UsageError, match=r"tasks.deadline_s = 101 .* lifetime_s = 100"):
        asyncio.run(agent().open(101))
    sandboxes = setup(lifetime_s=100)
    use = cast(Any, type("Use", (), {"image": "", "mode": "ephemeral"}))
    asyncio.run(sandboxes.take(use, claim(seconds=99)))
    with pytest.raises(UsageError, match=r"a deadline in .* lifetime_s = 100"):
        asyncio.run(sandboxes.take(use, claim(seconds=100 + CLOCKS_S + 10)))


@given(st.integers(1, 1000), st.integers(1, 2000))
def test_a_lifetime_is_shortened_only_by_what_clocks_differ(ceiling: int, wanted: int) -> None:
    ceilings = Ceilings(lifetime_s=ceiling)
    if wanted > ceiling + CLOCKS_S:
        with pytest.raises(UsageError):
            ceilings.lifetime(wanted, "x")
        return
    assert 0 <= wanted - ceilings.lifetime(wanted, "x") <= CLOCKS_S
    assert ceilings.lifetime(wanted, "x") <= ceiling


def test_the_documentation_has_all_keys_and_a_file_that_works(host: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "sandboxes.md").read_text()
    section = page.partition("## Ceilings of a host")[2].partition("\n## ")[0]
    host.write_text(section.partition("```toml file=ceilings.toml\n")[2].partition("```")[0])
    assert read_ceilings().digests_only
    table = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(re.findall("`([a-z_]+)`", "".join(table))) == sorted(Ceilings.model_fields)


@pytest.mark.parametrize("option", ["security_opt", "SecurityOpt", "userns_mode", "cap_add"])
def test_no_recipe_sets_what_hardens_a_container(option: str) -> None:
    for make in (setup, agent):
        with pytest.raises(UsageError, match=f"{option}: no such key"):
            make(**{option: ["seccomp=unconfined"]})
