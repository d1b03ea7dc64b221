"""Files of tasks in containers: what goes in, what comes out, and what never does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace import Client
from headrace.errors import UsageError
from headrace.infra import local
from headrace.schemas.recipe.task_settings import Artifacts
from headrace.services.base.types import Observation, TaskFile
from headrace.services.env.sandbox.docker_environment import DockerEnvironment
from headrace.services.models.blobs import LocalBlobStore
from headrace.services.tasks.artifact_store import ArtifactStore
from tests.commands import cluster_variables
from tests.integration.test_other_teams import headrace
from tests.sandboxes.bench import Bench, on_engine, view
from tests.sandboxes.docker_engine import IMAGE

BOUND_S = 240.0


def on(
    engine: str, folder: Path, test: Callable[[Bench], Coroutine[Any, Any, None]], **options: Any
) -> None:
    async def with_store(made: Bench) -> None:
        limits = Artifacts(files=8, file_mb=1, episode_mb=2)
        made.setup.store = ArtifactStore(LocalBlobStore(folder / "blobs"), limits)
        await test(made)

    on_engine(engine, with_store, BOUND_S, **options)


async def begun(made: Bench, folder: Path, files: Mapping[str, bytes]) -> DockerEnvironment:
    def file(name: str, data: bytes) -> TaskFile:
        path = folder / f"{abs(hash(name))}"
        path.write_bytes(data)

        async def fetch() -> Path:
            return path

        return TaskFile(name, len(data), fetch)

    environment = await made.take()
    found = {name: file(name, data) for name, data in files.items()}
    await environment.reset(replace(view(), artifacts=found))
    return environment


def text(observation: Observation) -> dict[str, bytes]:
    return {name: bytes(data) for name, data in observation.artifacts.items() if data is not None}


def test_files_go_in_and_come_out_changed(engine: str, tmp_path: Path) -> None:
    async def test(made: Bench) -> None:
        environment = await begun(
            made, tmp_path, {"in/deep/a b.txt": b"abc\n", "top": b"t" * 500_000}
        )
        shown = await environment.step("ls -l in/deep; wc -c < top; id -u")
        assert "a b.txt" in shown.text
        assert "500000" in shown.text
        await environment.step("mkdir out; tr a-z A-Z < 'in/deep/a b.txt' > out/A; echo > other")
        collected = await environment.collect(["out/*", "missing/*"])
        assert text(collected) == {"out/A": b"ABC\n"}
        again = await environment.collect(["**"])  # and it changes nothing
        assert sorted(text(again)) == ["in/deep/a b.txt", "other", "out/A", "top"]
        assert (await environment.step("cat out/A")).text == "ABC\n"
        with pytest.raises(UsageError, match="disk_mb"):
            await begun(made, tmp_path, {"large": bytes(17 << 20)})

    on(engine, tmp_path, test)


HOSTILE = {
    "a link": ("mkdir out; echo secret > x; ln -s ../x out/link; ln -s /etc out/etc", []),
    "a link in place of the folder": ("ln -s /etc out", []),
    "pipes": ("mkdir out; mkfifo out/pipe; echo 1 > out/a", ["out/a"]),
    "a large file": (
        "mkdir out; dd if=/dev/zero of=out/large bs=1M count=3; echo 1 > out/a", ["out/a"],
    ),
    "a sparse file": (
        "mkdir out; dd if=/dev/zero of=out/s bs=1 count=1 seek=9000000; echo 1 > out/a", ["out/a"],
    ),
    "a huge sparse file": (
        "mkdir out; dd if=/dev/zero of=out/s bs=1 count=1 seek=400000000000; echo 1 > out/a", [],
    ),
    "many files": (
        "mkdir out; i=0; while [ $i -lt 1000 ]; do : > out/f$i; i=$((i+1)); done",
        [f"out/f{n}" for n in sorted(map(str, range(1000)))[:8]],
    ),
    "odd names": ("mkdir out; : > \"$(printf 'out/a\\nb\\377')\"; echo 1 > out/ok", ["out/ok"]),
    "what cannot be read": ("mkdir out; echo 1 > out/a; chmod 0 out/a; echo > out/b", ["out/b"]),
    "no folder": ("true", []),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_what_a_policy_makes_harms_no_worker(engine: str, tmp_path: Path, what: str) -> None:
    command, expected = HOSTILE[what]

    async def test(made: Bench) -> None:
        environment = await begun(made, tmp_path, {})
        await environment.step(command)
        collected = await environment.collect(["out/*"])
        assert sorted(text(collected)) == sorted(expected)
        assert (collected.reward, collected.done) == (None, False)
        if what not in ("no folder", "what cannot be read", "a link in place of the folder"):
            assert collected.data["left_out"]

    on(engine, tmp_path, test)


def test_files_of_a_sandbox_out_of_memory_are_the_policy_s_loss(
    engine: str, tmp_path: Path
) -> None:
    async def test(made: Bench) -> None:
        environment = await begun(made, tmp_path, {})
        await environment.step("mkdir out; echo 1 > out/a; kill -9 -1")
        collected = await environment.collect(["out/*"])
        assert text(collected) in ({}, {"out/a": b"1\n"})

    on(engine, tmp_path, test)


def test_the_next_worker_collects_from_a_sandbox_that_it_finds(engine: str, tmp_path: Path) -> None:
    async def test(made: Bench) -> None:
        environment = await begun(made, tmp_path, {"in": b"1"})
        await environment.step("mkdir out; cp in out/a")
        first = await environment.collect(["out/*"])  # and its worker dies before it answers
        heir = await made.take()
        await heir.resume(view(), done=1)
        assert text(await heir.collect(["out/*"])) == text(first) == {"out/a": b"1"}

    on(engine, tmp_path, test)


RECIPE = """
name = "sandbox-files"

[tasks]
options = {{ items = 0 }}
epochs = 1
samples = 2
max_turns = 4
max_tokens = 8
deadline_s = 200

[agents.default]
use = "tests.sandboxes.changer:change"

[environments.default]
use = "docker"
slots = 4
options = {{ image = "{image}", images = ["headrace-two", "headrace-three"], memory_mb = 64, \
pids = 32, disk_mb = 8, command_s = 20 }}
collect = ["out/*"]

[policies.default]
model = "tiny-llama"
training = false
engine = {{ use = "scripted", options = {{ count = 1 }} }}
sampling = {{ max_tokens = 1 }}
"""


def images(engine: str) -> None:
    """Makes two more images. Each image says in /etc/which what it is."""
    import docker

    client = docker.DockerClient(base_url=engine)
    for name in ("two", "three"):
        made = client.containers.run(
            IMAGE, ["sh", "-c", f"echo {name} > /etc/which"], network_mode="none", detach=True
        )
        made.wait()
        made.commit(f"headrace-{name}", "latest")
        made.remove()
    client.close()


@pytest.mark.long
def test_both_modes_three_images_and_two_tenants_in_one_run(
    engine: str, tmp_path: Path, local_stack: local.LocalStack, namespace: str
) -> None:
    images(engine)
    recipe = tmp_path / "files.toml"
    recipe.write_text(RECIPE.format(image=IMAGE))
    environment = {**cluster_variables(local_stack, namespace, tmp_path), "DOCKER_HOST": engine}
    headrace(("apply", str(recipe)), environment)
    chosen = [
        (image, mode, tenant)
        for image in ("", "headrace-two", "headrace-three")
        for mode, tenant in (("ephemeral", "gold"), ("persistent", "silver"))
    ]
    where = (local_stack.bootstrap_servers, local_stack.registry_url, namespace)
    with Client(*where, state=tmp_path) as client:
        client.submit(
            [
                {
                    "image": image, "mode": mode, "tenant": tenant, "labels": {"of": image},
                    "artifacts": {"in/text": f"{mode}\n".encode()},
                }
                for image, mode, tenant in chosen
            ]
        )  # fmt: skip
        with pytest.raises(UsageError, match="not among the images"):
            client.submit([{"image": "headrace-four"}])
        run = [sys.executable, "-m", "headrace", "run", str(recipe), "--json", "--quiet"]
        done = subprocess.run(
            run, env={**os.environ, **environment}, stdout=subprocess.PIPE, timeout=600, check=True
        )
        summary = json.loads(done.stdout)
        assert (summary["tasks"], summary["failures"], summary["restarts"]) == (6, 0, 0)
        for result in client.results():
            image, mode, tenant = chosen[result.task]
            assert (result.tenant, result.labels) == (tenant, {"of": image})
            which = image.removeprefix("headrace-")
            for outcome in result.outcomes:
                (artifact,) = outcome.artifacts
                changed = client.artifact(artifact).decode()
                assert changed.split() == [mode.upper(), *([which] if which else [])]
