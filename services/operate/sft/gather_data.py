"""Gathers the data of a fine-tuning from files and from a namespace."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.schemas.recipe.policy import Policy
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.log.unpacked import Texts
from headrace.services.models.tokens import tokenizer_digest
from headrace.services.models.weights import model_folder
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.run.run_stack import running_stack
from headrace.services.operate.sft.sft_examples import Examples, add_recorded, add_rows
from headrace.services.operate.sft.sft_job import pick_policy
from headrace.services.operate.sft.sft_tokens import RowTokens, learned_sampling
from headrace.services.operate.trajectories.export_sft import Selection
from headrace.services.operate.trajectories.recorded_episodes import EpisodeReader
from headrace.services.operate.trajectories.sft import tool_format
from headrace.trainer.publish import context_length

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class WantedData:
    """What the command's options say of the data."""

    recipe: Recipe
    policy: str | None
    files: tuple[Path, ...]
    recorded: bool
    passing: float | None
    agent: str | None
    """Only recorded episodes of this agent. None: of all."""
    skip_bad: bool


@dataclass(frozen=True, slots=True)
class GatheredData:
    """The data, and the policy that learns it."""

    name: str
    policy: Policy
    examples: Examples
    facts: dict[str, Any]
    """Where the data comes from, for people."""


async def gather(wanted: WantedData, cluster: ClusterConfig, say: Say) -> GatheredData:
    """Reads all data. Raises UsageError if there is none, or if a row is bad and not skipped."""
    name, policy = pick_policy(wanted.recipe, wanted.policy)
    folder = model_folder(policy.model)
    examples = Examples()
    facts: dict[str, Any] = {"files": [str(one) for one in wanted.files]}
    if wanted.files:
        tokens = RowTokens(folder, policy, _context(folder, policy))
        agent = wanted.recipe.agents.get(wanted.recipe.tasks.agent)
        form = tool_format({} if agent is None else agent.options)
        await add_rows(examples, wanted.files, tokens, form, say)
    if wanted.recorded:
        facts |= await _add_namespace(examples, wanted, cluster, name, policy, say)
    examples.check(wanted.skip_bad)
    for line in examples.remarks():
        say(line)
    facts |= {"sequences": len(examples.sequences), "bad_rows": len(examples.bad)}
    return GatheredData(name, policy, examples, facts)


async def _add_namespace(
    examples: Examples,
    wanted: WantedData,
    cluster: ClusterConfig,
    name: str,
    policy: Policy,
    say: Say,
) -> dict[str, Any]:
    digest = tokenizer_digest(model_folder(policy.model))
    async with (
        running_stack(cluster, say) as (_, located),
        open_namespace(located, "sft") as (log, life),
    ):
        recipe = life.recipe()
        selection = Selection(recipe, wanted.passing, wanted.agent)
        reader = EpisodeReader(log, Texts(recipe), with_answers=False)
        sampling = learned_sampling(policy)
        await add_recorded(examples, selection, reader, name, sampling, digest)
        return {"namespace": log.topics.namespace, "passing": selection.passing}


def _context(folder: Path, policy: Policy) -> int:
    """Returns the most tokens that the engine and the model read; 0 if neither has a limit."""
    of_model = context_length(json.loads((folder / "config.json").read_text()))
    limits = (int(policy.engine.options.get("context") or 0), of_model)
    return min((one for one in limits if one), default=0)
