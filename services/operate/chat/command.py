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
    explain,
    policy_option,
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
    "--temperature", type=click.FloatRange(min=0), default=1.0, show_default=True,
    help="0 takes the most likely token.",
)  # fmt: skip
@click.option(
    "--max-tokens", type=click.IntRange(min=1), default=512, show_default=True,
    help="Most tokens of one answer.",
)  # fmt: skip
@cluster_options
def chat(
    folder: Path | None,
    policy: str | None,
    version: int | None,
    temperature: float,
    max_tokens: int,
    **options: Any,
) -> None:
    """Talk to a version of a run, or to the model in the folder DIR.

    Each line is a message, in the model's chat template. A model without a template completes the
    line. Ctrl-C ends an answer, Ctrl-D ends the chat. If the run is paused or has ended, the
    command starts the local stack and stops it again before the chat.

    \b
    Examples:
      headrace chat
      headrace chat --namespace exp-7 --version 120 --temperature 0
      headrace chat my-model
    """
    import asyncio
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
            chosen = pick(asyncio.run(find_versions(cluster, version, explain)), policy, version)
            explain(f"fetching and verifying {chosen}")
            model = model_of_version(chosen, cluster.open_blobs(None), Path(name))
        opened = Chat(model, temperature, max_tokens)
        if not opened.remembers:
            explain("the model has no chat template: it completes each line")
        talk(opened, _lines(), _write, explain)


def _lines() -> Iterator[str]:
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            return
        except KeyboardInterrupt:
            explain("")  # As in a shell, Ctrl-C discards the line.


def _write(text: str) -> None:
    click.echo(visible(text), nl=False)
