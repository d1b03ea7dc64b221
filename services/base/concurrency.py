"""Runs coroutines concurrently and ends them together."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine


async def until_first(*work: Coroutine[object, object, object]) -> None:
    """Runs all of `work` until one ends, cancels the others, and raises its error if it failed."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
