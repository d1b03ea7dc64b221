"""An agent of two policies that are asked the same, and must learn to say the opposite."""

from headrace.services.agent.episode import Episode


async def solve(episode: Episode) -> None:
    """Half a point for each policy that says what is its own to say."""
    left, right = await episode.gather(
        lambda: episode.generate("?", role="left"), lambda: episode.generate("?", role="right")
    )
    episode.reward = 0.5 * (left.text == "L") + 0.5 * (right.text == "R")


async def differ(episode: Episode) -> None:
    """Each role has a reward of its own: the small policy for L, and the large one for R. A third
    one, which is not trained, is asked, too."""
    small = await episode.generate("?", role="small")
    large = await episode.generate(small.text, role="large")
    await episode.generate(large.text, role="frozen")
    episode.rewards |= {"small": float(small.text == "L"), "large": float(large.text == "R")}
