"""The agent worker: it runs the agent's coroutine of each episode."""
