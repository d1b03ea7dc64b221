"""The files that an environment takes at its reset, and those that it gives out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.errors import EnvironmentFailed, UsageError
from headrace.schemas.events import ActionRequested
from headrace.schemas.untrusted.artifact_names import BadName, matches
from headrace.services.base.types import Observation, TaskFile
from headrace.services.env.answers import check_observation
from headrace.services.env.environment import Collecting, Environment
from headrace.services.env.setup import Setup
from headrace.services.tasks.artifact_store import Stored

NO_STORE = "files can't go in or come out here: there is no blob store"


def files_of(setup: Setup, reset: ActionRequested) -> Mapping[str, TaskFile]:
    """Return the files that a task brings. Nothing is fetched yet.

    Raises UsageError if a name is not the name of a file.
    """
    if not reset.artifacts:
        return {}
    if setup.store is None:
        raise UsageError(NO_STORE)
    return setup.store.files_of(reset.artifacts)


def require_files(environment: Environment, reset: ActionRequested) -> None:
    """Raise UsageError if the environment ignores the task's files, or can't give files out."""
    use = reset.environment.use
    if reset.artifacts and not getattr(environment, "takes_files", False):
        raise UsageError(
            f"environment {use!r} takes no files, but the task has {len(reset.artifacts)}. Submit "
            "it without `artifacts`, or set takes_files = True in the environment's class"
        )
    if reset.environment.collect and not isinstance(environment, Collecting):
        raise UsageError(
            f"environment {use!r} has no method `collect`, but the task collects "
            f"{list(reset.environment.collect)}. Leave `collect` out, or implement Collecting"
        )


async def collected(environment: Environment, patterns: Sequence[str]) -> Observation:
    """Return an observation with the environment's files that match the patterns.

    Raises UsageError if it can't collect, and EnvironmentFailed if it gives a reward.
    """
    if not isinstance(environment, Collecting):
        raise UsageError("the environment has no method `collect`")
    observation = await environment.collect(patterns)
    check_observation(observation, "collect")
    if observation.reward is not None or observation.rewards:
        message = "collect returned a reward, but it must only return files"
        raise EnvironmentFailed("bad_observation", message)
    if wrong := [name for name in observation.artifacts if not matches(name, patterns)]:
        message = f"collect returned {wrong[0]!r}, which matches none of {list(patterns)}"
        raise EnvironmentFailed("bad_observation", message)
    return observation


async def store_files(
    setup: Setup, action: ActionRequested, observation: Observation, sizes: Mapping[str, int]
) -> Stored:
    """Store the files of an observation, so that an event can name them.

    `sizes` are those of the files that the attempt gave out before, by name. Raises
    EnvironmentFailed for wrong files, and InfrastructureError if the blob store fails.
    """
    check_observation(observation, action.kind)
    if not observation.artifacts:
        return Stored()
    if setup.store is None:
        raise UsageError(NO_STORE)
    try:
        return await setup.store.put(observation.artifacts, sizes)
    except BadName as error:
        raise EnvironmentFailed("bad_observation", f"{action.kind}: {error}") from error
