"""`headrace sft`: fine-tunes a recipe's policy on rows of files or on recorded episodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.services.operate.options import (
    cluster_of,
    cluster_options,
    echo,
    json_option,
    policy_option,
    print_json,
    quiet_option,
    say_unless,
    set_option,
    together,
)

if TYPE_CHECKING:
    from headrace.services.namespace.cluster_config import ClusterConfig
    from headrace.services.operate.sft.gather_data import WantedData
    from headrace.services.operate.sft.sft_job import SftSettings, SftTarget

_learning_options = together(
    click.option(
        "--epochs", metavar="N", type=click.IntRange(min=1), default=1, show_default=True,
        help="How often each row is learned.",
    ),
    click.option(
        "--batch-tokens", metavar="N", type=click.IntRange(min=1), default=16_384,
        show_default=True, help="The most tokens of one update. A longer row has its own.",
    ),
    click.option(
        "--learning-rate", metavar="RATE", type=click.FloatRange(min=0, min_open=True),
        help="The highest learning rate. [default: the recipe's demonstration_learning_rate, or "
        "its learning_rate]",
    ),
    click.option(
        "--schedule", type=click.Choice(["constant", "linear", "cosine"]), default="linear",
        show_default=True, help="How the learning rate goes to 0 after the warmup.",
    ),
    click.option(
        "--warmup", metavar="N", type=click.IntRange(min=0), default=0, show_default=True,
        help="Number of first updates in which the learning rate rises.",
    ),
    click.option(
        "--held-out", metavar="PART", type=click.FloatRange(0, 0.9), default=0.05,
        show_default=True, help="The part of the rows, or of the tasks, that is measured and never "
        "learned. 0 learns all.",
    ),
    click.option(
        "--seed", type=int, default=0, show_default=True,
        help="Of the order of the rows, and of what is held out.",
    ),
)  # fmt: skip

FEW_UPDATES = 20
"""AdamW changes a weight by about the learning rate in an update, so fewer change little."""


@click.command()
@click.argument("recipe")
@click.argument(
    "files", metavar="[FILE]...", nargs=-1,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)  # fmt: skip
@click.option(
    "--to", "folder", metavar="DIR", required=True, type=click.Path(path_type=Path),
    help="The model folder to write. Meanwhile DIR.checkpoints has checkpoints.",
)  # fmt: skip
@click.option(
    "--recorded", is_flag=True,
    help="Learn the recorded training episodes of --namespace, by their token ids.",
)  # fmt: skip
@click.option(
    "--passing", type=float, metavar="REWARD",
    help="With --recorded: learn episodes that have at least this reward. [default: the recorded "
    "recipe's evaluation.passing, or 1]",
)  # fmt: skip
@click.option(
    "--agent", metavar="NAME",
    help="With --recorded: learn only episodes of this agent, for example those that a teacher "
    "demonstrated. [default: of all]",
)  # fmt: skip
@policy_option
@_learning_options
@click.option("--skip-bad", is_flag=True, help="Leave out rows that can't be learned, and say so.")
@click.option("--restart", is_flag=True, help="Drop the checkpoints of DIR, and begin again.")
@click.option("--merge", is_flag=True, help="Add a LoRA adapter to its base: write a whole model.")
@click.option("--force", is_flag=True, help="Replace DIR if it is a model folder.")
@set_option
@quiet_option
@json_option
@cluster_options
def sft(
    recipe: str,
    files: tuple[Path, ...],
    folder: Path,
    recorded: bool,
    passing: float | None,
    agent: str | None,
    policy: str | None,
    skip_bad: bool,
    restart: bool,
    merge: bool,
    force: bool,
    settings: tuple[str, ...],
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    r"""Fine-tune RECIPE's policy on each FILE, or on recorded episodes, and write a model folder.

    A run then starts from the folder: `--set policies.default.model=DIR`. Model, sampling, LoRA,
    device and processes are the recipe's. Answers are learned by cross-entropy, as demonstrations
    are, with the token ids that the policy reads and draws in a run.

    A FILE has one JSON object in each line:

    \b
      {"messages": [{"role": "user", "content": "2+2"},
                    {"role": "assistant", "content": "4"}]}
      {"prompt": "2+2=", "completion": "4"}

    Each message of the assistant is learned, unless it has `"weight": 0`. `tools` and `tool_calls`
    are as in OpenAI's API. `prompt` and `completion` may be lists of messages: then only those of
    `completion` are learned. Texts are read without the chat template. Rows that can't be learned
    are listed by file and line, and nothing is learned until they are corrected or --skip-bad is
    given.

    Ctrl-C writes a checkpoint, and the same command continues. The same command gives the same
    weights: on a CPU, bit by bit.

    \b
    Examples:
      headrace sft my.toml chats.jsonl --to my-model --epochs 2
      headrace sft my.toml --recorded --namespace exp-7 --passing 0.9 --to my-model
      headrace run my.toml --set policies.default.model=my-model --set warm_start=false
    """
    from headrace.errors import UsageError
    from headrace.services.namespace.cluster_config import read_recipe
    from headrace.services.operate.sft.gather_data import WantedData
    from headrace.services.operate.sft.sft_job import SftSettings, SftTarget

    names = ("epochs", "batch_tokens", "learning_rate", "schedule", "warmup", "held_out", "seed")
    learning = SftSettings(**{name: options.pop(name) for name in names})
    cluster = cluster_of(options)
    if not recorded and (passing is not None or agent is not None):
        raise UsageError(
            "--passing and --agent are only for --recorded: rows of files have neither a reward "
            "nor an agent"
        )
    if not files and not recorded:
        raise UsageError("there is nothing to learn: name a FILE, or give --recorded")
    target = SftTarget(folder.expanduser().absolute(), merge, force)
    wanted = WantedData(
        *(read_recipe(recipe, settings), policy, files, recorded, passing, agent, skip_bad)
    )
    done = _run(wanted, cluster, learning, target, restart, quiet)
    if as_json:
        print_json(done)
        return
    echo(f"{target.folder}: {_summary(done['fine_tuning'])}")
    say_unless(quiet)(
        f"a run starts from it with --set policies.{done['policy']}.model={target.folder}"
    )


def _run(
    wanted: WantedData,
    cluster: ClusterConfig,
    learning: SftSettings,
    target: SftTarget,
    restart: bool,
    quiet: bool,
) -> dict[str, Any]:
    """Gathers the data, learns it and writes the folder. Returns what its `headrace.json` says."""
    import asyncio

    from rich.console import Console

    from headrace.services.operate.export.model_export import check_target
    from headrace.services.operate.sft.gather_data import gather
    from headrace.services.operate.sft.run_sft import run_sft
    from headrace.services.operate.sft.sft_checkpoints import (
        check_checkpoints,
        drop_checkpoints,
        sole_writer,
    )
    from headrace.services.operate.sft.sft_job import make_job
    from headrace.services.operate.sft.sft_view import SftStatus, SftView

    check_target(target.folder, target.force)
    say = say_unless(quiet)
    with sole_writer(target.folder, say):
        check_checkpoints(target.checkpoints)
        data = asyncio.run(gather(wanted, cluster, say))
        job = make_job(data.name, data.policy, data.examples.sequences, learning)
        if (updates := len(job.plan.updates)) < FEW_UPDATES:
            say(
                f"warning: the data makes only {updates} updates, which teach little. Lower "
                "--batch-tokens, or raise --epochs"
            )
        if restart:
            drop_checkpoints(target.checkpoints)
        status = SftStatus(target.folder.name)
        view = SftView(status, Console(stderr=True, quiet=quiet))
        facts = {**data.facts, "held_out": len(job.plan.held_out)}
        return asyncio.run(run_sft(job, target, facts, view, status))


def _summary(facts: dict[str, Any]) -> str:
    """Says in one line what was learned."""
    parts = [f"{facts['updates']} updates with {facts['sequences']} sequences"]
    if "cross_entropy" in facts:
        parts.append(f"cross-entropy {facts['cross_entropy']:.3f}")
    if held := list(facts.get("held_out_cross_entropy", {}).values()):
        parts.append(f"held out {held[0]:.3f}, then {held[-1]:.3f}")
    return ", ".join(parts)
