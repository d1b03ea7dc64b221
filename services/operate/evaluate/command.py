"""`headrace evaluate`: measures a policy's version, or a folder of weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    echo,
    json_option,
    print_json,
    quiet_option,
    set_option,
)


@click.command()
@click.argument("recipe")
@set_option
@click.option(
    "--version", type=click.IntRange(min=0), help="Version of the run. [default: the newest]"
)
@click.option(
    "--weights", metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Evaluate this model folder instead: configuration, tokenizer and safetensors.",
)  # fmt: skip
@quiet_option
@json_option
@cluster_options
def evaluate(
    recipe: str,
    settings: tuple[str, ...],
    version: int | None,
    weights: Path | None,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure avg@k and pass@k of a policy.

    The tasks are those of RECIPE's `evaluation` table. avg@k is the mean reward of k samples per
    task. pass@k is the chance that at least one of k samples passes. Both have 95 % intervals. The
    weights come from a run, which may be paused or have ended. The evaluation itself uses a
    temporary local stack and leaves nothing behind. That stack is secure if the state folder's
    own one is. With --version, a policy that the run does not
    train keeps its only version. Exits with code 1 if no sample counts.

    \b
    Examples:
      headrace evaluate quickstart
      headrace evaluate quickstart --version 20 --set 'evaluation={"items": 32, "samples": 16}'
      headrace evaluate my.toml --weights exported/ --json
    """
    import asyncio

    from headrace.errors import HeadraceError
    from headrace.services.namespace.cluster_config import read_recipe
    from headrace.services.operate.evaluate.evaluate import evaluate as run_evaluation

    if version is not None and weights is not None:
        raise click.UsageError("--version and --weights exclude each other: give only one")
    cluster, resolved = cluster_of(options), read_recipe(recipe, settings)
    measured = asyncio.run(run_evaluation(resolved, cluster, version, weights, quiet=quiet))
    # Only policies that play a role are measured, and all of them at version 0.
    results = {name: measured.of(name)[0] for name in dict.fromkeys(resolved.tasks.roles.values())}
    if as_json:
        print_json({name: result.to_tree() for name, result in results.items()})
    else:
        for name, result in results.items():
            echo(f"policy {name}: {result}")
            for k in result.powers():
                click.echo(f"  pass@{k:<4} {result.passes(k) or '-'}")
    if not any(result.rewards for result in results.values()):
        raise HeadraceError(
            "nothing was measured, because no sample counts: all failed, or had no reward. "
            f"`headrace try {recipe}` plays one and says why"
        )
