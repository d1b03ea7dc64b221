"""`headrace up` and `headrace down`: start and stop the local stack."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from headrace.errors import UsageError
from headrace.services.operate.options import json_option, print_json, say, state_option

_PORT = click.IntRange(1, 65_535)


@click.command()
@state_option
@click.option(
    "--kafka-port", metavar="PORT", type=_PORT,
    help="Port of Kafka. [default: the port it had before, else 9092, else a free port]",
)  # fmt: skip
@click.option(
    "--registry-port", metavar="PORT", type=_PORT,
    help="Port of the registry. [default: the port it had before, else 8081, else a free port]",
)  # fmt: skip
@click.option(
    "--secure", is_flag=True,
    help="Accept only clients with a certificate, and refuse them what `headrace acls` does not "
    "allow. A stack that was secure stays so until `headrace down --wipe`.",
)  # fmt: skip
@json_option
def up(
    state: str, kafka_port: int | None, registry_port: int | None, secure: bool, as_json: bool
) -> None:
    """Start a local Kafka and schema registry.

    Both are real servers that listen on 127.0.0.1 only. They keep their data in --state and run
    until `headrace down`. Commands without --bootstrap-servers use them. Prints shell commands that
    set HEADRACE_BOOTSTRAP_SERVERS and HEADRACE_REGISTRY_URL for other programs, and with --secure
    also HEADRACE_CREDENTIALS, the folder with the credentials of each role.

    \b
    Examples:
      headrace up
      headrace up --secure
      eval "$(headrace up)"
    """
    from headrace.infra import local
    from headrace.services.namespace.access_table import ACCESS

    stack = local.up(
        Path(state),
        on_progress=say,
        kafka_port=kafka_port,
        registry_port=registry_port,
        lasting=True,
        roles=tuple(ACCESS) if secure else (),
    )
    if as_json:
        found = {"bootstrap_servers": stack.bootstrap_servers, "registry_url": stack.registry_url}
        print_json(found | ({"credentials": str(stack.credentials)} if stack.credentials else {}))
        return
    click.echo(f"export HEADRACE_BOOTSTRAP_SERVERS={stack.bootstrap_servers}")
    click.echo(f"export HEADRACE_REGISTRY_URL={stack.registry_url}")
    if stack.credentials is not None:
        click.echo(f"export HEADRACE_CREDENTIALS={shlex.quote(str(stack.credentials))}")


@click.command()
@state_option
@click.option("--wipe", is_flag=True, help="Also delete its data: every topic, permanently.")
@click.option("--force", is_flag=True, help="Stop it although a run of --state uses it.")
def down(state: str, wipe: bool, force: bool) -> None:
    """Stop the local stack of --state.

    Its data stays, and the next `headrace up` uses it again, unless you give --wipe. The secrets of
    a secure stack are deleted; the next `headrace up` makes new ones.

    It refuses to stop the stack under a `headrace run`: end that with Ctrl-C first.

    \b
    Examples:
      headrace down
      headrace down --wipe
    """
    from headrace.infra import local
    from headrace.services.operate.up_down.run_lock import find_running

    runs = [] if force or local.find(Path(state)) is None else find_running(Path(state))
    if runs:
        raise UsageError(
            f"`headrace run` runs the namespace {', '.join(runs)} now: end it with Ctrl-C, then "
            "stop the stack, or give --force"
        )
    stopped = local.down(Path(state), wipe=wipe)
    say("stopped" if stopped else f"no local stack was running in {state}")
