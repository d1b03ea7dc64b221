"""All events, in the order of the flow. They are the contract between the services.

`avro/<Event>.avsc` describes the bytes in Kafka; a test proves that it equals these models. Events
are immutable facts. The id of an event follows from its fields, so an event that is sent twice has
the same id both times. If two records have the same id, readers use the first one in the log.

Packed fields are little-endian `bytes` (see `packed.py`): `i32[]` holds token ids, `f32[]` holds
logprobs, rewards or advantages, and `spans` holds pairs of int32 (index of the first token, policy
version), one pair for each run of tokens that have the same version. Times are milliseconds since
the epoch. Digests are raw bytes. A field whose text begins with "JSON" holds JSON text. A field
whose text begins with "Reserved" is part of the format, but no part of Headrace uses it yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.schemas.frontier import Frontier
from headrace.schemas.number_runs import unpack_numbers

I32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""Avro `int`."""
I64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Avro `long`."""
N31 = Annotated[int, Field(ge=0, lt=2**31)]
"""Avro `int`, not negative."""
N63 = Annotated[int, Field(ge=0, lt=2**63)]
"""Avro `long`, not negative."""
Version = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""Avro `long`: the version of a policy. It fits into int32, as packed spans need."""
Weight = Annotated[float, Field(gt=0, le=1e6)]
"""Avro `double`, positive and at most a million."""
Millis = Annotated[int, Field(ge=0, lt=2**63)]
"""Avro `long`, logical type `timestamp-millis`."""
Fixed16 = Annotated[bytes, Field(min_length=16, max_length=16)]
"""Avro `fixed(16)`: the first half of a SHA-256, enough to tell requests apart."""
Fixed32 = Annotated[bytes, Field(min_length=32, max_length=32)]
"""Avro `fixed(32)`: a SHA-256."""


class Part(BaseModel):
    """A piece of an event.

    A field with an empty dict has a `default_factory`: Pydantic copies a mutable default slowly.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")


class Event(Part):
    """A fact. Its id follows from its fields, so an event that is sent twice has one id."""

    id_fields: ClassVar[tuple[str, ...]]
    key_fields: ClassVar[tuple[str, ...]]

    @property
    def event_id(self) -> str:
        """The id by which every reader deduplicates. It is unique within the event's topic.

        A part that is null is left out.
        """
        values = [getattr(self, name) for name in self.id_fields]
        return "/".join([_text(value) for value in values if value is not None])

    @property
    def key(self) -> bytes:
        """The key of the record. It decides the partition."""
        return "/".join([_text(getattr(self, name)) for name in self.key_fields]).encode()


def _text(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


class TaskEvent(Event):
    """An event of a task. All events of a task have the same key."""

    key_fields = ("task",)

    task: N63
    """The task's number: its offset in the topic `tasks`."""


class CallEvent(TaskEvent):
    """A request in an attempt at an episode, or the answer to it."""

    id_fields = ("task", "sample", "attempt", "call")

    sample: N31
    """Number of the sample within its task, from 0."""
    attempt: N31 = 0
    """Number of the attempt at this sample, from 0."""
    call: str
    """Path of the request within the attempt: `3`, or `3.1` in a parallel branch."""


class Ref(Part):
    """The location of a record in the log. Event handlers pass it on and never compute with it."""

    topic: str
    """Name of the topic on the broker."""
    partition: N31
    """Number of the partition."""
    offset: N63
    """Offset of the record in its partition."""
    digest: Fixed16
    """First half of the SHA-256 of the record's value."""


class Blob(Part):
    """A content-addressed object in the blob store. It has no URL: its digest identifies it."""

    sha256: Fixed32
    """SHA-256 of the bytes. The blob store finds the object by it."""
    size: N63
    """Size in bytes."""
    media: str = ""
    """Media type. Empty if it is not known."""
    name: str = ""
    """Name of an artifact: its relative path, with `/` between the parts. Empty for other blobs."""


class Sampling(Part):
    """How an engine samples tokens."""

    temperature: float = 1.0
    """The logits are divided by it. 0 takes the most likely token."""
    top_p: float = 1.0
    """Only the most likely tokens up to this total probability are sampled. 1 turns it off."""
    top_k: I32 = 0
    """Only this many of the most likely tokens are sampled. 0 turns it off."""
    min_p: float = 0.0
    """Tokens below this fraction of the highest probability are not sampled. 0 turns it off."""
    max_tokens: I32
    """Maximum number of tokens of one generation."""
    stop_ids: bytes = b""
    """i32[]: token ids that end the generation. The token that ends it belongs to it."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation."""
    allowed: bytes = b""
    """i32[]: the only token ids that may be sampled. Empty allows all."""
    seed: I64 | None = None
    """Random seed of this generation, if the engine supports one. Null lets the engine choose."""
    json_schema: str = ""
    """JSON: a JSON schema that the sampled text must follow. Empty means no constraint."""
    json_before: str = ""
    """Text that must come before the JSON of `json_schema`, for example `<tool_call>`."""
    json_after: str = ""
    """Text that must come after that JSON, before the generation ends."""


class Failure(Part):
    """Why something failed and who caused it. Failures are recorded as values."""

    origin: Literal["policy", "environment", "infrastructure", "operator", "agent"]
    """Who caused it. `agent`: the agent's own code. A failure of the infrastructure never becomes a
    reward."""
    code: str
    """What went wrong, in snake_case, for programs: for example `unknown_environment`."""
    message: str = ""
    """What went wrong, for people."""
    retryable: bool = False
    """Whether another attempt may succeed."""


class Use(Part):
    """The policy that plays a role, and how it is sampled."""

    policy: str
    """Name of the policy in the recipe."""
    version: I64 | None = None
    """The version that must answer, as evaluation needs it. Null asks the newest version."""
    sampling: Sampling
    """How its tokens are sampled."""


class EnvironmentUse(Part):
    """The environment that a task runs in."""

    use: str
    """Key of the recipe's `environments`. It is never an import path."""
    image: str = ""
    """Container image. Only the environment `docker` uses it, and only if its recipe options list
    the image. Empty means the recipe's image."""
    mode: Literal["ephemeral", "persistent"] = "ephemeral"
    """`ephemeral`: created for each attempt, then destroyed. `persistent`: pooled and reset."""
    options: str = "{}"
    """JSON: options of the task for its environment. They override the recipe's options."""
    collect: tuple[str, ...] = ()
    """Which files of the environment become artifacts at the end of each attempt: patterns of
    relative paths, with `*`, `?`, `[…]`, and `**` for any number of folders. Empty collects no
    files."""


class RunStateEntered(Event):
    """A run has started, is ending, or has ended. The operator's commands write it."""

    id_fields = ("namespace", "state")
    key_fields = ("namespace",)

    namespace: str
    """The run's namespace: the first part of the names of its topics."""
    state: Literal["started", "ending", "ended"]
    """`ending`: no new task starts, and open work is cancelled. `ended`: every process exits."""
    recipe: str = ""
    """JSON: the whole recipe in canonical form, if the state is `started`. Otherwise empty."""
    digest: Fixed32
    """SHA-256 of the canonical recipe."""
    reason: str = ""
    """Why the run entered this state, for people."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions of the packages that the run depends on, by package name."""


class TaskSubmitted(Event):
    """Work for an agent. Its offset in `tasks`, which has one partition, is the task's number."""

    id_fields = ("source", "task_id")
    key_fields = ("source", "task_id")

    source: str
    """Name of the submitter."""
    task_id: str
    """The submitter's id of the task. It is unique within the source."""
    tenant: str = "default"
    """The tenant whose limits the task's episodes count against. It is copied into the outcome and
    the result of the task."""
    purpose: Literal["train", "evaluate"] = "train"
    """`evaluate`: no policy is trained on the task's trajectories."""
    item_id: str
    """Id of the data set item that the task is made from."""
    epoch: I32 = 0
    """Number of the pass over the data set, from 0."""
    agent: str
    """Key of the recipe's `agents`."""
    options: str = "{}"
    """JSON: options of the task for its agent. They override the recipe's options."""
    environment: EnvironmentUse | None = None
    """The environment of the task. Null if the agent needs none."""
    roles: dict[str, Use]
    """Role of the agent to the policy that plays it. The default role is called `policy`."""
    payload: str = "{}"
    """JSON: the input of the environment and the agent."""
    artifacts: tuple[Blob, ...] = ()
    """Files that belong to the task. Their blobs are in the blob store before the task is in the
    log. Each reset repeats them, and the environment receives the files."""
    samples: I32 = 1
    """Number of episodes of the task, which is the size of its group."""
    minimum: I32 = 1
    """Minimum number of usable samples. With fewer, the group is dropped."""
    max_turns: I32
    """Maximum number of turns of one episode."""
    max_tokens: I32
    """Maximum number of sampled tokens of one episode."""
    deadline_s: I32
    """Seconds from the start of an episode to its deadline."""
    attempts: I32 = 3
    """Maximum number of attempts of an episode. Only retryable failures lead to another one."""
    priority: I32 = 0
    """Priority of the task's generations in the engine. A higher one goes first."""
    seed: I64 = 0
    """Random seed of the environment, equal for all samples. The episodes' own seeds are derived
    from it."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels for those who read the log. They are copied into the trajectories, the outcomes and
    the result of the task. Only those that begin with `curation.` or `league.` are not: Headrace's
    task source writes them, if the recipe has curators, a curriculum or a league. They say why the
    item was chosen, and what a restarted source continues with. docs/dataflow.md lists them."""


class TaskCancelled(Event):
    """A task is cancelled: samples that wait do not start, samples that run end without a reward.

    It applies to the task with this source and id, whether that task is submitted before or after
    the cancellation. A task that has ended does not change.
    """

    id_fields = ("source", "task_id", "tenant")
    key_fields = ("source", "task_id")

    source: str
    task_id: str
    reason: str = ""
    """Why the task is cancelled, for people. The outcomes repeat it."""
    tenant: str | None = None
    """The task's tenant. If it is null, the tasks of this source and id of all tenants for which
    the signature's key may act are cancelled. Tenants without keys count as one."""


class QuotaSet(Event):
    """The limits of a tenant from now on. They replace those of the recipe and all earlier ones."""

    id_fields = ("tenant", "set_at")
    key_fields = ("tenant",)

    tenant: str
    """Name of the tenant, as in its tasks."""
    set_at: Millis
    """When it was set."""
    weight: Weight = 1.0
    """Its share of the live episodes, compared with those of other tenants that have tasks."""
    live_episodes: N31 | None = None
    """Maximum number of its training episodes that run at the same time, and of its evaluation
    episodes, too. 0: its tasks wait. Null: no limit of its own."""
    reason: str = ""
    """Why, for people."""


class WaitingRecorded(Event):
    """Which tasks have not started yet. The newest record counts.

    The scheduler writes it if tasks wait for long. So its successor finds them, although the starts
    of the tasks between them may be deleted by then.
    """

    id_fields = ("topic", "recorded_at")
    key_fields = ("topic",)

    topic: str
    """Name on the broker of the topic that holds the tasks."""
    recorded_at: Millis
    """When it was recorded."""
    end: N63
    """All tasks with lower numbers have started, except those that wait."""
    count: N31
    """How many of these tasks wait."""
    low: N63
    """The lowest number of a task that waits, or 0."""
    waiting: bytes
    """Packed little-endian i32[], compressed with zlib: the numbers of the tasks that wait. It has
    two values for each run of such numbers: how many numbers are missing before the run, since
    `low` or since the run before, and how many numbers the run has."""

    @model_validator(mode="after")
    def _is_a_set(self) -> WaitingRecorded:
        runs = list(self.runs())
        if sum(map(len, runs)) != self.count or (runs and runs[-1].stop > self.end):
            raise ValueError(f"the runs do not hold {self.count} numbers below {self.end}")
        return self

    def runs(self) -> Iterator[range]:
        """Yields the runs of numbers of the tasks that wait, ascending."""
        return unpack_numbers(self.low, self.waiting)


class EpisodeStarted(TaskEvent):
    """The scheduler has started one sample of a task, or has refused it with a `verdict`."""

    id_fields = ("task", "sample")

    sample: N31
    attempt: N31 = 0
    """Number of the first attempt."""
    submitted: TaskSubmitted
    """The whole task, so that an agent worker needs no look-up to run it."""
    seed: I64
    """Random seed of the agent in this episode."""
    deadline: Millis
    """When the episode ends at the latest."""
    verdict: Failure | None = None
    """Why the episode must end at once: it is refused, a duplicate, cancelled or overdue. Null if
    it shall run."""
    versions: dict[str, Version] = Field(default_factory=dict)
    """The newest version of each policy in training when the task was started."""


class ScoredTokens(Part):
    """Neighbouring tokens of a context whose logprobs a score asks for."""

    first: N31
    """Index of the first one in the context, from 0. The first token of a context has no logprob,
    so it is at least 1."""
    count: N31
    """Number of tokens."""
    sampling: N31
    """Index into the request's `samplings`: how they were sampled."""


class GenerationRequested(CallEvent):
    """A prompt: the token ids of the context so far, and new text that is not yet tokenized.

    Or a `score`, which asks a policy for its logprobs of tokens that another policy sampled.
    """

    policy: str
    pinned: I64 | None = None
    """The version that must answer. Null asks the newest version."""
    minimum: Version = 0
    """The oldest version that shall answer, if `pinned` is null. A worker that is still loading it
    waits for it, but not for long: then an older version answers."""
    kind: Literal["generate", "score"] = "generate"
    """`score` samples nothing. It asks for the logprobs of the tokens of `tokens` that `scored`
    names. Agent workers write it if a policy has a teacher."""
    tokens: bytes = b""
    """i32[]: token ids of the whole context so far."""
    text: str = ""
    """New text. The inference worker tokenizes it and appends it to the context."""
    chat: str = ""
    """JSON: new `messages`, and `tools` if the context is empty. The model's own chat template
    turns them into the text that is appended."""
    demonstration: str | None = None
    """What the policy should say. The answer is this text, tokenized and ended as `sampling`
    demands; nothing is sampled. Null samples from the policy."""
    scored: tuple[ScoredTokens, ...] = ()
    """The tokens to score, in the order of the context. Empty if `kind` is `generate`."""
    samplings: tuple[Sampling, ...] = ()
    """The distinct sampling settings of `scored`. A logprob is computed with the temperature and
    the masks of its token's sampling."""
    sampling: Sampling
    """How new tokens are sampled. A score repeats the first of its `samplings` here."""
    priority: I32 = 0
    """A higher priority goes first."""
    expires_at: Millis
    """After this time the answer is useless, and a worker may drop the request."""
    digest: Fixed16
    """Digest of what the request means. Expiry and priority are not part of it."""


class GenerationCompleted(CallEvent):
    """The answer to a GenerationRequested."""

    digest: Fixed16
    """The request's digest. An answer with the digest of another request does not count."""
    policy: str
    worker: str
    """Id of the inference worker."""
    finish: Literal["stop", "length", "overflow", "failed"]
    """Why the generation ended. `stop`: at a stop id or text, or it is a whole score. `length`: at
    `max_tokens`.
    `overflow`: the context does not fit into the model. `failed`: see `failure`."""
    prompt_added: bytes = b""
    """i32[]: token ids of the request's new text."""
    tokens: bytes = b""
    """i32[]: token ids that were sampled or demonstrated."""
    text: str = ""
    """The same tokens as text."""
    logprobs: bytes = b""
    """f32[]: one logprob for each sampled or scored token, after temperature and masks. Empty for a
    demonstration."""
    versions: bytes = b""
    """spans: the policy version of every sampled or scored token. Empty for a demonstration."""
    kv: Literal["fresh", "mixed"] = "fresh"
    """`mixed`: an older version of the weights computed part of the KV cache."""
    prompt_tokens: N31 = 0
    """Number of tokens of the context, including the new text."""
    cached_tokens: N31 = 0
    """How many of them came from the KV cache."""
    queue_ms: N31 = 0
    """Milliseconds that the request waited for the engine."""
    run_ms: N31 = 0
    """Milliseconds that the request spent in the engine."""
    failure: Failure | None = None
    """Set if `finish` is `failed`, otherwise null."""


class ActionRequested(CallEvent):
    """A request of an agent to an environment."""

    index: N31
    """Number of the action in the attempt. The reset is 0, and steps count from 1 without gaps."""
    kind: Literal["reset", "step", "score", "close", "collect"]
    """`score` asks for a score and changes nothing. `close` ends the environment. `collect` asks
    for the files that `environment.collect` names, at the end of an attempt, and changes nothing.
    """
    environment: EnvironmentUse
    payload: str = "{}"
    """JSON: the task's payload for a reset, {"action": text} for a step, or what to score."""
    artifacts: tuple[Blob, ...] = ()
    """The files of the task, if `kind` is `reset`. Otherwise empty."""
    seed: I64 = 0
    """Random seed of the environment. The reset uses it."""
    expires_at: Millis
    """The episode's deadline. The environment ends then, even without a `close`."""
    repeatable: bool = False
    """Reserved: will say that the action may safely be executed twice. Nothing writes or reads it
    yet."""
    digest: Fixed16
    """Digest of what the request means. The expiry is not part of it."""
    after: Fixed16 | None = None
    """Digest of the environment's previous answer, as the agent saw it: that of the action with
    the index before this one. Null for a reset or a score, and if that answer is not there yet."""


class ObservationRecorded(CallEvent):
    """The answer of an environment to an ActionRequested."""

    index: N31
    """The request's index."""
    digest: Fixed16
    """The request's digest. An answer with the digest of another request does not count."""
    text: str = ""
    """What the agent gives to the policy."""
    data: str = "{}"
    """JSON: further information for the agent's code."""
    artifacts: tuple[Blob, ...] = ()
    """Files that the environment gives out. Their blobs are in the blob store before the
    observation is in the log."""
    reward: float | None = None
    """Reward of this step. Null if the environment gave none."""
    rewards: dict[str, float] = Field(default_factory=dict)
    """Named components of the reward, for reports."""
    terminated: bool = False
    """The environment reached a final state."""
    truncated: bool = False
    """The environment stopped at a limit of its own."""
    state: Fixed16 | None = None
    """Reserved: digest of the environment's state, to verify an environment that was rebuilt by
    repeating its actions. Nothing writes it yet: it is null."""
    instance: str = ""
    """Id of the sandbox or worker that answered."""
    run_ms: N31 = 0
    """Milliseconds that the environment took."""
    failure: Failure | None = None
    """Why the environment could not answer. Null if it answered."""
    partition: I32 = -1
    """The partition of `actions` from which the environment gets its actions. -1 if no environment
    is open for the attempt, for example because it was a score."""


class Turn(Part):
    """One prompt and its answer. Turns form a tree, and each stores only the tokens it adds."""

    parent: I32 = -1
    """Index of the turn that this one continues. -1 starts a new context."""
    call: str
    """Path of the generation request within the attempt."""
    policy: str
    role: str = "policy"
    """The agent's role that the policy plays."""
    context: bytes = b""
    """i32[]: token ids that were added before the sampled ones, and were not sampled."""
    tokens: bytes = b""
    """i32[]: token ids that were sampled or demonstrated."""
    logprobs: bytes = b""
    """f32[]: one logprob for each sampled token. Empty for a demonstration."""
    versions: bytes = b""
    """spans: the policy version of every sampled token. Empty for a demonstration."""
    kv: Literal["fresh", "mixed"] = "fresh"
    sampling: I32 = 0
    """Index into the trajectory's `samplings`."""
    finish: str = ""
    """Why the generation ended: `finish` of its GenerationCompleted."""
    reward: float | None = None
    """Sum of the rewards that followed this turn. Null if there were none."""
    text: str = ""
    """The same tokens as text, for people. It is never tokenized again."""
    trainable: bool = True
    """False excludes the turn's tokens from the loss. They are still context of later turns."""
    demonstrated: bool = False
    """The agent gave the text of this turn. Its tokens were not sampled, so they have no logprobs
    and no versions, and they are learned by cross-entropy whatever the reward."""
    teacher: bytes = b""
    """f32[]: the teacher's logprob of each sampled token, with the temperature and the masks of the
    turn's sampling. Empty if no teacher scored the turn."""


Ending = Literal[
    "finished",
    "turn_limit",
    "token_limit",
    "deadline",
    "overflow",
    "cancelled",
    "failed",
    "step_timeout",
    "exception",
]


class TrajectoryRecorded(TaskEvent):
    """One whole attempt of an episode. It counts only if the EpisodeEnded that counts names it."""

    id_fields = ("task", "sample", "attempt")

    sample: N31
    attempt: N31 = 0
    """The attempt that is recorded here. Earlier attempts failed."""
    source: str
    task_id: str
    item_id: str
    epoch: I32 = 0
    purpose: Literal["train", "evaluate"] = "train"
    tokenizer: str = ""
    """Digest of the tokenizer that produced the token ids. Empty if there are no turns."""
    agent: str
    environment: str = ""
    """Key of the recipe's `environments`. Empty if the task has no environment."""
    samplings: tuple[Sampling, ...] = ()
    """The distinct sampling settings of the turns. Turns refer to them by index."""
    turns: tuple[Turn, ...] = ()
    """All turns. A turn comes after its parent."""
    reward: float | None = None
    """Reward of the whole episode. Null if nothing may be learned from it."""
    rewards: dict[str, float] = Field(default_factory=dict)
    """As in EpisodeEnded."""
    ending: Ending
    failures: tuple[Failure, ...] = ()
    """The failures of this attempt and of earlier ones."""
    started: Millis
    """When the episode started."""
    ended: Millis
    """When the attempt ended."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Numbers that the agent measured, for reports, by name."""
    artifacts: tuple[Blob, ...] = ()
    """The files that the attempt's observations gave out. If several have the same name, the newest
    one is kept. Those of a judge have the judge's name and `/` before their names."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the task, except those of Headrace's task source."""


class PolicyUse(Part):
    """What one policy did in one role of an episode: all that grouping and staleness need."""

    policy: str
    role: str = "policy"
    """The agent's role that the policy played. Older records have one entry for all roles of a
    policy, with the role that it played first."""
    tokens: N31
    """Number of sampled and demonstrated tokens that may be trained on. 0 if the task names the
    version that plays the role."""
    longest: N31
    """Length of its longest sequence in tokens, including the context."""
    oldest_version: I64
    """Oldest version among its sampled tokens. -1 if it sampled none."""
    turn_rewards: bytes = b""
    """f32[]: one reward for each of these turns, NaN if the turn has none. Estimators of advantages
    of turns read it."""
    turns: bytes = b""
    """i32[]: the index of each of these turns in the trajectory. Empty if all turns are of one
    policy in one role. In older records also empty if all turns of the policy are in one role."""


class EpisodeEnded(TaskEvent):
    """The outcome of an episode. Exactly one counts."""

    id_fields = ("task", "sample")

    sample: N31
    attempt: N31 = 0
    """The attempt that counts."""
    tenant: str = "default"
    purpose: Literal["train", "evaluate"] = "train"
    item_id: str
    epoch: I32 = 0
    ending: Ending
    failure: Failure | None = None
    """Why the episode failed or was refused. Null if neither happened."""
    trajectory: Ref | None = None
    """The trajectory that counts. Null if none was recorded."""
    reward: float | None = None
    """Reward of the whole episode. Null if nothing may be learned from it."""
    rewards: dict[str, float] = Field(default_factory=dict)
    """Named parts of the reward. The one with a role's name is what that role learns from, instead
    of the episode's reward."""
    policies: tuple[PolicyUse, ...] = ()
    """One entry for each policy and role that have a turn."""
    attempts: N31 = 1
    """Number of attempts that were made."""
    seconds: float = 0.0
    """Seconds from the episode's start in the log to its end."""
    masked: bool = False
    """A limit cut the episode, and its agent has `overlong = "mask"`: its reward counts in its
    group, but no policy learns from what it sampled."""
    labels: dict[str, str] = Field(default_factory=dict)
    """As in the trajectory. Empty in a TaskEnded that would be too large with them."""
    artifacts: tuple[Blob, ...] = ()
    """As in the trajectory that counts. Empty in a TaskEnded that would be too large with them."""


class TaskEnded(TaskEvent):
    """The result of a task, with the outcomes of all its samples. Exactly one counts."""

    id_fields = ("task",)

    source: str
    task_id: str
    tenant: str = "default"
    purpose: Literal["train", "evaluate"] = "train"
    item_id: str
    epoch: I32 = 0
    closed_by: Literal["all", "cancelled", "refused"]
    """`cancelled`: at least one sample was cancelled. `refused`: no sample ever ran. `all`: every
    sample ended by itself."""
    minimum: I32 = 1
    """Minimum number of usable samples. With fewer, the group is dropped."""
    outcomes: tuple[EpisodeEnded, ...]
    """One for each sample: the first one in the log."""
    versions: dict[str, I64] = Field(default_factory=dict)
    """Policy to the version that the task's roles name. Empty if they take the newest one."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the task, except those of Headrace's task source."""


class Exclusion(Part):
    """A sample that its group leaves out."""

    sample: N31
    reason: str
    """Why it is left out, in snake_case."""


class GroupSample(Part):
    """A sample of a group that may be trained on. It refers to its trajectory."""

    sample: N31
    trajectory: Ref
    reward: float
    """The policy's reward: the mean of its roles'."""
    advantages: bytes
    """f32[]: one value for all turns, or one for each turn of this policy."""
    tokens: N31
    """Number of tokens of this policy that may be trained on."""
    longest: N31
    """Length of its longest sequence in tokens, including the context."""
    oldest_version: I64
    """Oldest version among the sampled tokens of this policy. -1 if all were demonstrated."""


class TurnProjected(TaskEvent):
    """One turn of an episode that counts, with arrays and texts instead of packed token ids.

    It is for SQL and for sinks that can't unpack bytes. Nothing of Headrace reads it. A turn whose
    arrays or texts are long has several rows. Row `part` of them has the piece of each array and of
    each text that has this number: a reader joins the pieces, and takes the rest from any row.
    """

    id_fields = ("task", "sample", "attempt", "turn", "part")

    sample: N31
    attempt: N31 = 0
    """The attempt that counts."""
    turn: N31
    """Index of the turn in its trajectory, from 0."""
    part: N31 = 0
    """Number of the row among those of the turn, from 0."""
    parts: N31 = 1
    """How many rows the turn has."""
    source: str
    task_id: str
    item_id: str
    epoch: I32 = 0
    tenant: str = "default"
    purpose: Literal["train", "evaluate"] = "train"
    agent: str
    environment: str = ""
    """Key of the recipe's `environments`. Empty if the task has no environment."""
    policy: str
    role: str = "policy"
    """The agent's role that the policy plays."""
    parent: I32 = -1
    """Index of the turn that this one continues. -1 starts a new context."""
    call: str
    """Path of the generation request within the attempt."""
    context: tuple[I32, ...] = ()
    """Token ids that were added before the sampled ones, and were not sampled."""
    context_text: str | None = None
    """The same tokens as text. Null if the writer does not have the tokenizer."""
    tokens: tuple[I32, ...] = ()
    """Token ids that were sampled or demonstrated."""
    text: str = ""
    """The same tokens as text."""
    logprobs: tuple[float, ...] = ()
    """One logprob for each sampled token, after temperature and masks. Empty for a
    demonstration."""
    versions: tuple[I64, ...] = ()
    """The policy version of each sampled token. Empty for a demonstration."""
    teacher: tuple[float, ...] = ()
    """The teacher's logprob of each sampled token. Empty if no teacher scored the turn."""
    version: I64 | None = None
    """The newest version that sampled a token of the turn. Null if none was sampled."""
    trainable: bool = True
    """False if the turn's tokens are only context of later turns."""
    demonstrated: bool = False
    """Whether the agent gave the text of this turn."""
    finish: str = ""
    """Why the generation ended."""
    turn_reward: float | None = None
    """Sum of the rewards that followed this turn. Null if there were none."""
    reward: float | None = None
    """Reward of the whole episode. Null if nothing may be learned from it."""
    rewards: dict[str, float] = Field(default_factory=dict)
    """Named parts of the reward."""
    advantage: float | None = None
    """The turn's advantage in its group. Null if the group was dropped, the sample was left out, or
    the policy does not learn from the turn."""
    ending: Ending
    """How the episode ended."""
    started: Millis
    """When the episode started."""
    ended: Millis
    """When the attempt ended."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the task. Empty in a row that would be too large with them."""


class GroupClosed(TaskEvent):
    """A task from the view of one policy that trains: scored, or dropped with a reason."""

    id_fields = ("task", "policy")

    policy: str
    item_id: str
    epoch: I32 = 0
    verdict: Literal["scored", "dropped"]
    """`dropped`: nothing of the group is trained on."""
    reason: str = ""
    """Why the group was dropped, in snake_case. Empty if it was scored."""
    estimator: str = ""
    """Name of the advantage estimator."""
    mean: float | None = None
    """Mean reward of the samples that count, except those that were demonstrated throughout. Null
    if there are no such samples."""
    deviation: float | None = None
    """Standard deviation of the same rewards, without the penalties for length
    (`rewards.overlong`). Null if no sample has a reward."""
    excluded: tuple[Exclusion, ...] = ()
    """The samples that were left out."""
    samples: tuple[GroupSample, ...] = ()
    """The samples that may be trained on. Empty if the group was dropped."""
    ended: Millis = 0
    """When the task's TaskEnded was recorded, by the broker's clock. `batch_wait` starts then."""
    seconds: float = 0.0
    """Seconds that the longest episode of the task took. 0 if no episode was played."""
    rewarded: N31 = 0
    """Number of the samples whose mean reward is `mean`."""
    passed: N31 = 0
    """Number of them whose reward, without the penalty for length, is at least the recipe's
    `tasks.passing`."""
    sampled_tokens: N63 = 0
    """Sum of their trainable tokens."""
    newest_version: I64 = -1
    """Newest version with which this policy began one of them. -1 if there are no such samples."""


class ItemMeasured(Event):
    """The statistics of one item of a data set for one policy. The newest record of an item counts.

    They are a fold over the groups of the policy, in the order of their offsets. The first group of
    a task counts if at least one of its samples has a reward. The records are also the checkpoint
    of the job that writes them.
    """

    id_fields = ("policy", "item_id", "group")
    key_fields = ("item_id",)

    policy: str
    item_id: str
    group: N63
    """Offset in `groups` of the newest group that counts for the item."""
    groups: N63
    """Number of groups that count."""
    episodes: N63
    """Number of their samples that have a reward. Demonstrated samples do not count."""
    passed: N63
    """Number of these samples that passed: `passed / episodes` is the pass rate."""
    mean: float
    """Mean reward of these samples."""
    recent: float
    """Pass rate in which newer groups weigh more. Each group has a weight of 1/4, and at the
    beginning one over the number of groups, if that is more."""
    streak: N63
    """Number of the newest groups in a row whose rewards are all equal. A group with one reward
    does not change it."""
    solved: bool
    """Whether all samples of the newest group passed."""
    sampled_tokens: N63
    """Sum of the trainable tokens of these samples."""
    newest_version: I64
    """Newest version of the policy with which a sample of the item began."""
    ended: Millis
    """When the task of the newest group ended, as in its GroupClosed."""
    low_mark: N63
    """Progress of the job: the groups of all tasks with a smaller number have been read."""
    groups_read: N63
    """Progress of the job: offset in `groups` of the oldest group whose task is not below the low
    mark. After a restart, the job reads from there."""


class BatchSample(Part):
    """One sample of a batch. It refers to its trajectory."""

    task: N63
    sample: N31
    trajectory: Ref
    advantages: bytes
    """f32[]: one value for all turns, or one for each turn of this policy."""
    weight: float = 1.0
    """Factor of the sample's loss. The trainer applies it. 1 for a fresh sample."""
    tokens: N31
    """Number of tokens of this policy that may be trained on."""
    longest: N31
    """Length of its longest sequence in tokens, including the context."""
    oldest_version: I64
    """Oldest version among the sampled tokens of this policy. -1 if all were demonstrated."""
    use: N31 = 0
    """Number of earlier batches with the same sample. 0 means fresh. A replayed sample was decided
    by the first of them, so it does not belong to what this batch decides."""


class Dropped(Part):
    """What a batch decides without training on it."""

    task: N63
    sample: I32 = -1
    """Number of the sample. -1 means the whole group."""
    reason: str
    """Why it is dropped, in snake_case."""


class Run(Part):
    """A contiguous range of task numbers. Both ends belong to it."""

    first: N63
    """The lowest number."""
    last: N63
    """The highest number."""


class BatchAssembled(Event):
    """Batch n, which trains version n. The record is also the batch assembler's checkpoint."""

    id_fields = ("policy", "version")
    key_fields = ("policy",)

    policy: str
    version: Version
    """The version that training on this batch produces."""
    recipe: Fixed32
    """SHA-256 of the canonical recipe."""
    seed: I64
    """Random seed for the training on this batch."""
    samples: tuple[BatchSample, ...]
    """The samples to train on. It may be empty after `batch_wait`."""
    dropped: tuple[Dropped, ...] = ()
    """The samples and groups that this batch decides without training on them."""
    sampled_tokens: N63
    """Sum of the samples' trainable tokens."""
    reward_mean: float | None = None
    """Mean reward of all tasks that this batch decides. Filtered tasks are included;
    infrastructure failures are not. Null if there is no reward."""
    low_mark: N63
    """All task numbers below it are decided."""
    decided: tuple[Run, ...] = ()
    """Ranges of task numbers above the low mark that are decided."""
    groups_read: N63
    """Offset in `groups` of the oldest group that is read but not decided. After a restart, the
    batch assembler reads from there."""

    @model_validator(mode="after")
    def _is_a_frontier(self) -> BatchAssembled:
        self.frontier()
        return self

    def frontier(self) -> Frontier:
        """Builds the set of task numbers that are decided once this batch is written."""
        return Frontier(self.low_mark, ((run.first, run.last) for run in self.decided))


class WeightsDelta(Part):
    """A file that turns one version's weights into another's. `docs/weights.md` has its format."""

    blob: Blob
    """The file."""
    from_version: Version
    """The version that it is applied to."""
    to_version: Version
    """The version that results."""


class Adapter(Part):
    """The base of a LoRA adapter, and how the adapter is added to it."""

    base: Blob
    """The frozen weights of the whole model, a safetensors file."""
    base_digest: Fixed32
    """Digest of the base's weights, computed as the publication's `digest` is."""
    rank: N31
    """Rank of the adapter's pairs of matrices, at least 1."""
    alpha: float
    """The product of a pair times alpha / rank is added to its layer's weights."""
    targets: tuple[str, ...]
    """Full names of the layers that have a pair."""


class PolicyPublished(Event):
    """A version of a policy. Its weights are in the blob store before this record is written."""

    id_fields = ("policy", "version", "digest")
    key_fields = ("policy",)

    policy: str
    version: Version
    """Number of the version. 0 is the start, and training on batch n produces version n."""
    status: Literal["initial", "trained", "skipped", "resumed"]
    """`initial`: version 0. `trained`: by its batch. `skipped`: its batch was unusable, and the
    weights did not change. `resumed`: published again after a restart."""
    batch: Ref | None = None
    """The batch that the version was trained on. Null for version 0."""
    digest: Fixed32
    """Digest of the weights: of their names and bytes, independent of the file layout."""
    full: Blob | None = None
    """The whole weights of `full_version`. Null if the blob store does not have them."""
    full_version: Version
    """The version of `full`, which the deltas start from."""
    deltas: tuple[WeightsDelta, ...] = ()
    """The deltas to apply to `full`, in this order. Empty if `full` has this version's weights."""
    base: str = ""
    """Name of the base model. Empty if it is not known."""
    format: str = "safetensors"
    """File format of the weights."""
    dtype: str = "float32"
    """Number format of the weights."""
    tokenizer: Blob | None = None
    """The tokenizer's file. Null if the model's folder contains it."""
    context: N31 = 0
    """Context length of the model in tokens. 0 if it is not known."""
    adapter: Adapter | None = None
    """Set if the weights are those of a LoRA adapter, with the names that PEFT gives them. Null if
    they are a whole model."""
    updates: N31 = 1
    """Number of optimizer updates of this version."""
    wait_s: float = 0.0
    """Seconds that the trainer waited for its batch."""
    step_s: float = 0.0
    """Seconds that the training took."""
    metrics: dict[str, float] = Field(default_factory=dict)
    """Loss, gradient norm and other numbers, by name."""
    logprobs: Blob | None = None
    """The trainer's logprobs of the batch's tokens in nats, before its first update: one
    little-endian float32 for each of its `sampled_tokens`. The samples have the order of the batch.
    Within a sample, the turns that the policy trains have the order of the trajectory. A sample
    that the trainer dropped is all NaN. Null if the record is not `trained`, if its batch has no
    tokens, or if the recipe turns it off."""
    tensor_digests: Blob | None = None
    """The digest of each tensor: a JSON object from names to SHA-256 in hex, of what `digest` would
    be if the weights had this tensor alone. Null if the trainer did not write it."""

    def weight_blobs(self) -> list[Blob]:
        """Returns the blobs that this version's weights are made of."""
        blobs = [] if self.full is None else [self.full]
        blobs += [delta.blob for delta in self.deltas]
        return blobs if self.adapter is None else [*blobs, self.adapter.base]


class InstanceStateEntered(Event):
    """A worker or a sandbox has entered a state, or a worker is still in it. It is for people and
    for the cost of a run: no decision depends on it."""

    id_fields = ("instance", "worker", "number")
    key_fields = ("instance",)

    instance: str
    """Id of the worker or the sandbox."""
    worker: str
    """Id of the worker that reports the state. A sandbox may outlive the worker that made it."""
    number: N31
    """Number of this worker's report about this instance, from 0."""
    kind: Literal["worker", "sandbox"]
    """`worker`: a process of a service. `sandbox`: the container of an episode."""
    state: Literal["provisioning", "ready", "busy", "failed", "gone"]
    """`provisioning`: it can't be used yet. `ready`: it can be used. `busy`: an episode uses it.
    `failed`: it ended with an error. `gone`: it has ended."""
    host: str = ""
    """Name of the worker's host."""
    reason: str = ""
    """Why the instance entered the state, for people."""
    service: str = ""
    """The service of the worker whose life this is. Empty if the record is not part of what a
    worker's life costs: the state of a sandbox, or of the env worker's sandboxes as a whole."""
    policy: str = ""
    """The policy of the worker, if it serves only one."""
    began_at: Millis = 0
    """When the worker's process began."""
    every_ms: N31 = 0
    """While the worker lives, its next record comes after at most so many milliseconds. 0 if it
    does not repeat its state, or has ended."""


class PoolLoad(Part):
    """What a worker can do for one policy, and what waits for it there."""

    policy: str
    """Name of the policy."""
    partitions: bytes
    """i32[]: the partitions of the policy's prompts that the worker has, in ascending order."""
    slots: N31
    """How many prompts it answers at once. Policies that share an engine share its slots."""
    busy: N31
    """Slots in use."""
    waiting: N31
    """Prompts that wait for one of the slots."""
    run_ms: N31
    """Mean time of a generation, without waiting: the newest ones. 0 if there was no generation."""
    version: I64 = -1
    """The policy's version that the worker serves; -1 before the first one."""


class EnvironmentLoad(Part):
    """What a worker can do for one environment of the recipe, and what waits for it there."""

    environment: str
    """Key of the environment in the recipe."""
    partitions: bytes
    """i32[]: the partitions of `actions` that the worker has, in ascending order."""
    slots: N31
    """How many instances of the environment it has open at once."""
    busy: N31
    """Slots in use."""
    waiting: N31
    """Resets and scores that wait for one of the slots."""
    run_ms: N31
    """Mean time of a reset, a step or a score, without waiting: the newest ones. 0 before the
    first one."""
    open_ms: N31
    """Mean time that a slot was in use: the newest ones. 0 before the first one."""


class LimitUse(Part):
    """What a worker holds of a limit, and what it could use."""

    limit: str
    """Name of the limit, as in `LimitShared`."""
    number: I64
    """Number of the newest division that the worker has read and obeys; -1 before the first one."""
    held: N31
    """Units that it holds."""
    wanted: N31
    """Units that it could use now: those that it holds, and one for each call that waits."""


class LoadReported(Event):
    """What a worker can do and what waits for it, as of now. The next report replaces this one."""

    id_fields = ("worker", "number")
    key_fields = ("worker",)

    worker: str
    """Id of the worker."""
    number: N31
    """Number of the worker's report, from 0."""
    every_ms: N31
    """The next report comes after at most so many milliseconds. If several don't come, the worker
    has probably ended."""
    pools: tuple[PoolLoad, ...]
    """One for each policy that it serves."""
    leaving: bool = False
    """Whether the worker is ending. Then it takes nothing new."""
    environments: tuple[EnvironmentLoad, ...] = ()
    """One for each environment that it runs."""
    lease: N63 = 0
    """The lease of the worker on its shares of limits: when it began, in milliseconds since the
    epoch. If the worker could not report for some seconds, it begins another one."""
    limits: tuple[LimitUse, ...] = ()
    """One for each limit that it shares with other workers."""


class LimitShare(Part):
    """One worker's share of a limit."""

    worker: str
    """Id of the worker."""
    lease: N63
    """The lease that the share is for. Under another lease the worker has no share."""
    units: N31
    """How many units the worker may hold."""
    reserved: N31
    """How many units it may still hold from earlier divisions, `units` included."""


class LimitShared(Event):
    """A limit is divided among workers. The newest division of a limit replaces earlier ones."""

    id_fields = ("limit", "number")
    key_fields = ("limit",)

    limit: str
    """The key of the recipe that sets it, for example `policies.default.limits.in_flight`."""
    number: N63
    """Number of the limit's division, from 0."""
    units: N31
    """Units of the limit. Each unit allows one thing at a time, such as a call in flight."""
    period_ms: N31
    """How long a unit stays in use after its call has begun. 0: until the call has ended."""
    shares: tuple[LimitShare, ...]
    """The workers with a share, or with reserved units. Others may hold nothing."""


class LimitSet(Event):
    """The value of a limit from now on, instead of that of the recipe and all earlier ones."""

    id_fields = ("limit", "set_at")
    key_fields = ("limit",)

    limit: str
    """The key of the recipe that sets it, for example `policies.default.limits.in_flight`."""
    set_at: Millis
    """When it was set."""
    units: N31
    """Its new value. 0: nothing new begins."""
    period_ms: N31 = 0
    """As in `LimitShared`."""
    reason: str = ""
    """Why, for people."""


class OperationRecorded(Event):
    """What somebody does to a run from outside, if no other record that stays says so.

    It is written before the operation, or in one transaction with it. `headrace audit` lists it.
    """

    id_fields = ("operation", "subject", "at")
    key_fields = ("operation",)

    operation: str
    """`quota`, `redrive` or `prune`."""
    subject: str
    """What it is done to: a tenant, a limit, the location of a dead letter, or a namespace."""
    at: Millis
    """When it was done."""
    by: str = ""
    """User and machine of who did it, as the command claims. A signature of the record proves the
    key."""
    details: str = ""
    """What was changed and why, for people."""


EVENTS: tuple[type[Event], ...] = (
    RunStateEntered,
    TaskSubmitted,
    TaskCancelled,
    QuotaSet,
    WaitingRecorded,
    LimitSet,
    OperationRecorded,
    EpisodeStarted,
    GenerationRequested,
    GenerationCompleted,
    ActionRequested,
    ObservationRecorded,
    TrajectoryRecorded,
    EpisodeEnded,
    TaskEnded,
    TurnProjected,
    GroupClosed,
    ItemMeasured,
    BatchAssembled,
    PolicyPublished,
    InstanceStateEntered,
    LoadReported,
    LimitShared,
)
