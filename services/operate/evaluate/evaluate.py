"""Evaluates weights on a task set, on a temporary local stack."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from pathlib import Path

from headrace.errors import Interrupted, UsageError
from headrace.infra import local
from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Evaluation, Recipe
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.operate.evaluation import Evaluations
from headrace.services.operate.find_versions import find_versions, pick
from headrace.services.operate.options import say_unless
from headrace.services.operate.run.run import LocalRun
from headrace.services.operate.run_versions import RunVersion, VersionWriter


def evaluation_recipe(recipe: Recipe, models: Mapping[str, str]) -> Recipe:
    """Returns the recipe of a run that only evaluates.

    `models` gives each policy's model folder. No policy is trained. Nobody else can submit to it or
    publish in it, so it names no keys: the private ones may be elsewhere.
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
    # They choose items and versions while a policy learns.
    tasks |= {"curators": [], "curated_by": None, "league": None}
    if settings.seed is not None:
        tasks["seed"] = settings.seed
    for name, policy in tree["policies"].items():
        policy |= {"training": None, "signers": [], "model": models.get(name, policy["model"])}
        if settings.temperature is not None:
            policy["sampling"]["temperature"] = settings.temperature
    tree["scheduler"] |= {"operators": [], "require_keys": False}
    for tenant in tree["scheduler"]["tenants"].values():
        tenant["keys"] = []
    tree |= {"stop": {}, "warm_start": None, "barrier": None}
    tree["evaluation"] = settings.model_dump(mode="json")
    return parse_recipe(tree, "the recipe's evaluation")


async def evaluate(
    recipe: Recipe,
    cluster: ClusterConfig,
    version: int | None,
    weights: Path | None,
    *,
    quiet: bool,
) -> Evaluations:
    """Evaluates a version of a run, or the model folder `weights`.

    Raises UsageError if there is no such run or version, and BlobError if its weights are gone.
    """
    if weights is None:
        say = say_unless(quiet)
        found = await find_versions(cluster, version, say, whole_run=True)
        versions = {name: pick(found, name, version) for name in found}
        return await evaluate_versions(recipe, cluster, versions, quiet=quiet)
    if len(recipe.policies) > 1:
        raise UsageError(
            f"--weights is the model of one policy, but {recipe.name} has "
            f"{len(recipe.policies)}: leave it out, or use a recipe with one policy"
        )
    models = dict.fromkeys(recipe.policies, str(weights.absolute()))
    return await _evaluate_models(recipe, models, cluster, quiet=quiet)


async def evaluate_versions(
    recipe: Recipe, cluster: ClusterConfig, versions: Mapping[str, RunVersion], *, quiet: bool
) -> Evaluations:
    """Evaluates one version of each policy, with the weights of the cluster's blob store.

    Raises BlobError if weights are gone.
    """
    blobs = cluster.open_blobs(None)
    with tempfile.TemporaryDirectory(prefix="headrace-evaluate-") as name:
        folder, models = Path(name), {}
        for policy, version in versions.items():
            made = folder / policy
            made.mkdir()
            writer = VersionWriter(version, blobs, folder / f"scratch.{policy}")
            await asyncio.to_thread(writer.write, made, "trainer")
            models[policy] = str(made)
        return await _evaluate_models(recipe, models, cluster, quiet=quiet)


async def _evaluate_models(
    recipe: Recipe, models: Mapping[str, str], cluster: ClusterConfig, *, quiet: bool
) -> Evaluations:
    """Runs the evaluation and deletes everything that it wrote, also if it fails.

    If the local stack of the cluster's state folder is secure, the temporary one is secure, too.
    """
    roles = local.secure_roles(cluster.state)
    derived = evaluation_recipe(recipe, models)
    with tempfile.TemporaryDirectory(prefix="headrace-evaluate-") as name:
        temporary = ClusterConfig(state=Path(name), namespace=recipe.name)
        run = LocalRun(
            *(derived, temporary),
            quiet=quiet,
            on_interrupt="stopping the evaluation",
            roles=roles,
        )
        await run.execute()
        if run.interrupted.is_set():
            raise Interrupted("interrupted before the evaluation was complete")
        return run.progress.evaluations
