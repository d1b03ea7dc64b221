"""`python -m headrace.conformance trainer`: tries another team's trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headrace.services.operate.conformance.command_options import finish
from headrace.services.operate.options import cluster_of, cluster_options, json_option, say


@click.command()
@click.argument("command", nargs=-1, required=True)
@click.option(
    "--recipe", metavar="RECIPE", help="A recipe of which the trainer trains one policy. "
    "[default: a tiny random Llama in float32]",
)  # fmt: skip
@click.option(
    "--limit", "limit_s", metavar="SECONDS", type=click.FloatRange(min=1), default=120.0,
    show_default=True, help="Maximum seconds for a version, the start of the trainer included.",
)  # fmt: skip
@json_option
@cluster_options
def trainer(
    command: tuple[str, ...],
    recipe: str | None,
    limit_s: float,
    as_json: bool,
    **options: Any,
) -> None:
    """Try a trainer's COMMAND against the contract for trainers.

    The kit writes known batches, runs the command, kills it with SIGKILL at several moments,
    starts it again, and judges what it published. It starts a Kafka and a registry of its own,
    unless --bootstrap-servers names a cluster, or the state folder has a secure stack that runs.
    There it leaves namespaces `conformance-…`, which have ended; --namespace gives another first
    part of their names.

    The command finds its run through the variables HEADRACE_BOOTSTRAP_SERVERS,
    HEADRACE_REGISTRY_URL, HEADRACE_NAMESPACE and HEADRACE_BLOBS, as `TrainerClient` does. It works
    in a folder that is empty at first and stays the same when it is started again. Arguments that
    name files are made absolute. The exit code is 1 if a rule does not hold.

    \b
    Example:
      python -m headrace.conformance trainer -- python "$PWD/my_trainer.py"
    """
    import asyncio
    import tempfile

    from headrace.services.operate.conformance.trainer.try_trainer import try_trainer

    cluster = cluster_of(options)
    folder = Path(tempfile.mkdtemp(prefix="headrace-conformance-"))
    say(f"files and output of the trainer: {folder}")
    report = asyncio.run(try_trainer(cluster, recipe, command, folder, limit_s, say))
    finish(report, as_json)
