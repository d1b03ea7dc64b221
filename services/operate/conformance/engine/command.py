"""`python -m headrace.conformance engine`: checks an engine."""

from __future__ import annotations

import click

from headrace.services.operate.conformance.command_options import conformance_options
from headrace.services.operate.options import say


@click.command()
@conformance_options
@click.option(
    "--model", default="tiny-llama", show_default=True,
    help="Model that the engine serves, as in the recipe. If its folder has no weights, they are "
    "random.",
)  # fmt: skip
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True,
    help="Type of the weights that the engine gets.",
)  # fmt: skip
@click.option("--device", default="auto", show_default=True, help="As in the recipe.")
@click.option(
    "--tolerance", type=click.FloatRange(min=0, min_open=True), metavar="NATS",
    help="Most nats by which the median logprob may differ from the trainer's. [default: 0.001, "
    "or 0.05 with bfloat16]",
)  # fmt: skip
@click.option(
    "--frozen", is_flag=True,
    help="The engine serves one version for ever: do not change its weights.",
)  # fmt: skip
@click.option(
    "--deterministic", is_flag=True,
    help="The engine promises that the same prompt and seed draw the same tokens: check it.",
)  # fmt: skip
def engine(
    use: str,
    options: tuple[str, ...],
    rules: tuple[str, ...],
    as_json: bool,
    model: str,
    dtype: str,
    device: str,
    tolerance: float | None,
    frozen: bool,
    deterministic: bool,
) -> None:
    """Check an engine: `torch`, `vllm`, `scripted`, or your own as package.module:Class.

    The engine gets two versions of a small model. Its logprobs are compared with those of the
    trainer's forward pass.

    \b
    Examples:
      python -m headrace.conformance engine torch
      python -m headrace.conformance engine my_engine:Fast --option context=4096 --json
    """
    from headrace.services.operate.conformance.command_options import finish, plug_in_options
    from headrace.services.operate.conformance.engine.check_engine import check_engine

    report = check_engine(
        use,
        plug_in_options(options),
        model=model,
        dtype=dtype,
        device=device,
        tolerance=tolerance,
        frozen=frozen,
        deterministic=deterministic,
        rules=rules,
        say=say,
    )
    finish(report, as_json)
