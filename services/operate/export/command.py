"""`headrace export`: writes a version as a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
    version_option,
)


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@policy_option
@version_option
@click.option("--merge", is_flag=True, help="Add a LoRA adapter to its base: write a whole model.")
@click.option("--force", is_flag=True, help="Replace DIR if it is a model folder.")
@click.option(
    "--push", metavar="OWNER/NAME",
    help="Upload the folder to this repository of the Hugging Face Hub. Needs HF_TOKEN. A new "
    "repository is private.",
)  # fmt: skip
@quiet_option
@json_option
@cluster_options
def export(
    folder: Path,
    policy: str | None,
    version: int | None,
    merge: bool,
    force: bool,
    push: str | None,
    quiet: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Write a version as the model folder DIR, which transformers and vLLM load.

    DIR gets safetensors, the configuration, the tokenizer with its chat template, and
    `headrace.json`, which says where the weights come from. The weights are verified before DIR
    appears. A LoRA adapter becomes a PEFT folder, or with --merge a whole model. If the run is
    paused or has ended, the command starts the local stack and stops it again.

    \b
    Examples:
      headrace export my-model
      headrace export my-model --namespace exp-7 --policy solver --version 120 --merge
      headrace export my-model --merge --push my-team/my-model
    """
    import asyncio
    import signal

    from headrace.errors import UsageError
    from headrace.services.models.hub import push_folder
    from headrace.services.models.weights import hub_model
    from headrace.services.operate.export.model_export import check_target, export_version
    from headrace.services.operate.find_versions import find_versions, pick

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # It also leaves nothing behind.
    cluster, say = cluster_of(options), say_unless(quiet)
    folder = folder.expanduser().absolute()
    check_target(folder, force)
    chosen = pick(asyncio.run(find_versions(cluster, version, say)), policy, version)
    published = chosen.published
    adapter = published.adapter is not None and not merge
    if push is not None and adapter and hub_model(published.base) is None:
        raise UsageError(
            f"{chosen} is an adapter of {published.base}, which is not a model of the Hub: push it "
            "with --merge"
        )
    facts = export_version(
        chosen,
        cluster.open_blobs(None),
        folder,
        layout="merged" if merge else "peft",
        force=force,
        say=say,
    )
    if push is not None:
        say(f"uploading {folder} to {push}")
        facts["pushed"] = push_folder(folder, push, f"Export {chosen}")
    if as_json:
        print_json(facts)
    else:
        echo(f"{folder}: {chosen}")
