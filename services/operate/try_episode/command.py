"""`headrace try`: plays one episode of a recipe in the terminal, without Kafka."""

from __future__ import annotations

import click

from headrace.services.operate.options import set_option


@click.command("try")
@click.argument("recipe", default="quickstart")
@set_option
@click.option(
    "--by", type=click.Choice(["hand", "random", "model"]), default="hand", show_default=True,
    help="Who answers for the policies: you, chance (needs sampling.allowed), or the model.",
)  # fmt: skip
@click.option(
    "--item", type=click.IntRange(min=0), default=0, show_default=True,
    help="Which item of the data set, counted from 0.",
)  # fmt: skip
def try_episode(recipe: str, settings: tuple[str, ...], by: str, item: int) -> None:
    """Play one episode of a RECIPE in the terminal, without Kafka.

    The recipe's agent plays in its environment, with its limits, and each turn is printed. By
    default you enter what the policy answers, one line each; Ctrl-D cancels the episode. Nothing is
    recorded. A model is used as it is before training: with the weights of its folder, or with
    random ones if it has none.

    Exits with code 1 if the episode failed or reached its deadline, because then code or a service
    did not do its work. A limit of turns or tokens, a low reward and Ctrl-D are no failures.

    \b
    Examples:
      headrace try quickstart
      headrace try my.toml --by model --item 7
    """
    import asyncio
    from tempfile import TemporaryDirectory

    from headrace.errors import HeadraceError
    from headrace.schemas.events import EpisodeEnded
    from headrace.services.namespace.cluster_config import read_recipe
    from headrace.services.operate.try_episode.local_episode import play
    from headrace.services.operate.try_episode.players import open_player
    from headrace.services.operate.try_episode.transcript import Transcript

    resolved = read_recipe(recipe, settings)

    async def run() -> EpisodeEnded:
        with TemporaryDirectory(prefix="headrace-try-") as scratch:
            player = await open_player(resolved, by, scratch)
            return await play(resolved, item, player, Transcript())

    outcome = asyncio.run(run())
    if outcome.ending in ("failed", "deadline"):
        raise HeadraceError(f"the episode ended as {outcome.ending!r}; its last lines say why")
