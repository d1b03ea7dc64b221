"""Evaluates weights on a task set, on a temporary local stack."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path

from headrace.errors import Interrupted, UsageError
from headrace.schemas.events import PolicyPublished
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Evaluation, Recipe
from headrace.schemas.topics import POLICIES
from headrace.services.inference.local_weights import LocalWeights
from headrace.services.log.event_log import EventLog
from headrace.services.log.log_reader import WHOLE, read_events
from headrace.services.models.weights import ADAPTER, model_folder
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.lookup import open_namespace
from headrace.services.operate.evaluation import Evaluations
from headrace.services.operate.run.run import LocalRun

MODEL_FILES = "*.json", "*.jinja"
"""Files of a model's folder besides its weights."""


def evaluation_recipe(recipe: Recipe, models: Mapping[str, str]) -> Recipe:
    """Returns the recipe of a run that only evaluates.

    `models` gives each policy's model folder. No policy is trained.
    """
    settings = recipe.evaluation or Evaluation()
    tree = recipe.model_dump(mode="json")
    tasks = tree["tasks"]
    use, options = settings.use, settings.options
    if use is None:
        use, options = tasks["use"], {**tasks["options"], **options}
    tasks["use"] = "first"
    tasks["options"] = {"items": settings.items, "use": use, "options": options}
    tasks |= {"epochs": 1, "purpose": "evaluate", "samples": settings.samples, "minimum": 1}
    if settings.seed is not None:
        tasks["seed"] = settings.seed
    for name, policy in tree["policies"].items():
        policy |= {"training": None, "model": models.get(name, policy["model"])}
        if settings.temperature is not None:
            policy["sampling"]["temperature"] = settings.temperature
    tree |= {"stop": {}, "warm_start": None, "evaluation": settings.model_dump(mode="json")}
    return parse_recipe(tree, "the recipe's evaluation")


async def fetch_models(cluster: ClusterConfig, version: int | None, folder: Path) -> dict[str, str]:
    """Writes each policy of a run, at a version or its newest, as a model folder under `folder`.

    Returns each policy's model folder. Raises UsageError if there is no such run or version, and
    BlobError if its weights are gone.
    """
    async with open_namespace(cluster, "evaluate") as (log, life):
        recipe = life.recipe()
        found = await _publications(log, version)
    if missing := sorted(recipe.policies.keys() - found.keys()):
        which = "no version" if version is None else f"no version {version}"
        raise UsageError(
            f"policy {missing[0]!r} of namespace {log.topics.namespace} has published {which}: "
            "`headrace status` shows its newest version"
        )
    blobs = cluster.open_blobs(None)
    models = {}
    for name, published in found.items():
        made = folder / f"{name}-{published.version}"
        made.mkdir(parents=True)
        for pattern in MODEL_FILES:
            for file in model_folder(recipe.policies[name].model).glob(pattern):
                shutil.copy(file, made)
        local = LocalWeights(blobs, folder / "deltas" / name)
        weights = await asyncio.to_thread(local.weights, published)
        if weights.adapter is None:
            shutil.copyfile(weights.path, made / "model.safetensors")
        else:
            shutil.copyfile(weights.adapter.base, made / "model.safetensors")
            shutil.copyfile(weights.path, made / ADAPTER)
        models[name] = str(made)
    return models


async def _publications(log: EventLog, version: int | None) -> dict[str, PolicyPublished]:
    """Returns each policy's publication of a version, or its newest publication."""
    found: dict[str, PolicyPublished] = {}
    policies = log.topics.partition(POLICIES)
    async with aclosing(read_events(log, {policies: WHOLE})) as deliveries:
        async for delivery in deliveries:
            event = delivery.event
            if isinstance(event, PolicyPublished) and version in (None, event.version):
                found[event.policy] = event
    return found


async def evaluate(
    recipe: Recipe,
    cluster: ClusterConfig,
    version: int | None,
    weights: Path | None,
    *,
    quiet: bool,
) -> Evaluations:
    """Runs the evaluation and deletes everything that it wrote, also if it fails."""
    with tempfile.TemporaryDirectory(prefix="headrace-evaluate-") as name:
        folder = Path(name)
        if weights is None:
            models = await fetch_models(cluster, version, folder / "models")
        elif len(recipe.policies) > 1:
            raise UsageError(
                f"--weights is the model of one policy, but {recipe.name} has "
                f"{len(recipe.policies)}: leave it out, or use a recipe with one policy"
            )
        else:
            models = dict.fromkeys(recipe.policies, str(weights.absolute()))
        derived = evaluation_recipe(recipe, models)
        temporary = ClusterConfig(state=folder / "state", namespace=recipe.name)
        run = LocalRun(derived, temporary, quiet=quiet, on_interrupt="stopping the evaluation")
        await run.execute()
        if run.interrupted.is_set():
            raise Interrupted("interrupted before the evaluation was complete")
        return run.progress.evaluations
