"""What submitted tasks need reaches the setups that want to know it, and no other."""

from __future__ import annotations

import asyncio

from headrace.schemas.events import EnvironmentUse, TaskSubmitted
from headrace.services.env.null import NullEnvironment
from headrace.services.env.sandbox.submitted_tasks import NEWEST, expect_submitted
from headrace.services.env.setup import EnvironmentSetup
from headrace.services.env.slots import EnvironmentSlots
from tests.unit.log.log_bench import Bench, run
from tests.unit.log.test_request_signatures import FORGERIES, TEAM, Scene


class Expects(EnvironmentSetup):
    """Keeps the images of which it heard."""

    def __init__(self, expects: bool = True) -> None:
        super().__init__(NullEnvironment, {}, EnvironmentSlots(1))
        self.expects = expects
        self.images: list[str] = []
        self.heard = asyncio.Event()

    def expect(self, use: EnvironmentUse) -> None:
        self.images.append(use.image)
        self.heard.set()


def task(number: int, use: str | None = "wants", tenant: str = "default") -> TaskSubmitted:
    environment = None if use is None else EnvironmentUse(use=use, image=f"image{number}")
    return TaskSubmitted(
        source="test", task_id=str(number), item_id=str(number), agent="chat", roles={},
        max_turns=1, max_tokens=1, deadline_s=60, environment=environment,
        tenant=tenant,
    )  # fmt: skip


def test_the_newest_tasks_and_all_later_ones_are_expected() -> None:
    async def test(bench: Bench) -> None:
        wants, other, silent = Expects(), Expects(), Expects(expects=False)
        for number in range(NEWEST + 10):
            await bench.log.send(task(number))
        setups = {"wants": wants, "other": other, "silent": silent}
        following = asyncio.create_task(expect_submitted(bench.log, setups))
        while len(wants.images) < NEWEST:
            wants.heard.clear()
            await wants.heard.wait()
        assert wants.images == [f"image{number}" for number in range(10, NEWEST + 10)]
        for number, use in ((1, None), (2, "unknown"), (3, "silent"), (4, "other"), (5, "wants")):
            await bench.log.send(task(1000 + number, use))
        while wants.images[-1] != "image1005":
            wants.heard.clear()
            await wants.heard.wait()
        assert (other.images, silent.images) == (["image1004"], [])
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    run(test)


def test_a_forged_task_gets_nothing_ready() -> None:
    async def main() -> None:
        scene, wants = Scene(), Expects()
        await scene.apply()
        for number, forge in enumerate(FORGERIES):
            await scene.broker.send(forge(scene, task(number, tenant="team")))
        await scene.log(TEAM).send(task(100, tenant="team"))
        following = asyncio.create_task(expect_submitted(scene.log(), {"wants": wants}))
        while "image100" not in wants.images:
            wants.heard.clear()
            await wants.heard.wait()
        assert wants.images == ["image100"]
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)

    asyncio.run(main())
