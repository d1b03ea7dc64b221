"""`headrace chat`: talks to a version in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    policy_option,
    say,
    version_option,
    visible,
)


@click.command()
@click.argument(
    "folder", metavar="[DIR]", required=False,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
)  # fmt: skip
@policy_option
@version_option
@click.option(
    "--temperature", type=click.FloatRange(min=0),
    help="0 takes the most likely token. [default: that of the run's recipe; 1 for DIR]",
)  # fmt: skip
@click.option(
    "--max-tokens", type=click.IntRange(min=1),
    help="Most tokens of one answer. [default: that of the run's recipe; 512 for DIR]",
)  # fmt: skip
@cluster_options
def chat(
    folder: Path | None,
    policy: str | None,
    version: int | None,
    temperature: float | None,
    max_tokens: int | None,
    **options: Any,
) -> None:
    """Talk to a version of a run, or to the model in the folder DIR.

    Each line is a message, in the model's chat template. A model without a template completes the
    line. Tokens are sampled as the run's recipe says in `sampling`: only tokens that are `allowed`,
    at most `max_tokens`, with its `temperature`, `stop` and `json_schema`. Ctrl-C ends an answer,
    Ctrl-D ends the chat. If the run is paused or has ended, the command starts the local stack and
    stops it again before the chat.

    \b
    Examples:
      headrace chat
      headrace chat --namespace exp-7 --version 120 --temperature 0
      headrace chat my-model
    """
    import asyncio
    from dataclasses import replace
    from tempfile import TemporaryDirectory

    from headrace.errors import UsageError
    from headrace.services.operate.chat.terminal_chat import (
        Chat,
        model_of_folder,
        model_of_version,
        talk,
    )
    from headrace.services.operate.find_versions import find_versions, pick

    cluster = cluster_of(options)
    if folder is not None and (policy, version) != (None, None):
        raise UsageError("DIR excludes --policy and --version: give only one model")
    with TemporaryDirectory(prefix="headrace-chat-") as name:
        if folder is not None:
            model = model_of_folder(folder, Path(name))
        else:
            chosen = pick(asyncio.run(find_versions(cluster, version, say)), policy, version)
            say(f"fetching and verifying {chosen}")
            model = model_of_version(chosen, cluster.open_blobs(None), Path(name))
        asked = {"temperature": temperature, "max_tokens": max_tokens}
        given = {key: value for key, value in asked.items() if value is not None}
        opened = Chat(replace(model, sampling=model.sampling.model_copy(update=given)))
        if not opened.remembers:
            say("the model has no chat template: it completes each line")
        talk(opened, _lines(), _write, say)


def _lines() -> Iterator[str]:
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            return
        except KeyboardInterrupt:
            say("")  # As in a shell, Ctrl-C discards the line.


def _write(text: str) -> None:
    click.echo(visible(text), nl=False)
