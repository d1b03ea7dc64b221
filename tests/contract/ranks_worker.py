"""A worker of the tests with a vLLM engine in two ranks: `python -m tests.contract.ranks_worker`.

It takes a model's folder, says `made` when its engine is made, and `drawing` when a prompt is under
way. It goes on until SIGTERM, which closes the engine.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

from headrace.services.inference.engine import EnginePrompt, EngineSetup, Weights
from headrace.services.inference.engines.vllm_engine import VllmEngine


async def work(model: Path) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    options = {"tensor_parallel_size": 2}
    engine = await asyncio.to_thread(VllmEngine, EngineSetup(model, 4, options=options))
    print("made", flush=True)
    await engine.load(Weights("default", 0, model / "0.safetensors"))
    loop, drawn = asyncio.get_running_loop(), asyncio.Event()
    prompt = EnginePrompt("default", [1, 2, 3], 100_000)

    def on_token(token: int) -> None:
        loop.call_soon_threadsafe(drawn.set)

    running = asyncio.create_task(engine.generate(prompt, on_token))
    await drawn.wait()
    print("drawing", flush=True)
    await ended.wait()
    await engine.close(drain_s=0)
    assert (await running).finish == "interrupted"


if __name__ == "__main__":
    asyncio.run(work(Path(sys.argv[1])))
