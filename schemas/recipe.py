"""The recipe: one TOML file says what a run is. Unknown keys are refused.

File < environment (`HEADRACE__SCHEDULER__LIVE_EPISODES=64`) < `--set scheduler.live_episodes=64`.
*Where* a run happens (bootstrap servers, registry, blobs) is no part of it.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from schemas.topics import NAME

ENVIRONMENT_PREFIX = "HEADRACE__"
EXTERNAL = "external"
"""The environment that no worker of ours answers for: another team's does, by topic alone."""

Positive = Annotated[int, Field(gt=0)]
NotNegative = Annotated[int, Field(ge=0)]
PositiveSeconds = Annotated[float, Field(gt=0)]


class RecipeError(ValueError):
    """The recipe can't be used. The message names each wrong key and what is expected there."""


class Settings(BaseModel):
    """Settings refuse keys they don't know, and NaN and infinity, which JSON can't carry."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PlugIn(Settings):
    """A built-in by name, or the user's own by import path `package.module:name`."""

    use: str
    options: dict[str, Any] = {}
    """Keyword arguments of the plug-in."""


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


class Environment(PlugIn):
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


class SamplingSettings(Settings):
    """How a policy's tokens are drawn while it trains."""

    temperature: float = Field(default=1.0, ge=0)
    """0 takes the likeliest token, which can't be trained on."""
    max_tokens: Positive = 256
    allowed: tuple[str, ...] = ()
    """The only tokens that may be drawn, as the tokenizer spells them; empty allows all."""
    stop: tuple[str, ...] = ()
    json_schema: dict[str, Any] = {}
    """A JSON schema that all that the policy says must follow; empty leaves it free."""


class VllmOptions(Settings):
    """The options of the engine `vllm`."""

    context: Positive | None = None
    """Most tokens of prompt and generation together; absent: what the model can."""
    kv: Literal["keep", "recompute"] = "keep"
    """What becomes of the KV cache of the sequences in flight as weights change between two tokens.

    `keep` goes on with it, and records the generation as of mixed KV; `recompute` reads prompt and
    tokens anew with the new weights. Later prompts never meet a cache of older weights."""
    arguments: dict[str, Any] = {}
    """More of vLLM's own `EngineArgs`, as `kv_cache_memory_bytes` or `gpu_memory_utilization`."""


class EngineSettings(Settings):
    """What answers prompts."""

    use: str = "torch"
    """`torch`, `vllm`, `scripted`, or an import path."""
    options: dict[str, Any] = {}
    """`torch` takes `context`; for `vllm` see `VllmOptions`."""
    slots: Positive = 256
    """Sequences generated at once."""
    threads: Positive = 1
    device: str = "auto"
    """`auto` takes a GPU where there is one."""

    @model_validator(mode="after")
    def _options_are_known(self) -> EngineSettings:
        if self.use == "vllm":
            vllm_options(self.options)
        return self


class Groups(Settings):
    """How a task's outcomes become advantages."""

    advantage: str = "grpo"
    """`grpo`, `dr_grpo`, `rloo`, or an import path."""
    filters: tuple[str, ...] = ()
    """Reasons to drop a group, in order: `zero_advantage`, or import paths."""


class Batches(Settings):
    """How groups become batches."""

    groups: Positive = 16
    max_staleness: NotNegative = 1
    """Versions by which a sample's oldest token may be behind the batch's start, n - 1."""
    prefetch: NotNegative = 1
    """Batches assembled ahead of the newest published version."""
    order: Literal["edf", "fifo"] = "edf"
    """Whose group goes first: that which goes stale first, or that which ended first."""
    batch_wait_s: PositiveSeconds = 30.0
    """After it a batch may be short, so that nothing waits for ever."""


class Training(Settings):
    """One trainer of one policy."""

    loss: str = "grpo"
    """`grpo`, or an import path."""
    learning_rate: float = Field(default=1e-3, gt=0)
    demonstration_learning_rate: float | None = Field(default=None, gt=0)
    """Of updates that hold nothing but demonstrations; absent: `learning_rate`. What rewards bear
    is often less than what cross-entropy needs."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    warmup_updates: NotNegative = 0
    clip_low: float = Field(default=0.2, gt=0)
    clip_high: float = Field(default=0.2, gt=0)
    importance_cap: float = Field(default=2.0, gt=0)
    """Truncation of the importance weight between the trainer's and the engine's old policy."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Coefficient of the policy's entropy a token, in nats, which training then raises as well."""
    updates: Positive = 1
    """Optimizer updates a batch: it is cut into that many minibatches."""
    max_tokens: Positive = 16_384
    """Tokens of one micro-batch, padding included."""
    checkpoint_every: Positive = 10
    """Versions between checkpoints."""
    keep_checkpoints: Positive = 2
    full_every: Positive = 20
    """Versions from one publication of the whole weights to the next. Between them only what has
    changed is published, where that is smaller; 1 publishes whole weights alone."""
    threads: Positive = 1
    device: str = "auto"


class Lora(Settings):
    """An adapter that learns in place of the weights (Hu et al., arXiv:2106.09685).

    It has no dropout: with it the trainer's logprobs would be others than those that are served."""

    rank: Positive = 16
    """Of the two matrices whose product is added to a layer's weights."""
    alpha: float = Field(default=32.0, gt=0)
    """The product counts alpha / rank times."""
    targets: tuple[str, ...] = ()
    """The linear layers that have one, by their name or its last parts, as `q_proj` or
    `mlp.down_proj`; empty: all but the output head."""


class Policy(Settings):
    """A model that learns."""

    model: str
    """A folder with `config.json` and `tokenizer.json`: a name under `infra/models`, a path, or a
    model of the Hugging Face Hub, as `owner/name@revision`.

    Weights beside them are taken as version 0; without, version 0 is random by `seed`."""
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    lora: Lora | None = None
    """Absent: all weights learn. Policies of equal model, seed and dtype then share their base."""
    engine: EngineSettings = EngineSettings()
    sampling: SamplingSettings = SamplingSettings()
    groups: Groups = Groups()
    batches: Batches = Batches()
    training: Training | None = Training()
    """Absent (`training = false` in TOML): version 0 serves for ever."""

    @field_validator("training", mode="before")
    @classmethod
    def _false_is_none(cls, value: Any) -> Any:
        return None if value is False else value


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
    environments: dict[str, Environment] = {"default": Environment()}
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


def load_recipe(
    name_or_path: str,
    *,
    shipped: Path,
    environment: Mapping[str, str] | None = None,
    settings: Sequence[str] = (),
) -> Recipe:
    """Reads a recipe by path, or by the name of one in the folder `shipped`.

    `environment` overrides keys by `HEADRACE__A__B`, `settings` by `a.b=value`; a value is JSON,
    or else text. RecipeError says each thing that is wrong.
    """
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = shipped / f"{name_or_path}.toml"
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        names = ", ".join(sorted(file.stem for file in shipped.glob("*.toml")))
        raise RecipeError(
            f"no recipe {name_or_path!r}: give the path of a .toml file, or one of: {names}"
        ) from None
    except OSError as error:
        raise RecipeError(f"{path} can't be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not TOML: {error}") from error
    for key, value in sorted((environment or {}).items()):
        if key.startswith(ENVIRONMENT_PREFIX):
            keys = key.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
            _override(tree, keys, value, source=key)
    _override_all(tree, settings)
    return parse_recipe(tree, str(path))


def change_recipe(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """The recipe with keys overridden by `a.b=value`. RecipeError says each thing that is wrong."""
    tree = recipe.model_dump(mode="json")
    _override_all(tree, settings)
    return parse_recipe(tree, "--set")


def vllm_options(options: Mapping[str, Any]) -> VllmOptions:
    """The options of the engine `vllm`. RecipeError names each wrong one."""
    try:
        return VllmOptions.model_validate(options)
    except ValidationError as error:
        raise RecipeError(f"options of the vllm engine: {_explain(error)}") from error


def _override_all(tree: dict[str, Any], settings: Sequence[str]) -> None:
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise RecipeError(f"--set {setting}: it takes key=value, as scheduler.live_episodes=64")
        _override(tree, name.split("."), value, source=f"--set {name}")


def parse_recipe(tree: Mapping[str, Any], where: str) -> Recipe:
    """Checks a recipe's tree. RecipeError names each wrong key."""
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        raise RecipeError(f"{where}: {_explain(error)}") from error


def _override(tree: dict[str, Any], keys: list[str], text: str, *, source: str) -> None:
    node = tree
    for key in keys[:-1]:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise RecipeError(f"{source}: {key} is a value, not a table")
    try:
        node[keys[-1]] = json.loads(text)
    except json.JSONDecodeError:
        node[keys[-1]] = text


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        key = ".".join(str(part) for part in problem["loc"]) or "the recipe"
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = "no such key"
        lines.append(f"{key}: {message}")
    return "; ".join(lines)
