"""`headrace keys`: makes key pairs for trainers, tenants and operators, and shows public keys."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.services.operate.options import echo, say


@click.group()
def keys() -> None:
    """Make a key pair for a trainer, a tenant or an operator, or show its public key.

    \b
    Examples:
      headrace keys new ~/.config/headrace/exp-7.pem
      headrace keys show ~/.config/headrace/exp-7.pem
    """


@keys.command("new")
@click.argument("file", type=click.Path(path_type=Path))
def new_key(file: Path) -> None:
    """Write a new private key to FILE, and print its public key.

    Only you can read FILE. Add the printed line to the recipe, and set a variable to the path of
    FILE. A trainer signs versions: `policies.NAME.signers` and HEADRACE_SIGNING_KEY. A tenant or an
    operator signs tasks, cancellations and limits: `scheduler.tenants.NAME.keys` or
    `scheduler.operators`, and HEADRACE_REQUEST_KEY. Use a new key for each run.
    """
    from headrace.services.log.request_signatures import REQUEST_KEY
    from headrace.services.log.signatures import KEY_VARIABLE, public_text, write_private_key

    text = public_text(write_private_key(file))
    say(
        f"a trainer needs {KEY_VARIABLE}={file.absolute()}, a tenant or an operator "
        f"{REQUEST_KEY}={file.absolute()}, and the recipe this public key:"
    )
    echo(text)


@keys.command("show")
@click.argument("file", type=click.Path(path_type=Path))
def show_key(file: Path) -> None:
    """Print the public key of the private key in FILE."""
    from headrace.services.log.signatures import public_text, read_private_key

    echo(public_text(read_private_key(file)))
