"""What the Docker engine refuses, by an engine that says only that."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from aiohttp import web

from headrace.errors import InfrastructureError
from headrace.services.processes.docker.docker_engine import Conflict, Engine, NotThere


@pytest.mark.parametrize(
    ("status", "message", "error", "kind"),
    [
        (404, "No such container: a", NotThere, "sandbox_lost"),
        (409, "Conflict. The name is already in use", Conflict, "sandbox_conflict"),
        (500, "Container a is not running: Removal In Progress", Conflict, "sandbox_conflict"),
        (500, "write /a: no space left on device", InfrastructureError, "no_space"),
        (500, "something else", InfrastructureError, "engine_error"),
    ],
)
def test_a_refusal_is_typed(
    tmp_path: Path, status: int, message: str, error: type[Exception], kind: str
) -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"message": message}, status=status)

    async def main() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", refuse)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "engine.sock")).start()
        engine = Engine(f"unix://{tmp_path}/engine.sock")
        await engine.open()
        try:
            with pytest.raises(error, match=kind) as raised:
                async with engine.run("a", ("true",), "1", "/"):
                    pass
            assert type(raised.value) is error
        finally:
            await engine.aclose()
            await runner.cleanup()

    asyncio.run(main())
