"""What hardens containers on a real engine: pinned images, runtimes, user namespaces, ceilings."""

from __future__ import annotations

import asyncio
import json
import subprocess
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.schemas.events import EnvironmentUse
from headrace.services.agent.gateway.program import Command
from headrace.services.processes.docker.ceilings import VARIABLE, Ceilings
from headrace.services.processes.docker.docker_engine import DockerEngine
from headrace.services.processes.docker.hardened import Limits, container
from headrace.services.processes.docker.pinned_images import PinnedImages
from tests.sandboxes import registry
from tests.sandboxes.bench import Bench, claim, view
from tests.sandboxes.docker_engine import IMAGE, REMAPPED, WRAPPED, remapped_engine
from tests.sandboxes.test_contained_agent import BOUND_S, CONTAINER, all_gone, play
from tests.sandboxes.test_sandbox import on

DEADLINE_S = 300


def docker(host: str, *arguments: str) -> str:
    """What the command `docker` says. Any engine's client will do."""
    path = Path(host.removeprefix("unix://")).parent / "engine/usr/bin/docker"
    command = [str(path), "--host", host, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tag(engine: str) -> Iterator[str]:
    """A second name of IMAGE, which a test may move."""
    docker(engine, "tag", IMAGE, "movable:1")
    yield "movable:1"
    docker(engine, "rmi", "--force", "movable:1")


def change(engine: str, name: str, instruction: str) -> str:
    """Gives a name to another image: IMAGE with one instruction. Returns its digest."""
    archive = Path(engine.removeprefix("unix://")).with_name("root.tar")
    return docker(engine, "import", "--change", instruction, str(archive), name)


async def opened(made: Bench) -> None:
    try:
        await made.setup.open()
    finally:
        await made.setup.close_pool()


def refused(engine: str, **options: Any) -> str:
    """Why sandboxes with these options do not start."""
    with pytest.raises(UsageError) as error:
        asyncio.run(opened(Bench(engine, options)))
    return str(error.value)


def test_a_tag_that_moves_changes_no_container(engine: str, tag: str) -> None:
    before = docker(engine, "inspect", "--format", "{{.Id}}", IMAGE)

    async def test(made: Bench) -> None:
        assert change(engine, tag, "ENV MOVED=1") != before
        for mode in ("ephemeral", "persistent"):
            environment = await made.take(claim(), mode)
            first = await environment.reset(view())
            assert first.data["image_digest"] == before
            assert (await environment.step("echo [$MOVED]")).text == "[]\n"
            (name,) = await made.left()
            found = await made.engine.inspect(name.lstrip("/"))
            assert found["Image"] == before
            labels = found["Config"]["Labels"]
            assert (labels["headrace.image"], labels["headrace.digest"]) == (tag, before)
            use = EnvironmentUse(use="default", mode=mode)
            await made.setup.give_back(use, environment, fit=True)
        assert (await made.left())[0].startswith("/headrace.test-sandboxes.idle.")
        # The sandbox that waits is of the old image, so a worker that starts now doesn't use it.
        other = Bench(engine, {"image": tag})
        await other.setup.open()
        environment = await other.take(claim(2), "persistent")
        first = await environment.reset(view())
        assert first.data["image_digest"] not in (before, "")
        assert (await environment.step("echo [$MOVED]")).text == "[1]\n"
        await other.setup.close_pool()

    on(engine, test, image=tag)


def test_an_image_with_volumes_is_refused_wherever_it_is_named(
    engine: str, tag: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", engine)
    change(engine, tag, "VOLUME /data")
    for options in ({"image": tag}, {"images": [tag]}):
        assert "declares volumes (/data)" in refused(engine, **options)
    for key in ("image", "relay_image"):
        agent = Command(["x"], judge="j", container={**CONTAINER, key: tag})
        with pytest.raises(UsageError, match=r"declares volumes \(/data\)"):
            asyncio.run(agent.open(DEADLINE_S))


def test_a_named_runtime_has_the_filter_or_is_trusted_by_the_operator(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", engine)

    async def filtered(made: Bench) -> None:
        environment = await made.fresh()
        said = await environment.step("grep ^Seccomp: /proc/self/status")
        assert said.text.split() == ["Seccomp:", "2"]

    on(engine, filtered, runtime="runc")
    assert "trusted_runtimes" in refused(engine, runtime=WRAPPED)
    agent = Command(["x"], judge="j", container={**CONTAINER, "runtime": WRAPPED})
    with pytest.raises(UsageError, match="trusted_runtimes"):
        asyncio.run(agent.open(DEADLINE_S))
    ceilings = tmp_path / "ceilings.toml"
    ceilings.write_text(f"trusted_runtimes = ['{WRAPPED}']")
    monkeypatch.setenv(VARIABLE, str(ceilings))
    on(engine, filtered, runtime=WRAPPED)
    ceilings.write_text("runtimes = ['runsc']")
    assert "runtime 'runc' is beyond the ceiling" in refused(engine)
    ceilings.write_text("require_user_namespaces = true")
    assert "without user namespaces" in refused(engine)


def test_images_have_ceilings(
    engine: str, tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ceilings = tmp_path / "ceilings.toml"
    monkeypatch.setenv(VARIABLE, str(ceilings))
    digest = docker(engine, "inspect", "--format", "{{.Id}}", IMAGE)

    async def test(made: Bench) -> None:
        environment = await made.fresh()
        assert (await environment.step("echo here")).text == "here\n"

    ceilings.write_text(f"images = ['{IMAGE}']")
    on(engine, test)
    assert f"image '{tag}' is beyond the ceiling" in refused(engine, images=[tag])
    ceilings.write_text("images = ['docker.io/']")
    short = digest.removeprefix("sha256:")[:12]
    docker(engine, "rmi", "--force", tag)
    on(engine, test)
    # The engine has that image under a name, but the recipe names it by its id.
    assert f"image id '{short}' is beyond the ceiling" in refused(engine, image=short)
    ceilings.write_text("digests_only = true")
    assert "Name its digest" in refused(engine)
    on(engine, test, image=digest)


def test_an_image_is_pulled_by_its_digest_and_pulled_again_if_it_is_removed(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))

    async def main() -> None:
        made = DockerEngine(engine)
        images = PinnedImages("here", Ceilings(digests_only=True))
        async with asyncio.timeout(BOUND_S), registry.registry() as where:
            password = b64encode(f"{registry.USER}:{registry.PASSWORD}".encode()).decode()
            config = {"auths": {where: {"auth": password}}}
            (tmp_path / "config.json").write_text(json.dumps(config))
            name = f"{where}/{registry.IMAGE}@{registry.digest()}"
            await images.pin(made, name)
            assert images[name].source == name
            docker(engine, "rmi", "--force", images[name].digest)  # under all of its names
            # The image has no program, so its container ends at once.
            body = container(Limits(), images[name].digest, {}, 60)
            await images.create(made, "test-pulled-again", body)
            assert (await made.inspect("test-pulled-again"))["Image"] == images[name].digest
            await made.remove("test-pulled-again")
        await made.aclose()
        docker(engine, "rmi", name)

    asyncio.run(main())


@pytest.fixture(scope="module")
def remapped(engine: str) -> Iterator[str]:
    """An engine with user namespaces."""
    with remapped_engine(Path(engine.removeprefix("unix://")).parent) as host:
        yield host


def test_user_namespaces_are_used_if_the_engine_has_them(
    remapped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level("INFO")
    (tmp_path / "ceilings.toml").write_text("require_user_namespaces = true")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "ceilings.toml"))

    async def test(made: Bench) -> None:
        environment = await made.fresh()
        said = await environment.step("echo x > n; cat /proc/self/uid_map")
        assert said.text.split() == ["0", str(REMAPPED[1]), "65536"]

    on(remapped, test)
    assert "user namespaces userns" in caplog.text
    monkeypatch.setenv("DOCKER_HOST", remapped)
    assert play("talk").ending == "finished"
    asyncio.run(all_gone())
