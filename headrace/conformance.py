"""`python -m headrace.conformance`: tries what other teams write against the contracts."""

from __future__ import annotations

import sys

import click

from headrace.errors import HeadraceError
from headrace.services.operate.conformance.trainer.command import trainer


@click.group()
def conformance() -> None:
    """Try what you wrote against the contract of its kind."""


conformance.add_command(trainer)

if __name__ == "__main__":
    try:
        conformance(prog_name="python -m headrace.conformance")
    except HeadraceError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
