"""`headrace plan`: says how much memory a recipe needs on each GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import (
    echo,
    json_option,
    print_json,
    print_table,
    set_option,
)

if TYPE_CHECKING:
    from headrace.services.operate.plan.memory_plan import MemoryPlan


@click.command()
@click.argument("recipe", default="quickstart")
@click.option(
    "--gpus", metavar="COUNTxGIB", required=True,
    help="The GPUs and the GiB of each, for example 8x80. Each has an engine or its share of one, "
    "and as many as training.processes says have a rank of the trainer.",
)  # fmt: skip
@click.option("--engines-apart", is_flag=True, help="The engines have other GPUs of this size.")
@click.option(
    "--ram", metavar="GIB", type=click.FloatRange(min=0, min_open=True),
    help="GiB of the host's memory for each rank of the trainer.",
)  # fmt: skip
@set_option
@json_option
def plan(
    recipe: str,
    gpus: str,
    engines_apart: bool,
    ram: float | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Say how much memory a RECIPE needs on each GPU, part by part, and whether that fits.

    It reads the configuration of each model, and no weights. If the parts do not fit, it lists what
    to change, the cheapest first: fewer tokens of a micro-batch, activation checkpointing, more
    processes of the trainer, the optimizer in the host's memory if that is enough, an adapter. Each
    line includes the changes before it. The exit code is 3 if it does not fit.

    \b
    Examples:
      headrace plan qwen3-0-6b-vllm --gpus 1x24
      headrace plan my.toml --gpus 8x80 --ram 128 --json
    """
    from headrace.services.models.weights import model_folder
    from headrace.services.namespace.cluster_config import read_recipe
    from headrace.services.operate.plan.memory_plan import Gpus, MemoryPlan
    from headrace.services.operate.plan.model_shape import read_shape

    resolved, machine = read_recipe(recipe, settings), Gpus.parse(gpus, engines_apart)
    shapes = {
        name: (one, read_shape(model_folder(one.model))) for name, one in resolved.policies.items()
    }
    made = MemoryPlan(shapes, machine, ram)
    changes = [] if made.fits and made.ram_fits else made.changes()
    if as_json:
        print_json({**_facts(made), "ram_fits": made.ram_fits, "changes": [
            {"change": text, **_facts(then)} for text, then in changes
        ]})  # fmt: skip
    else:
        _print(made, changes)
    if not (made.fits and made.ram_fits):
        raise click.exceptions.Exit(3)


def _facts(made: MemoryPlan) -> dict[str, Any]:
    return {
        "gpus": made.gpus.count,
        "gpu_bytes": made.gpu_total,
        "trainer_parts": made.trainer_parts(),
        "engine_parts": made.engine_parts(),
        "gpu_fits": made.fits,
        "kv_cache_tokens": made.cached_tokens(),
        "ram_bytes": made.ram_total,
        "ram_bytes_all_ranks": made.ram_of_machine,
        "ram_parts": made.ram_parts(),
    }


def _print(made: MemoryPlan, changes: list[tuple[str, MemoryPlan]]) -> None:
    from headrace.services.operate.plan.memory_parts import RESERVE

    gpus = made.gpus
    on = f"on each of {gpus.count} GPUs"
    for head, parts in (
        (on, made.trainer_parts()),
        ("on each GPU of an engine" if gpus.engines_apart else on, made.engine_parts()),
        ("of CUDA on each GPU, as an estimate", {"contexts and gaps": RESERVE}),
    ):
        if made.gpu_total and parts:
            print_table((head, "GiB"), [[part, _gib(size)] for part, size in parts.items()])
    verdict = "fits" if made.fits else "does not fit"
    echo(f"{_gib(made.gpu_total)} of {gpus.gib:g} GiB: {verdict}")
    for name, tokens in made.batch_tokens().items():
        echo(f"the largest micro-batch of {name} has {tokens} tokens; a longer sequence needs more")
    for name, tokens in made.cached_tokens().items():
        echo(f"the KV cache of {name} holds {tokens} tokens")
    rows = [[part, _gib(size)] for part, size in made.ram_parts().items()]
    print_table(("in the host's memory, for each rank", "GiB"), rows)
    of = "" if made.ram is None else f" of {made.ram:g}"
    echo(f"{_gib(made.ram_total)}{of} GiB")
    if made.ram_of_machine > made.ram_total:
        echo(f"{_gib(made.ram_of_machine)} GiB of the host's memory for all ranks on one machine")
    for text, then in changes:
        sizes = f"{_gib(then.gpu_total)} GiB, and {_gib(then.ram_total)} GiB of the host's memory"
        echo(f"change {text}: {sizes}{', fits' if then.fits and then.ram_fits else ''}")
    if changes and not (changes[-1][1].fits and changes[-1][1].ram_fits):
        more = "choose GPUs or a host with more memory, or a smaller model"
        echo(f"none of these changes is enough: {more}")


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f}"
