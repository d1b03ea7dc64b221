"""An agent of two policies that are asked the same, and must learn to say the opposite."""

from headrace.services.agent.episode import Episode


async def solve(episode: Episode) -> None:
    """Half a point for each policy that says what is its own to say."""
    left, right = await episode.gather(
        lambda: episode.generate("?", role="left"), lambda: episode.generate("?", role="right")
    )
    episode.reward = 0.5 * (left.text == "L") + 0.5 * (right.text == "R")
