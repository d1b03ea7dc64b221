"""`python -m headrace.conformance environment`: checks an environment."""

from __future__ import annotations

import click

from headrace.services.operate.conformance.command_options import (
    blocked_option,
    conformance_options,
    payload_option,
)
from headrace.services.operate.options import say


@click.command()
@conformance_options
@payload_option
@click.option(
    "--action", "actions", metavar="TEXT", multiple=True,
    help="What the agent does in a step. Repeatable: after the last one it begins again. "
    "[default: 0, 1, a]",
)  # fmt: skip
@click.option(
    "--steps", type=click.IntRange(min=1), default=20, show_default=True,
    help="Most steps of an episode.",
)  # fmt: skip
@click.option(
    "--call", "call_s", metavar="SECONDS", type=click.FloatRange(min=0, min_open=True),
    default=10.0, show_default=True, help="Most seconds of a reset, a step or a score.",
)  # fmt: skip
@blocked_option
@click.option(
    "--persistent", is_flag=True,
    help="Instances are reset again, as with tasks.mode = persistent: check it.",
)  # fmt: skip
@click.option(
    "--score", metavar="JSON", help="What a judge shall score, as agents send it. Without it, "
    "score() is not checked.",
)  # fmt: skip
def environment(
    use: str,
    options: tuple[str, ...],
    rules: tuple[str, ...],
    as_json: bool,
    payload: str,
    actions: tuple[str, ...],
    steps: int,
    call_s: float,
    blocked_s: float,
    persistent: bool,
    score: str | None,
) -> None:
    """Check an environment: `gymnasium`, or your own as package.module:Class.

    It plays a dozen episodes of one task. Give actions that end an episode, so that all rules can
    be tried.

    \b
    Examples:
      python -m headrace.conformance environment guess:Guess --option highest=3 \\
          --action 1 --action 2 --action 3
      python -m headrace.conformance environment mine:World --payload '{"level": 1}' --json
    """
    from headrace.services.operate.conformance.command_options import (
        finish,
        json_object,
        plug_in_options,
    )
    from headrace.services.operate.conformance.environment.check_environment import (
        ACTIONS,
        check_environment,
    )

    report = check_environment(
        use,
        plug_in_options(options),
        payload=json_object("--payload", payload),
        actions=actions or ACTIONS,
        steps=steps,
        call_s=call_s,
        blocked_s=blocked_s,
        persistent=persistent,
        score=None if score is None else json_object("--score", score),
        rules=rules,
        say=say,
    )
    finish(report, as_json)
