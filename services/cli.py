"""The command line. Imports only click and the standard library: `--help` answers at once.

Each command imports what it needs as it runs. Data goes to stdout, everything else to stderr.
Exit codes: 0 done or drained, 1 failed, 2 usage or recipe, 3 a `--check` violated, 4 records that
are needed are gone, 75 a dependency out of reach or fenced (start me again), 130 Ctrl-C.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import TYPE_CHECKING

import click

from services.commands.dead_letters import dead_letters
from services.commands.evaluate import evaluate
from services.commands.inspect import recipe, status, tail, topics
from services.commands.operate import apply, cancel, down, submit, up
from services.commands.prune import prune
from services.commands.replay import replay
from services.commands.run import run, serve
from services.commands.show import show

if TYPE_CHECKING:
    from services.errors import HeadraceError

HELP = """The event backbone for reinforcement learning of LLM agents, on Apache Kafka.

\b
  headrace run                        learn a first policy, on this machine, from nothing
  headrace run my-recipe.toml         run a recipe of your own
  headrace status                     where a run stands
  headrace tail results               watch a topic
  headrace show 42                    the whole story of task 42
  headrace replay batches             train again from the log: the same weights, bit by bit

A recipe says *what* a run is: `headrace recipe` lists those that ship. *Where* it runs is said by
options or by the environment (HEADRACE_BOOTSTRAP_SERVERS, …); with neither, a real Kafka and a
schema registry run on this machine, in the folder .headrace.

\b
Exit codes: 0 done · 1 failed · 2 usage or recipe · 3 a --check violated · 4 records lost
            75 a dependency out of reach, or fenced: start me again · 130 Ctrl-C
"""


@click.group(
    help=HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="headrace", prog_name="headrace")
@click.option("--debug", is_flag=True, envvar="HEADRACE_DEBUG", help="Tracebacks, and more logs.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    context.obj = debug
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(message)s")
    if not debug:
        # librdkafka reports what it mends by itself; what it can't mend is raised.
        logging.getLogger("services.kafka.librdkafka").setLevel(logging.CRITICAL)


COMMANDS = (
    run, serve, up, down, apply, submit, cancel, evaluate, replay,
    status, show, tail, topics, dead_letters, prune, recipe,
)  # fmt: skip
for command in COMMANDS:
    cli.add_command(command)


def main() -> None:
    """The entry point `headrace`."""
    # A shell has its background jobs ignore SIGINT. One that is sent to this command all the same,
    # as by `kill -INT`, ends it as Ctrl-C does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    """Runs a command. One clear message on stderr, and the exit code, where it fails."""
    debug = "--debug" in arguments or bool(os.environ.get("HEADRACE_DEBUG"))
    try:
        result = cli.main(arguments, prog_name="headrace", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except BrokenPipeError:
        # Whoever read stdout has seen enough, as in `headrace tail results | head`.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except _headrace_error() as error:
        if debug:
            raise
        click.echo(f"error: {error}", err=True)
        return error.exit_code


def _headrace_error() -> type[HeadraceError]:
    # Python evaluates this only once something was raised: until then nothing heavy is imported.
    from services.errors import HeadraceError

    return HeadraceError


if __name__ == "__main__":
    main()
