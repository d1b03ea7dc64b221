"""An episode of which only the agent has a task. Most episodes sleep: their agents wait.

A task that waits for the agent, the deadline and the log takes 3 KiB. Without it, each of them
calls a function, which starts that task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any

from headrace.services.agent.awaiting import check_awaited
from headrace.services.agent.episode import Agent, Episode
from headrace.services.agent.stops import contained
from headrace.services.worker.shard import ShardContext


class LoneAgent:
    """What is kept of an episode while only its agent has a task."""

    __slots__ = ("_context", "_timer", "_trace")

    def __init__(self, context: ShardContext, left_s: float, go_on: Callable[..., None]) -> None:
        """`go_on` is called when the agent ends, and at the deadline, in `left_s`."""
        self._context = context
        self._trace: Context = copy_context()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(left_s, go_on, context=self._trace)

    def start(self, begin: Callable[[], asyncio.Task[None]], go_on: Callable[..., None]) -> None:
        """Starts the agent's task, which ends with the shard."""
        agent = self._trace.run(begin)
        self._context.adopt(agent)
        agent.add_done_callback(go_on, context=self._trace)

    @property
    def is_closed(self) -> bool:
        """Whether the shard has ended the agent: the episode's next owner does the rest."""
        return not self._context.is_open

    def spawn(self, run: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Starts the task that does the rest."""
        self.cancel()
        return self._context.spawn(run, name, self._trace)

    def cancel(self) -> None:
        """Calls nothing at the deadline."""
        self._timer.cancel()


async def play(agent: Agent, episode: Episode) -> None:
    """Runs an agent's code. If the code asks the process to exit, only the attempt fails."""
    try:  # A context manager would take half a kilobyte.
        await agent(episode)
        check_awaited()
    except (SystemExit, KeyboardInterrupt) as exit:
        raise contained(exit) from exit
