"""The recipe: one TOML file says what a run is. Unknown keys are refused.

*Where* a run happens (bootstrap servers, registry, blobs) is no part of it.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from headrace.schemas.recipe.policy import Policy
from headrace.schemas.recipe.tables import NotNegative, PlugIn, Positive, PositiveSeconds, Settings
from headrace.schemas.topics import NAME

EXTERNAL = "external"
"""The environment that no worker of ours answers for: another team's does, by topic alone."""


class Stop(Settings):
    """The run ends as soon as one of these holds; always when all tasks are published."""

    reward: float | None = None
    """Mean training reward over the last `reward_versions` versions, every policy's."""
    reward_versions: Positive = 3
    versions: Positive | None = None
    """Versions trained, of every policy."""
    seconds: PositiveSeconds | None = None
    """Since the run started."""


class Tasks(Settings):
    """Where tasks come from, and what each of them asks for."""

    use: str = "count"
    """The data set: `count`, `jsonl`, `hf`, or an import path of a generator of items."""
    options: dict[str, Any] = {}
    epochs: Positive | None = None
    """Passes over the data set; absent: for ever."""
    backlog: Positive = 64
    """Most tasks submitted and not yet started."""
    agent: str = "default"
    environment: str | None = "default"
    """Absent (`environment = false` in TOML): agents have none."""
    mode: Literal["ephemeral", "persistent"] = "ephemeral"
    roles: dict[str, str] = {"policy": "default"}
    """Role of the agent to policy."""
    samples: Positive = 8
    """Episodes a task: the group's size."""
    minimum: Positive = 1
    """Fewest usable samples that still make a group."""
    max_turns: Positive = 20
    max_tokens: Positive = 1024
    """Sampled tokens an episode."""
    deadline_s: Positive = 300
    attempts: Positive = 3
    tenant: str = "default"
    purpose: Literal["train", "evaluate"] = "train"
    """`evaluate`: nothing is trained on them."""
    seed: int = 0

    @field_validator("environment", mode="before")
    @classmethod
    def _false_is_none(cls, value: Any) -> Any:
        return None if value is False else value


class WarmStart(Settings):
    """Tasks that are demonstrated, and learned by cross-entropy, before any is learned by reward.

    Their episodes go the way of all others: through the same topics, by a real environment. Only
    the agent says what the policies should say, by `demonstration`."""

    agent: str = "teacher"
    """Of `agents`: what demonstrates."""
    tasks: Positive = 256
    """How many: the data set's first, epoch by epoch where it has fewer. The others begin once
    every policy is trained on these; a multiple of `batches.groups` leaves no short batch."""
    samples: Positive = 1
    """Demonstrations a task."""
    use: str | None = None
    """The data set, as in `tasks`; absent: that of `tasks`, with its options."""
    options: dict[str, Any] = {}


class Evaluation(Settings):
    """Measures the versions of the policies on a task set as they learn. It trains nothing."""

    use: str | None = None
    """The data set, as in `tasks`; absent: that of `tasks`, with its options."""
    options: dict[str, Any] = {}
    items: Positive = 64
    """Items that are evaluated: the data set's first."""
    every: Positive = 10
    """Versions from one round to the next; what comes while one runs is passed over."""
    seed: int | None = None
    """Of the items' worlds; absent: that of `tasks`, whose first epoch meets the same."""
    samples: Positive = 8
    """Episodes an item: the k of avg@k and pass@k."""
    temperature: float | None = Field(default=None, ge=0)
    """Of the sampling; 0 takes the likeliest token, absent: as in training."""
    passing: float = 1.0
    """Reward from which on an episode has passed."""


class Agent(PlugIn):
    """An agent: a coroutine that takes an Episode."""

    use: str = "multi_turn"
    unfinished_reward: float | None = None
    """Reward of an episode cut by a limit of turns, tokens or context; absent keeps its own."""


class EnvironmentSettings(PlugIn):
    """An environment: a class of the Environment protocol."""

    use: str = "null"
    """A built-in, an import path, or `external`: a worker of another team answers, by topic."""
    slots: Positive = 1024
    """Episodes that one worker holds at once."""
    score_s: PositiveSeconds | None = None
    """Longest that an answer to `score` may take; absent: until the episode's deadline."""

    @property
    def external(self) -> bool:
        """Whether our workers leave its actions alone."""
        return self.use == EXTERNAL


class Scheduler(Settings):
    """Limits of what runs at once."""

    live_episodes: Positive = 1024
    """Most episodes to train on that run at once."""
    evaluation_episodes: Positive = 128
    """Most episodes of tasks to evaluate that run at once, beside the others."""
    starts_per_s: float | None = Field(default=None, gt=0)
    duplicates_window: Positive = 1_000_000
    """Tasks within which a second submission of the same id is recognised."""


class Workers(Settings):
    """How many processes of each kind `run` starts."""

    agent: NotNegative = 1
    env: NotNegative = 1
    inference: NotNegative = 1


class Recipe(Settings):
    """A whole run."""

    name: str
    description: str = ""
    partitions: Positive = 4
    """P of every topic keyed by task; fixed once the namespace is made."""
    stop: Stop = Stop()
    tasks: Tasks = Tasks()
    warm_start: WarmStart | None = None
    """Absent: policies begin with what their models know."""
    evaluation: Evaluation | None = None
    """Absent: nothing is evaluated as it learns."""
    agents: dict[str, Agent] = {"default": Agent()}
    environments: dict[str, EnvironmentSettings] = {"default": EnvironmentSettings()}
    scheduler: Scheduler = Scheduler()
    policies: dict[str, Policy]
    workers: Workers = Workers()

    @model_validator(mode="after")
    def _names_meet(self) -> Recipe:
        tasks = self.tasks
        for name in (self.name, *self.policies):
            if not NAME.match(name):
                raise ValueError(f"{name!r} is no name: use lower-case letters, digits, - and _")
        if not self.policies:
            raise ValueError("policies: a recipe needs at least one")
        if tasks.agent not in self.agents:
            raise ValueError(f"tasks.agent: no agent {tasks.agent!r} among {sorted(self.agents)}")
        warm = self.warm_start
        if warm is not None and warm.agent not in self.agents:
            raise ValueError(
                f"warm_start.agent: no agent {warm.agent!r} among {sorted(self.agents)}"
            )
        if warm is not None and tasks.purpose == "evaluate":
            raise ValueError("warm_start: a run of tasks to evaluate trains nothing")
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
        if tasks.minimum > tasks.samples:
            raise ValueError(f"tasks.minimum: {tasks.minimum} of {tasks.samples} samples")
        return self

    def canonical(self) -> str:
        """The recipe as canonical JSON: equal recipes give equal text."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> bytes:
        """SHA-256 of the canonical text. A worker refuses a run with another digest."""
        return hashlib.sha256(self.canonical().encode()).digest()
