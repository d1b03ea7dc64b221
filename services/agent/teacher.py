"""Built-in agents that demonstrate: for warm starts."""

from __future__ import annotations

from headrace.services.agent.episode import Episode


async def calculator_teacher(episode: Episode) -> None:
    """Shows the use of the sandbox's tool `calculator`, by the `steps` of the task's payload.

    It enters the first step, reads the display, enters that with the next step behind it, and in
    the end says what the display shows. With the option `careless`, a probability, it enters the
    last step twice in so many episodes: what it says then is wrong, and demonstrated all the same.
    """
    careless = float(episode.task.options.get("careless", 0.0))
    steps = [str(step) for step in episode.task.payload["steps"]]
    if episode.random.random() < careless:
        steps.append(steps[-1])
    observation, display = await episode.reset(), ""
    for step in (*steps, ""):
        entered = await episode.generate(observation.text, demonstration=display + step)
        observation = await episode.step(entered.text)
        display = observation.text.rstrip("\n")
