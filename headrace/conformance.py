"""`python -m headrace.conformance KIND NAME` checks that a plug-in keeps its contract."""

from __future__ import annotations

import signal
import sys

import click

from headrace.services.base.redactor import redact_output
from headrace.services.operate.cli import run_command
from headrace.services.operate.conformance.agent.command import agent
from headrace.services.operate.conformance.engine.command import engine
from headrace.services.operate.conformance.environment.command import environment
from headrace.services.operate.conformance.trainer.command import trainer

HELP = """Check that a plug-in of yours keeps its contract.

Each rule has a name. The command prints which rules hold, and for each other one what was expected,
what happened, and what to do. Only a trainer needs a Kafka, which the command starts.

Exit codes: 0 every rule that was checked holds; 1 a rule does not hold; 2 wrong options."""


@click.group(help=HELP, context_settings={"help_option_names": ["-h", "--help"]})
def conformance() -> None:
    """Removes secrets from all output."""
    redact_output()


KINDS = (engine, trainer, environment, agent)
for kind in KINDS:
    conformance.add_command(kind)


def main() -> None:
    """Runs the check of `sys.argv` and exits. SIGTERM ends it as Ctrl-C does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    sys.exit(run_command(conformance, "headrace.conformance", sys.argv[1:]))


if __name__ == "__main__":
    main()
