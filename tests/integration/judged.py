"""An agent whose reward another team's judge gives."""

from headrace.services.agent.episode import Episode


async def solve(episode: Episode) -> None:
    """Says something, that follows from who it is, and has it judged."""
    await episode.generate("?")
    said = said_by(episode.task.number, episode.task.sample)
    episode.reward = await episode.score("jury", {"said": said})


def said_by(task: int, sample: int) -> str:
    """What is judged."""
    return "aeiou"[: sample + 1] + "x" * task
