"""The command line.

At module level the commands import only what is light, such as click, so that `--help` answers at
once. Each command imports what it needs when it runs. Data goes to stdout, all else to stderr.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys

import click

from headrace.errors import HeadraceError, Interrupted, UsageError
from headrace.services.base.redactor import redact_output
from headrace.services.operate.acls.command import acls
from headrace.services.operate.apply.command import apply
from headrace.services.operate.asyncapi.command import asyncapi
from headrace.services.operate.audit.command import audit
from headrace.services.operate.autoscale.command import autoscale
from headrace.services.operate.cancel.command import cancel
from headrace.services.operate.chat.command import chat
from headrace.services.operate.check.command import check
from headrace.services.operate.compare.command import compare
from headrace.services.operate.cost.command import cost
from headrace.services.operate.dashboard.command import dashboard
from headrace.services.operate.dead_letters.command import dead_letters
from headrace.services.operate.doctor.command import doctor
from headrace.services.operate.end.command import end
from headrace.services.operate.evaluate.command import evaluate
from headrace.services.operate.export.command import export
from headrace.services.operate.keys.command import keys
from headrace.services.operate.new.command import new
from headrace.services.operate.options import echo
from headrace.services.operate.plan.command import plan
from headrace.services.operate.plot.command import plot
from headrace.services.operate.prune.command import prune
from headrace.services.operate.quota.command import quota
from headrace.services.operate.recipe.command import recipe
from headrace.services.operate.replay.command import replay
from headrace.services.operate.run.command import run
from headrace.services.operate.serve.command import serve
from headrace.services.operate.sft.command import sft
from headrace.services.operate.show.command import show
from headrace.services.operate.status.command import status
from headrace.services.operate.submit.command import submit
from headrace.services.operate.tail.command import tail
from headrace.services.operate.topics.command import topics
from headrace.services.operate.track.command import track
from headrace.services.operate.trajectories.command import trajectories
from headrace.services.operate.try_episode.command import try_episode
from headrace.services.operate.up_down.command import down, up
from headrace.services.operate.verify.command import verify

HELP = """The event backbone for reinforcement learning of LLM agents, on Apache Kafka.

\b
  headrace run                        train a first policy on this machine
  headrace new my-folder              make a folder with an environment of your own
  headrace run my-recipe.toml         run your own recipe
  headrace status                     show the status of a run
  headrace dashboard                  show a run in a browser
  headrace doctor                     find out what is wrong, and what the run waits for
  headrace verify                     check that nothing was lost or doubled
  headrace tail results               follow a topic
  headrace show 42                    show everything about task 42
  headrace replay batches             train again from the log and compare the weights

A recipe describes a run; `headrace recipe` lists the shipped ones. Options or environment
variables (HEADRACE_BOOTSTRAP_SERVERS, …) name the Kafka cluster. Without them Headrace uses a real
Kafka and a real schema registry on this machine, with their data in the folder .headrace.
"""
EXIT_CODES = """Exit codes: 0 success; 1 failure; 2 wrong option or recipe; 3 a --check does not
hold, or a plan does not fit; 4 records that are needed are gone from the log; 75 Kafka, the schema
registry or the blob store can't be reached, or another process has replaced this one: start it
again; 130 Ctrl-C."""


@click.group(
    help=HELP, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="headrace", prog_name="headrace")
@click.option(
    "--debug", is_flag=True, envvar="HEADRACE_DEBUG", show_envvar=True,
    help="Print tracebacks and more logs.",
)  # fmt: skip
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Sets up logging for every command."""
    context.obj = debug
    redact_output()
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(message)s")


COMMANDS = (
    new, run, check, plan, try_episode, end, serve, up, down, apply, submit, cancel, quota,
    autoscale, sft, evaluate, export, chat, replay, compare,
    plot, track, trajectories,
    status, dashboard, doctor, verify, cost, show, tail, topics, asyncapi, dead_letters,
    audit, prune, recipe, keys, acls,
)  # fmt: skip
for command in COMMANDS:
    cli.add_command(command)


def _add_exit_codes(command: click.Command) -> None:
    command.epilog = EXIT_CODES
    if isinstance(command, click.Group):
        for child in command.commands.values():
            _add_exit_codes(child)


_add_exit_codes(cli)


@cli.command(hidden=True)
@click.argument("channel", type=int)
@click.argument("recipe")
@click.argument("room")
def preload(channel: int, recipe: str, room: str) -> None:
    """Fork processes for `headrace run`. In a forked process: run its command."""
    from headrace.services.operate.run.preload import fork_processes, run_and_exit

    run_and_exit(main if fork_processes(channel, recipe) else lambda: None)


def main() -> None:
    """Runs the command of `sys.argv` and exits."""
    # A shell makes its background jobs ignore SIGINT. If a user sends it nevertheless, for example
    # by `kill -INT`, it must end the command as Ctrl-C does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    return run_command(cli, "headrace", arguments)


def run_command(group: click.Group, name: str, arguments: list[str]) -> int:
    """Runs a command and returns its exit code. Prints one message to stderr if it fails."""
    debug = "--debug" in arguments or bool(os.environ.get("HEADRACE_DEBUG"))
    try:
        result = group.main(arguments, prog_name=name, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except BrokenPipeError:
        # The reader of stdout has seen enough, as in `headrace tail results | head`.
        _drop_stdout()
        return 0
    except Interrupted as interrupted:  # The user wanted it, so it is not an error.
        echo(str(interrupted), err=True)
        return interrupted.exit_code
    except HeadraceError as error:
        if debug:
            raise
        echo(f"error: {error}", err=True)
        return error.exit_code
    except OSError as error:
        failure = None if debug else _failure(error)
        if failure is None:
            raise
        echo(f"error: {failure}", err=True)
        return failure.exit_code


def _failure(error: OSError) -> HeadraceError | None:
    """Returns what the file system refuses this user. None for an error that may be a bug."""
    from headrace.services.base.files import DENIED, FULL, describe_failure

    if error.errno in FULL and error.filename is None:  # a file that was open already
        _drop_stdout()
        return describe_failure(f"can't write the output or a file: {error.strerror}", error)
    if error.filename is None:
        return None
    what = f"can't use {error.filename}: {error.strerror}"
    if error.errno in (errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG):
        return UsageError(f"{what}. Name another path")
    return describe_failure(what, error) if error.errno in (*DENIED, *FULL) else None


def _drop_stdout() -> None:
    """Drops what is left in the buffer of stdout, which can't be written at the exit either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
