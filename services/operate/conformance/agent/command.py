"""`python -m headrace.conformance agent`: checks an agent."""

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
    "--observation", "observations", metavar="TEXT", multiple=True,
    help="What the environment shows. Repeatable: after the last one it begins again.",
)  # fmt: skip
@click.option(
    "--answer", "answers", metavar="TEXT", multiple=True,
    help="What a policy says. Repeatable in the same way. [default: a, b, c]",
)  # fmt: skip
@click.option(
    "--steps", type=click.IntRange(min=1), default=3, show_default=True,
    help="The step that ends the environment. Each step has the reward 1.",
)  # fmt: skip
@click.option(
    "--role", "roles", metavar="NAME", multiple=True,
    help="A role in which the agent asks a policy. Repeatable. [default: policy]",
)  # fmt: skip
@click.option(
    "--judge", "judges", metavar="NAME", multiple=True,
    help="A judge that the agent asks for scores. It always answers 1. Repeatable.",
)  # fmt: skip
@click.option(
    "--model", default="tiny-chat", show_default=True,
    help="Model of which the policies have the tokenizer and the chat template.",
)  # fmt: skip
@blocked_option
@click.option(
    "--connects", is_flag=True,
    help="The agent may connect to something, because no request depends on it.",
)  # fmt: skip
def agent(
    use: str,
    options: tuple[str, ...],
    rules: tuple[str, ...],
    as_json: bool,
    payload: str,
    observations: tuple[str, ...],
    answers: tuple[str, ...],
    steps: int,
    roles: tuple[str, ...],
    judges: tuple[str, ...],
    model: str,
    blocked_s: float,
    connects: bool,
) -> None:
    """Check an agent: `multi_turn`, or your own as package.module:function.

    It plays some dozen episodes. The environment, the judges and the policies follow a script, so
    no model is loaded.

    \b
    Examples:
      python -m headrace.conformance agent critic:solve --role policy --role critic --answer ok
      python -m headrace.conformance agent mine:Agent --option tries=3 --json
    """
    from headrace.services.operate.conformance.agent.check_agent import (
        ANSWERS,
        OBSERVATIONS,
        check_agent,
    )
    from headrace.services.operate.conformance.command_options import (
        finish,
        json_object,
        plug_in_options,
    )

    report = check_agent(
        use,
        plug_in_options(options),
        payload=json_object("--payload", payload),
        observations=observations or OBSERVATIONS,
        answers=answers or ANSWERS,
        steps=steps,
        roles=roles or ("policy",),
        judges=judges,
        model=model,
        blocked_s=blocked_s,
        connects=connects,
        rules=rules,
        say=say,
    )
    finish(report, as_json)
