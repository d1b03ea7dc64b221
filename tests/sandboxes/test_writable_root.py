"""A writable root file system, within the limit that the engine's storage driver holds."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from headrace.errors import UsageError
from tests.sandboxes.bench import bench, claim, view
from tests.sandboxes.docker_engine import btrfs_engine
from tests.sandboxes.image_registry import image_registry

WRITES = "dd if=/dev/zero of=/data/{} bs=1048576 count={} >/dev/null 2>&1; echo $?"


def test_an_engine_that_cannot_limit_a_root_is_refused(engine: str) -> None:
    async def main() -> None:
        with pytest.raises(UsageError, match=r"root_mb: the engine at .* can't limit a root"):
            async with bench(engine, root_mb=50):
                pass

    asyncio.run(main())


@pytest.mark.long
def test_a_sandbox_writes_to_its_image_within_the_limit(engine: str) -> None:
    async def main(host: str) -> None:
        async with image_registry(engine) as registry:
            image = registry.add("open", open_to_all=("data",))
            async with bench(host, image=image, root_mb=50) as made:
                one, other = await made.fresh(claim(1)), await made.fresh(claim(2))
                assert (await one.step(WRITES.format("within", 40))).text == "0\n"
                assert (await one.step(WRITES.format("beyond", 40))).text == "1\n"
                assert int((await one.step("cat /data/* | wc -c")).text) <= 51 << 20
                assert (await one.step("touch /bin/x")).data["exit_code"] == 1
                assert (await other.step("ls /data")).text == ""
                assert (await other.step(WRITES.format("own", 40))).text == "0\n"
                for environment in (one, other):
                    await environment.aclose()
                with pytest.raises(UsageError, match="'persistent' can't have root_mb"):
                    await made.take(claim(3), mode="persistent")
            careless = registry.add("careless", open_to_all=("etc",))
            async with bench(host, image=careless, root_mb=50) as made:
                environment = await made.take()
                with pytest.raises(UsageError, match="lets every user write to /etc"):
                    await environment.reset(view())
                await environment.aclose()

    with btrfs_engine(Path(engine.removeprefix("unix://")).parent) as host:
        asyncio.run(main(host))
