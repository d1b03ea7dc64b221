"""The operator's command is run for changes only, not for what is there at first."""

from __future__ import annotations

import asyncio
from pathlib import Path

from headrace.services.operate.autoscale.advise import Hooks
from headrace.services.operate.autoscale.autoscaler import Scaling


def test_only_a_change_runs_the_command(tmp_path: Path) -> None:
    said = tmp_path / "said"

    async def main() -> None:
        hooks = Hooks(f'echo "$HEADRACE_WANTED" >> {said}', "ns")
        hooks.on_scaling(Scaling(1, 0, "no worker reports", heard=False))
        hooks.on_scaling(Scaling(40, 40, "reports are awaited", heard=False))
        running = asyncio.create_task(hooks.run())
        for wanted in (50, 50, 60):
            hooks.on_scaling(Scaling(wanted, 50, "measured"))
            await asyncio.sleep(0.05)
        async with asyncio.timeout(30):
            while not said.exists() or not said.read_text():
                await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.wait([running])  # The shell may not have ended yet.

    asyncio.run(main())
    assert said.read_text() == "60\n"
