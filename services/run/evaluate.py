"""`headrace evaluate`: measures given weights on a task set, on a stack that is gone afterwards."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from schemas.events import PolicyPublished
from schemas.read_recipe import parse_recipe
from schemas.recipe import Evaluation, Recipe
from schemas.topics import POLICIES
from services.errors import Interrupted, UsageError
from services.evaluation import Evaluations
from services.inference.local_weights import LocalWeights
from services.kafka.broker import Partition
from services.namespaces import open_namespace
from services.reader import CaughtUp, EventReader
from services.run.run import Run, RunOptions
from services.run.view import Status, make_view
from services.settings import Where
from services.weights import ADAPTER, model_folder

MODEL_FILES = "*.json", "*.jinja"
"""What a model's folder holds beside its weights."""


def evaluation_recipe(recipe: Recipe, models: Mapping[str, str]) -> Recipe:
    """The recipe of a run that only evaluates: each policy is the model in a folder, as it is."""
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


async def fetch_models(where: Where, version: int | None, folder: Path) -> dict[str, str]:
    """Each trained policy of a run at a version, or its newest, as a model folder under `folder`.

    UsageError where there is no such run or version, BlobError where its weights are gone.
    """
    async with open_namespace(where, "evaluate") as (log, life):
        recipe = life.recipe()
        found: dict[str, PolicyPublished] = {}
        reader = EventReader(log, {Partition(log.topics.name(POLICIES), 0): "first"})
        try:
            async for item in reader:
                if isinstance(item, CaughtUp):
                    break
                event = item.event
                if isinstance(event, PolicyPublished) and version in (None, event.version):
                    found[event.policy] = event
        finally:
            await reader.aclose()
        if missing := sorted(recipe.policies.keys() - found.keys()):
            which = "a version" if version is None else f"version {version}"
            raise UsageError(f"{log.topics.namespace}: policy {missing[0]!r} has not {which}")
        blobs = where.open_blobs()
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


async def evaluate(
    recipe: Recipe, where: Where, version: int | None, weights: Path | None, *, quiet: bool
) -> Evaluations:
    """Runs the evaluation to its end. Nothing of it is left, however it ends."""
    with tempfile.TemporaryDirectory(prefix="headrace-evaluate-") as name:
        folder = Path(name)
        if weights is None:
            models = await fetch_models(where, version, folder / "models")
        elif len(recipe.policies) > 1:
            raise UsageError("--weights is of one policy, and the recipe has several")
        else:
            models = dict.fromkeys(recipe.policies, str(weights.absolute()))
        derived = evaluation_recipe(recipe, models)
        status = Status(recipe.name)
        view = make_view(status, Console(stderr=True), quiet=quiet)
        place = replace(Where(state=folder / "state"), namespace=recipe.name)
        run = Run(derived, place, RunOptions(), status, view)
        try:
            await run.execute()
        finally:
            view.close()
        if run.interrupted.is_set():
            raise Interrupted("interrupted before all was evaluated")
        assert status.progress is not None
        return status.progress.evaluations
