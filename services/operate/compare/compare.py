"""Reads the runs of a comparison from their logs, and evaluates them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.errors import UsageError
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import Topics
from headrace.services.namespace.cluster_config import ClusterConfig
from headrace.services.namespace.connect import Connection, connect
from headrace.services.namespace.lookup import find_namespace
from headrace.services.namespace.run_life import RunLife, differing_keys
from headrace.services.operate.compare.comparison import ComparedRun, Comparison
from headrace.services.operate.evaluate.evaluate import evaluate_versions
from headrace.services.operate.find_versions import Versions, find_versions, pick, read_versions
from headrace.services.operate.replay.recording import IGNORED, sole_policy
from headrace.services.operate.run.run_stack import running_stack
from headrace.services.operate.run_versions import RunVersion

NOT_COMPARED = (*IGNORED, "reads_from")
"""Sections of a recipe that are not listed as changes. A replay always has other `reads_from`."""

Found = tuple[Topics, RunLife]


async def compare(
    cluster: ClusterConfig,
    others: Sequence[str],
    policy: str | None,
    say: Callable[[str], None],
    *,
    evaluate: bool = False,
) -> Comparison:
    """Compares a policy in the run of `cluster.namespace` with the same policy in `others`.

    If `others` is empty, it takes the newest replay. If `cluster.namespace` is None, it takes the
    run that the first of `others` replays. Raises UsageError if there is no such run or policy, or
    if it is not clear which one is meant.
    """
    async with running_stack(cluster, say) as (_, located):
        async with connect(located, "compare") as connection:
            found = await _find_runs(connection, cluster.namespace, others)
            first = found[0][1].recipe()
            name = sole_policy(found[0][0].namespace, first, policy)
            runs = [await _read(connection, one, first, name) for one in found]
        comparison = Comparison(name, runs[0], runs[1:])
        if not evaluate:
            return comparison
        version = comparison.newest_common()
        if version is None:
            raise UsageError(
                f"--evaluate: these runs have no version of policy {name} in common yet"
            )
        clusters = [replace(located, namespace=run.namespace) for run in runs]
        newest = await find_versions(clusters[0], None, say)
        versions = [await find_versions(one, version, say) for one in clusters]
    for run, found_versions in zip(runs, versions, strict=True):
        say(f"evaluating version {version} of {run.namespace}")
        players = choose_players(newest, found_versions, name, version)
        measured = await evaluate_versions(first, located, players, quiet=False)
        for one in measured.of(name).values():
            comparison.evaluations[run.namespace] = one
    return comparison


def choose_players(
    newest: Versions, found: Versions, policy: str, version: int
) -> dict[str, RunVersion]:
    """Returns the versions that play in an evaluation of `policy` at `version`, by policy.

    `found` are the versions of the run that is evaluated. All other policies are those of the first
    run, `newest`: a replay has published only what it trains, and runs that are compared must play
    beside the same policies. Raises UsageError if one of them is absent.
    """
    others = {name: pick(newest, name, None) for name in newest if name != policy}
    return {**others, policy: pick(found, policy, version)}


async def _find_runs(
    connection: Connection, first: str | None, others: Sequence[str]
) -> list[Found]:
    """Finds the first run and the others."""
    if others:
        found = [await find_namespace(connection, name) for name in others]
    else:
        found = [await _newest_replay(connection, first)]
    if first is None:
        topics, life = found[0]
        first = life.replay_of
        if first is None:
            raise UsageError(
                f"{topics.namespace} is not a replay: name the run to compare it with, for example "
                f"headrace compare --namespace OTHER {topics.namespace}"
            )
    names = [first, *(topics.namespace for topics, _ in found)]
    if len(set(names)) < len(names):
        raise UsageError(f"compare different runs: {', '.join(names)} names one of them twice")
    return [await find_namespace(connection, first), *found]


async def _newest_replay(connection: Connection, of: str | None) -> Found:
    def wanted(life: RunLife) -> bool:
        return life.replay_of is not None and of in (None, life.replay_of)

    found = await find_namespace(connection, None, wanted)
    if not wanted(found[1]):
        raise UsageError(
            f"{of or 'this broker'} has no replay to compare with. `headrace replay batches` and "
            "`headrace replay trajectories` make one. To compare other runs, name them"
        )
    return found


async def _read(connection: Connection, found: Found, first: Recipe, policy: str) -> ComparedRun:
    topics, life = found
    changes = differing_keys(life.recipe(), first.model_dump(mode="json"))
    return ComparedRun(
        topics.namespace,
        life.replay_of,
        await read_versions(connection.log(topics), policy),
        tuple(one for one in changes if one.partition(":")[0].split(".")[0] not in NOT_COMPARED),
    )
