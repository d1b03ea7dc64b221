"""The recipe: one TOML file that describes a run. Unknown keys are refused.

The cluster on which a run happens (bootstrap servers, registry, blob store) is not part of it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from headrace.schemas.recipe.agent_settings import Agent, EnvironmentSettings
from headrace.schemas.recipe.barrier_settings import BarrierSettings, check_barrier
from headrace.schemas.recipe.learning.pairs import check_pairs
from headrace.schemas.recipe.learning.teacher import check_teacher
from headrace.schemas.recipe.limit_settings import Tenant
from headrace.schemas.recipe.policy import Policy
from headrace.schemas.recipe.resources.engine_settings import OPENAI
from headrace.schemas.recipe.resources.worker_settings import (
    Workers,
    check_announcing_workers,
    check_autoscale,
    check_prices,
)
from headrace.schemas.recipe.secret_references import Options
from headrace.schemas.recipe.sync_mode import check_sync, with_sync
from headrace.schemas.recipe.tables import (
    FALSE_IS_NONE,
    NotNegative,
    Positive,
    PositiveSeconds,
    Settings,
)
from headrace.schemas.recipe.task_settings import (
    Artifacts,
    Tasks,
    check_curation,
    check_league,
    curating_policy,
)
from headrace.schemas.role_rewards import OVERLONG
from headrace.schemas.topics import MOST_POSITIONS, NAME, POOL_PARTITIONS
from headrace.schemas.untrusted.public_keys import PublicKeys
from headrace.schemas.untrusted.trusted_keys import TrustedKeys

LIVE_UNTRAINED = 128
"""Groups that run at the same time in a run that trains nothing, if its recipe sets no limit."""


class Stop(Settings):
    """The run ends as soon as one of these conditions holds, when all tasks are trained on, or when
    the learning rate of every policy in training has reached 0."""

    reward: float | None = None
    """For every policy, the mean training reward of the last `reward_versions` versions reaches
    this value."""
    reward_versions: Positive = 3
    """Number of versions over which `reward` is the mean."""
    versions: Positive | None = None
    """Every policy has trained this many versions."""
    seconds: PositiveSeconds | None = None
    """The run has gone on for this many seconds. If `run` continues it after a pause, whole ten
    minutes in which nothing was recorded don't count."""


class WarmStart(Settings):
    """Tasks whose demonstrations are learned by cross-entropy, before others are learned by reward.

    Their episodes use the same topics and real environments as all others. The only difference is
    that the agent gives the text of the policies, by `demonstration`."""

    agent: str = "teacher"
    """Key of `agents`: the agent that demonstrates."""
    tasks: Positive = 256
    """Number of tasks that are demonstrated: the first ones of the data set, in several epochs if
    it has fewer items. The other tasks begin once every policy is trained on these. A multiple of
    `batches.groups` avoids a short batch."""
    samples: Positive = 1
    """Number of demonstrations of each task."""
    use: str | None = None
    """The data set, as in `tasks`. Absent: the data set of `tasks`, with its options."""
    options: Options = {}
    """Keyword arguments that are given to the data set that `use` names."""


class Evaluation(Settings):
    """Measures versions of the policies on a set of tasks while they learn. It trains nothing."""

    use: str | None = None
    """The data set, as in `tasks`. Absent: the data set of `tasks`. Its options apply then, unless
    `options` overrides them."""
    options: Options = {}
    """Keyword arguments that are given to the data set."""
    items: Positive = 64
    """Number of items that are evaluated: the first ones of the data set."""
    every: Positive = 10
    """Number of versions from one round to the next. Rounds that become due while one runs are
    skipped."""
    seed: int | None = None
    """Seed as in `tasks`. Absent: the seed of `tasks`, so that an item has the same environment as
    in its first epoch."""
    samples: Positive = 8
    """Number of episodes of each item: the k of avg@k and pass@k."""
    temperature: float | None = Field(default=None, ge=0)
    """Temperature of the sampling. 0 takes the most likely token. Absent: as in training."""
    passing: float = 1.0
    """An episode has passed if its reward is at least this."""


class Scheduler(Settings):
    """Limits of what runs at the same time."""

    live_episodes: Positive | None = None
    """Maximum number of training episodes that run at the same time. Absent: as many as a batch
    has, without those that it replays: `batches.groups` times `tasks.samples`. Of several policies,
    the largest batch counts."""
    evaluation_episodes: Positive = 128
    """Maximum number of evaluation episodes that run at the same time, in addition to those."""
    starts_per_s: float | None = Field(default=None, gt=0)
    """Maximum number of episodes that start in a second, without those of tasks that are not run.
    Absent: no limit."""
    duplicates_window: Positive = 1_000_000
    """A second submission of a task id is recognised within this many tasks."""
    tenants: dict[str, Tenant] = {}
    """The limits of tenants by name. Others have the weight 1 and no limit of their own. `headrace
    quota` changes them during a run, but not their keys."""
    operators: PublicKeys = ()
    """Public keys of those who may act for every tenant. With some, only they can change limits
    with `headrace quota`."""
    require_keys: bool = False
    """Whether a tenant without keys is refused too. Then only `operators` may act for it."""
    environments: dict[str, NotNegative] = {}
    """Maximum number of live episodes by key of `environments`, over all env workers, and for
    training and evaluation together. A task whose environment is full waits. `headrace quota`
    changes the values that are set here."""
    images: dict[str, NotNegative] = {}
    """The same by container image: that of a task, or that of its environment's options."""
    require_reports: bool = True
    """Whether a task starts only if a worker of each policy that plays in it, and an env worker of
    its environment, have reported their load in the last seconds. An environment of another team
    (`external`) needs no report. Turn it off if a service of your own answers the prompts and
    writes no `loads`."""
    waiting_per_slot: float = Field(default=4.0, gt=0)
    """No task starts while more prompts than this wait for each slot of a policy that plays in it.
    Each episode that has started in the last 1.25 s counts beside what the workers report."""

    @property
    def trusted(self) -> TrustedKeys:
        """The keys that may act for tenants."""
        tenants = {name: one.keys for name, one in self.tenants.items() if one.keys}
        return TrustedKeys(tenants, self.operators, self.require_keys)

    @model_validator(mode="after")
    def _somebody_has_a_key(self) -> Scheduler:
        if self.require_keys and not self.trusted.keys:
            raise ValueError(
                "scheduler.require_keys: no tenant and no operator has a key, so nobody could "
                "submit. Add `operators`, or `keys` to a tenant"
            )
        return self


class Recipe(Settings):
    """A whole run."""

    name: str
    """Name of the recipe, and of the namespace of its run unless `--namespace` gives another."""
    description: str = ""
    """One line about the recipe, for `headrace recipe`."""
    partitions: Positive = 4
    """Number of partitions of every topic that has several. It can't change once the namespace
    exists. At most 314 with one policy or two, and one less for each two more."""
    pool_partitions: Positive = POOL_PARTITIONS
    """Number of partitions of a policy's prompts, and of `actions`: at most so many inference
    workers of a policy, and env workers, share them. It can't change once the namespace exists."""
    mode: Literal["async", "sync"] = "async"
    """`async`: episodes run while the trainer works, so samples may be some versions old. `sync`:
    the episodes of a batch are generated with the newest version, all are waited for, and then the
    policy is trained. No token is stale, and engines and trainer work by turns. It sets
    `max_staleness` and `prefetch` of all policies to 0."""
    reads_from: tuple[str, ...] = ()
    """Other namespaces whose trajectories the records of this one may refer to. A record that
    refers to any other namespace is not used and becomes a dead letter."""
    stop: Stop = Stop()
    tasks: Tasks = Tasks()
    warm_start: Annotated[WarmStart | None, FALSE_IS_NONE] = None
    """Absent (`warm_start = false` in TOML): training begins without demonstrations."""
    evaluation: Annotated[Evaluation | None, FALSE_IS_NONE] = None
    """Absent (`evaluation = false` in TOML): nothing is evaluated during training."""
    agents: dict[str, Agent] = {"default": Agent()}
    """The agents by name. `tasks.agent` and `warm_start.agent` name one."""
    environments: dict[str, EnvironmentSettings] = {"default": EnvironmentSettings()}
    """The environments by name. `tasks.environment` names one. Others may be judges."""
    artifacts: Artifacts = Artifacts()
    scheduler: Scheduler = Scheduler()
    policies: dict[str, Policy]
    """The policies by name. At least one is required."""
    barrier: Annotated[BarrierSettings | None, FALSE_IS_NONE] = None
    """Absent (`barrier = false` in TOML): policies don't wait for one another."""
    workers: Workers = Workers()

    @model_validator(mode="before")
    @classmethod
    def _set_what_sync_means(cls, tree: Any) -> Any:
        return with_sync(tree)

    @model_validator(mode="after")
    def _limited_environments_exist(self) -> Recipe:
        if unknown := sorted(self.scheduler.environments.keys() - self.environments.keys()):
            raise ValueError(
                f"scheduler.environments: no {unknown[0]!r} among {sorted(self.environments)}"
            )
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Recipe:
        tasks = self.tasks
        for name in (self.name, *self.policies, *self.reads_from):
            if not NAME.match(name):
                raise ValueError(
                    f"{name!r} can't be a name: use lower-case letters, digits, - and _"
                )
        if not self.policies:
            raise ValueError("policies: a recipe needs at least one")
        warm = self.warm_start
        agents = {"tasks": tasks.agent, "warm_start": warm and warm.agent}
        for table, agent in agents.items():
            if agent is not None and agent not in self.agents:
                raise ValueError(f"{table}.agent: no agent {agent!r} among {sorted(self.agents)}")
        if warm is not None and tasks.purpose == "evaluate":
            raise ValueError(
                "warm_start: a run with tasks.purpose = 'evaluate' trains nothing. Remove one"
            )
        if tasks.environment is not None and tasks.environment not in self.environments:
            raise ValueError(
                f"tasks.environment: no {tasks.environment!r} among {sorted(self.environments)}"
            )
        return self

    @model_validator(mode="after")
    def _policies_and_samples_fit(self) -> Recipe:
        tasks = self.tasks
        for name, one in self.policies.items():
            if one.training is not None and one.sampling.temperature == 0:
                raise ValueError(f"policies.{name}.sampling.temperature: 0 can't be trained on")
        for role, policy in tasks.roles.items():
            if policy not in self.policies:
                raise ValueError(f"tasks.roles.{role}: no policy {policy!r}")
            if role == OVERLONG:
                raise ValueError(
                    f"tasks.roles.{role}: episode.rewards[{role!r}] is the penalty for length. "
                    "Rename the role"
                )
            if role in self.environments and role != tasks.environment:
                raise ValueError(
                    f"tasks.roles.{role}: an environment has this name, too. Its scores as a judge "
                    f"are recorded in episode.rewards[{role!r}], which is the reward of the role. "
                    "Rename one of them"
                )
        for name, one in self.policies.items():
            if one.groups.select is not None and list(tasks.roles.values()).count(name) > 1:
                raise ValueError(
                    f"policies.{name}.groups.select: the policy plays several roles, and samples "
                    "are selected by one reward. Remove it, or let another policy play a role"
                )
        if tasks.minimum > tasks.samples:
            raise ValueError(
                f"tasks.minimum: {tasks.minimum} is more than tasks.samples, {tasks.samples}"
            )
        return self

    @model_validator(mode="after")
    def _sync_is_kept(self) -> Recipe:
        if self.mode == "sync":
            check_sync(self.policies, self.live_episodes, self._episodes_of_a_batch)
        return self

    @model_validator(mode="after")
    def _curation_and_league_fit(self) -> Recipe:
        check_curation(self.tasks, self.policies)
        check_league(self.tasks, self.policies)
        return self

    @model_validator(mode="after")
    def _teachers_and_barrier_fit(self) -> Recipe:
        for name, one in self.policies.items():
            if one.training is not None:
                check_teacher(f"policies.{name}", one, one.training, self.policies)
                check_pairs(f"policies.{name}", one.training, self.tasks.samples)
        check_barrier(self.barrier, self.policies)
        return self

    @model_validator(mode="after")
    def _positions_fit(self) -> Recipe:
        # The scheduler's commit has a position for each partition of `episodes`, `outcomes` and
        # `groups`, of which each policy has one.
        most = (MOST_POSITIONS - len(self.policies)) // 2
        if self.partitions > most:
            raise ValueError(
                f"partitions: {self.partitions} is more than {most}. The scheduler stores its "
                "positions in all partitions with its commit, and a broker accepts no more. "
                f"Use {most} or fewer"
            )
        return self

    @model_validator(mode="after")
    def _workers_fit(self) -> Recipe:
        check_prices(self.workers, self.policies)
        check_autoscale(self.workers, self.pool_partitions, self.mode)
        trained = {k: v.engine for k, v in self.policies.items() if v.training is not None}
        check_announcing_workers(self.workers, [k for k, v in trained.items() if v.use == OPENAI])
        return self

    @property
    def curating_policy(self) -> str | None:
        """The policy whose statistics decide about items; None if every item becomes a task."""
        return curating_policy(self.tasks, self.policies)

    @property
    def live_episodes(self) -> int:
        """Maximum number of training episodes that run at the same time."""
        return self.scheduler.live_episodes or self._episodes_of_a_batch

    @property
    def _episodes_of_a_batch(self) -> int:
        trained = [one.batches for one in self.policies.values() if one.training is not None]
        groups = max((batches.fresh_groups for batches in trained), default=LIVE_UNTRAINED)
        return groups * self.tasks.samples

    def canonical(self) -> str:
        """Returns the recipe as canonical JSON: equal recipes have equal texts."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> bytes:
        """SHA-256 of the canonical text. A worker refuses to serve a run with another digest."""
        return hashlib.sha256(self.canonical().encode()).digest()
