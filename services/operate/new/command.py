"""`headrace new`: makes a folder to start from."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.services.operate.options import echo

_NEXT = """\
This folder has an environment, an agent, a recipe, tasks and a test. Change them as you like.

Next:
{cd}\
  headrace check recipe.toml             # use every part of the recipe once
  headrace try recipe.toml               # play an episode yourself, without Kafka
  headrace try recipe.toml --by random   # let chance play
  pytest                                 # test the environment (pip install pytest)
  headrace run recipe.toml               # train, in about a minute"""


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
def new(folder: Path) -> None:
    """Make a folder DIR to start from, with an environment of your own.

    It gets an environment, an agent, a data set, a recipe that trains a tiny model on them, and a
    test. All of it works as it is. DIR must be new or empty; hidden files, such as .git, don't
    count.

    \b
    Examples:
      headrace new higher-lower
      headrace new .
    """
    import shlex

    from headrace.services.operate.new.new_folder import make_folder

    make_folder(folder)
    here = folder.resolve() == Path.cwd()
    echo(_NEXT.format(cd="" if here else f"  cd {shlex.quote(str(folder))}\n"))
