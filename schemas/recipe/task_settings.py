"""The table `[tasks]` of a recipe, and which policy's statistics choose the items of its tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from headrace.schemas.recipe.policy import Policy
from headrace.schemas.recipe.secret_references import Options
from headrace.schemas.recipe.tables import FALSE_IS_NONE, Choice, Positive, Settings

CURRICULUM = "curriculum"
"""The data set whose stages end by statistics."""


class League(Settings):
    """Lets past versions of a policy play some of its roles, as the opponents in self-play. Every
    `every` versions, one of the newest `past` is drawn as the opponent of the next tasks."""

    roles: Annotated[tuple[str, ...], Field(min_length=1)]
    """The roles that past versions play. Their policy must play another role as well, which learns.
    """
    every: Positive = 10
    """Number of versions from one that becomes an opponent to the next. Version 0 is the first."""
    past: Positive = 5
    """Number of versions that the opponent is drawn from."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the tasks that are played against a past version. In the others the newest version
    plays all roles and learns from all."""


class Artifacts(Settings):
    """Limits of the files that go in with a task and come out of its episodes. Their bytes are in
    the blob store, never in the log."""

    files: Annotated[int, Field(gt=0, le=1024)] = 64
    """Maximum number of files of a task, and of an attempt at an episode."""
    file_mb: Positive = 64
    """Maximum size of one file, in MiB. A worker holds a whole file in memory for a moment."""
    task_mb: Positive = 256
    """Maximum size of all files that go in with a task, in MiB."""
    episode_mb: Positive = 256
    """Maximum size of all files that come out of an attempt at an episode, in MiB. What exceeds a
    limit is left out, and the observation says so."""


class Tasks(Settings):
    """The data set of the tasks, and what each task requires."""

    use: str = "count"
    """The data set: a built-in (`count`, `jsonl`, `hf`, `reasoning_gym` and others), or the import
    path of a generator of items."""
    options: Options = {}
    """Keyword arguments that are given to the data set."""
    epochs: Positive | None = None
    """Number of passes over the data set. Absent: without end."""
    backlog: Positive = 64
    """Maximum number of tasks that are submitted but not yet started."""
    agent: str = "default"
    """Key of `agents`."""
    environment: Annotated[str | None, FALSE_IS_NONE] = "default"
    """Key of `environments`. Absent (`environment = false` in TOML): agents have none."""
    mode: Literal["ephemeral", "persistent"] = "ephemeral"
    """`ephemeral`: an environment is created for each attempt and destroyed. `persistent`: it is
    pooled and reset."""
    roles: dict[str, str] = {"policy": "default"}
    """Role of the agent to the policy that plays it."""
    league: Annotated[League | None, FALSE_IS_NONE] = None
    """Absent (`league = false` in TOML): the newest version of its policy plays each role."""
    samples: Positive = 8
    """Number of episodes of a task, which is the size of its group."""
    minimum: Positive = 1
    """Minimum number of usable samples. With fewer, the group is dropped."""
    max_turns: Positive = 20
    """Maximum number of turns of an episode."""
    max_tokens: Positive = 1024
    """Maximum number of sampled tokens of an episode."""
    deadline_s: Positive = 300
    """Seconds from the start of an episode to its deadline."""
    attempts: Positive = 3
    """Maximum number of attempts of an episode. Only retryable failures lead to another one."""
    tenant: str = "default"
    """The tenant whose limits the tasks count against (`scheduler.tenants`)."""
    purpose: Literal["train", "evaluate"] = "train"
    """`evaluate`: no policy is trained on the tasks' trajectories."""
    seed: int = 0
    """The seeds of the tasks are derived from it, unless their items bring seeds of their own."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    """Priority of the tasks' generations. If prompts wait for a slot of an inference worker, the
    highest priority goes first. As long as such prompts wait, those of a lower priority wait."""
    labels: dict[str, str] = {}
    """Labels of the tasks. They come back in trajectories, outcomes and results."""
    passing: float = 1.0
    """A training episode has passed if its reward is at least this. The statistics of items count
    it."""
    curators: tuple[Choice, ...] = ()
    """Which items become tasks, by their statistics: `pass_rate`, `greso`, `difficulty`, `uniform`
    (all items), or import paths. One with options is a table, `{ use = "pass_rate", tries = 2 }`.
    An item must be accepted by each of them. Absent: every item becomes a task."""
    curated_by: str | None = None
    """The policy whose statistics count for `curators` and for the data set `curriculum`. Absent:
    the only policy in training."""


def curating_policy(tasks: Tasks, policies: Mapping[str, Policy]) -> str | None:
    """Returns the policy whose statistics count; None if the recipe uses no statistics."""
    if tasks.purpose != "train" or not (tasks.curators or tasks.use == CURRICULUM):
        return None
    trained = [name for name, policy in policies.items() if policy.training is not None]
    return tasks.curated_by or (trained[0] if len(trained) == 1 else None)


def check_curation(tasks: Tasks, policies: Mapping[str, Policy]) -> None:
    """Raises ValueError if items can't be chosen by the statistics of a policy."""
    trained = [name for name, policy in policies.items() if policy.training is not None]
    names = ", ".join(trained) or "(no policy trains)"
    if tasks.curated_by is not None and tasks.curated_by not in trained:
        raise ValueError(
            f"tasks.curated_by: {tasks.curated_by!r} is not a policy that trains. Choose from "
            f"{names}"
        )
    if tasks.curators and tasks.purpose == "evaluate":
        raise ValueError(
            "tasks.curators: a run with tasks.purpose = 'evaluate' trains nothing, so it has no "
            "statistics. Remove one"
        )
    curating = curating_policy(tasks, policies)
    if [policy == curating for policy in tasks.roles.values()].count(True) > 1:
        raise ValueError(
            f"tasks.roles: {curating!r} plays several roles, so the mean of its rewards says "
            "nothing about an item. Remove the curators or the curriculum, or let another policy "
            "play a role"
        )
    uses = "tasks.curators" if tasks.curators else f"the data set {CURRICULUM!r}"
    wanted = tasks.purpose == "train" and (tasks.curators or tasks.use == CURRICULUM)
    if wanted and tasks.curated_by is None and len(trained) != 1:
        raise ValueError(
            f"tasks.curated_by: {uses} needs the policy whose statistics count. Choose from {names}"
        )


def check_league(tasks: Tasks, policies: Mapping[str, Policy]) -> None:
    """Raises ValueError if a role can't be played by past versions, or if nothing would learn."""
    league = tasks.league
    if league is None:
        return
    if tasks.purpose == "evaluate":
        raise ValueError(
            "tasks.league: a run with tasks.purpose = 'evaluate' makes no versions. Remove one"
        )
    learners = {policy for role, policy in tasks.roles.items() if role not in league.roles}
    for role in league.roles:
        policy = tasks.roles.get(role)
        if policy is None:
            raise ValueError(
                f"tasks.league.roles: no role {role!r} among {', '.join(sorted(tasks.roles))}"
            )
        if policies[policy].training is None:
            raise ValueError(
                f"tasks.league.roles: {policy!r}, which plays {role!r}, has `training = false`, so "
                "it has no past versions. Remove the role"
            )
        if policy not in learners:
            raise ValueError(
                f"tasks.league.roles: past versions play every role of {policy!r}, so it would "
                "learn nothing. Leave one of its roles out"
            )
