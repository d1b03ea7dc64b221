"""Every event, in the order of the flow. The wire truth is `avro/<Event>.avsc`; a test holds equal.

Events are frozen facts. An event's id follows from its fields, so a second send is the same event;
of two records with one id every reader takes the first in the log.

Packed fields are little-endian `bytes` (`packed.py`): `i32[]` token ids, `f32[]` logprobs, and
`spans`, which are i32 pairs (index of the first token, policy version), one a run of tokens that
share a version. Times are milliseconds since the epoch. Digests are raw bytes. A field named
`..._json` or documented as JSON holds JSON text.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from headrace.schemas.frontier import Frontier

I32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""Avro `int`."""
I64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""Avro `long`."""
N31 = Annotated[int, Field(ge=0, lt=2**31)]
"""Avro `int`, not negative."""
N63 = Annotated[int, Field(ge=0, lt=2**63)]
"""Avro `long`, not negative."""
Version = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""Avro `long`: a policy's version, which packed spans hold as int32."""
Millis = Annotated[int, Field(ge=0, lt=2**63)]
"""Avro `long`, logical type `timestamp-millis`."""
Fixed16 = Annotated[bytes, Field(min_length=16, max_length=16)]
"""Avro `fixed(16)`: the first half of a SHA-256, enough to tell meanings apart."""
Fixed32 = Annotated[bytes, Field(min_length=32, max_length=32)]
"""Avro `fixed(32)`: a SHA-256."""


class Part(BaseModel):
    """A piece of an event."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Event(Part):
    """A fact. Its id follows from its fields, so a second send is the same event."""

    id_fields: ClassVar[tuple[str, ...]]
    key_fields: ClassVar[tuple[str, ...]]

    @property
    def event_id(self) -> str:
        """The id that every reader deduplicates by, unique within the event's topic."""
        return "/".join(_text(getattr(self, name)) for name in self.id_fields)

    @property
    def key(self) -> bytes:
        """The record key: it decides the partition."""
        return "/".join(_text(getattr(self, name)) for name in self.key_fields).encode()


def _text(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


class Ref(Part):
    """Where a record lies in the log. Opaque to handlers: carried, never computed with."""

    topic: str
    """The topic's name on the broker."""
    partition: N31
    """Number of the partition."""
    offset: N63
    """Offset of the record in its partition."""
    digest: Fixed16
    """First half of the SHA-256 of the record's value."""


class Blob(Part):
    """A content-addressed object. No URL: the digest locates it."""

    sha256: Fixed32
    """SHA-256 of the bytes: where they lie in the blob store."""
    size: N63
    """Bytes."""
    media: str = ""
    """Media type; empty where unknown."""


class Sampling(Part):
    """How the next tokens are drawn."""

    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Keeps the likeliest tokens up to this total probability; 1 is off."""
    top_k: I32 = 0
    """Keeps that many of the likeliest tokens; 0 is off."""
    min_p: float = 0.0
    """Drops tokens below this share of the likeliest one's probability; 0 is off."""
    max_tokens: I32
    """Most tokens of one generation."""
    stop_ids: bytes = b""
    """i32[]: token ids that end the generation; they belong to it."""
    stop: tuple[str, ...] = ()
    """Texts that end the generation."""
    allowed: bytes = b""
    """i32[]: the only token ids that may be drawn; empty allows all."""
    seed: I64 | None = None
    """Seed of the draws, where the engine heeds one; null leaves it to the engine."""
    json_schema: str = ""
    """A JSON schema, as JSON, which the drawn text follows; empty leaves it free."""
    json_before: str = ""
    """Text that is drawn before the JSON of `json_schema`, as `<tool_call>`."""
    json_after: str = ""
    """Text that is drawn after it, before what ends the generation."""


class Failure(Part):
    """Why something failed, and whose doing it was. Failure is a value."""

    origin: Literal["policy", "environment", "infrastructure", "operator"]
    """What `policy` caused is data; what `infrastructure` caused is never a reward."""
    code: str
    """What went wrong, in snake_case, for programs: as `unknown_environment`, `expired`."""
    message: str = ""
    """What went wrong, for people."""
    retryable: bool = False
    """Another attempt may succeed."""


class Use(Part):
    """Which policy plays a role, and how it is sampled."""

    policy: str
    """Name of the policy in the recipe."""
    version: I64 | None = None
    """A pinned version, for evaluation; null serves the newest."""
    sampling: Sampling


class EnvironmentUse(Part):
    """Which environment a task runs in."""

    use: str
    """Key of the recipe's `environments`; never an import path."""
    image: str = ""
    """Container image of the sandbox; empty where none is needed."""
    mode: Literal["ephemeral", "persistent"] = "ephemeral"
    """`ephemeral`: made afresh and destroyed; `persistent`: pooled and reset."""
    options: str = "{}"
    """JSON: the task's own options, over the recipe's."""


class RunStateEntered(Event):
    """The run's life, written by the operator."""

    id_fields = ("namespace", "state")
    key_fields = ("namespace",)

    namespace: str
    """The run's namespace: the first part of its topics' names."""
    state: Literal["started", "ending", "ended"]
    """`ending`: no new tasks, live work is cancelled; `ended`: every process exits."""
    recipe: str = ""
    """JSON: the whole recipe, in canonical form, with `started`; else empty."""
    digest: Fixed32
    """SHA-256 of the canonical recipe."""
    reason: str = ""
    """Why the state was entered, for people."""
    versions: dict[str, str] = {}
    """Versions of the packages that matter, by name."""


class TaskSubmitted(Event):
    """Work for an agent. Its offset in the single-partition topic is the task's number."""

    id_fields = ("source", "task_id")
    key_fields = ("source", "task_id")

    source: str
    """Who submits it."""
    task_id: str
    """Unique within the source."""
    tenant: str = "default"
    """Whose quota it counts against."""
    purpose: Literal["train", "evaluate"] = "train"
    """`evaluate`: its trajectories are never trained on."""
    item_id: str
    """The data set item, over which statistics run."""
    epoch: I32 = 0
    """Pass over the data set, from 0."""
    agent: str
    """Key of the recipe's `agents`."""
    options: str = "{}"
    """JSON: the task's options for its agent, over the recipe's."""
    environment: EnvironmentUse | None = None
    """Null where the agent needs none."""
    roles: dict[str, Use]
    """Role name to policy; the role `policy` is the default one."""
    payload: str = "{}"
    """JSON: what the environment and the agent are told."""
    artifacts: tuple[Blob, ...] = ()
    """Files that the task comes with."""
    samples: I32 = 1
    """Episodes of this task: the size of its group."""
    minimum: I32 = 1
    """Fewest usable samples that still make a group."""
    max_turns: I32
    """Most turns of one episode."""
    max_tokens: I32
    """Most sampled tokens of one episode."""
    deadline_s: I32
    """Seconds from an episode's start to its deadline."""
    attempts: I32 = 3
    """Most attempts of an episode; infrastructure failures use them up."""
    priority: I32 = 0
    """Handed to the engine; higher goes first."""
    seed: I64 = 0
    """Seed that the episodes' seeds are derived from."""
    labels: dict[str, str] = {}
    """Anything the submitter wants to find again."""


class TaskCancelled(Event):
    """Nobody wants the task any more: what waits is not started, what runs ends, unrewarded.

    It holds for the task of that source and id whether it was submitted before or is later. One
    that has ended stays as it is.
    """

    id_fields = ("source", "task_id")
    key_fields = ("source", "task_id")

    source: str
    task_id: str
    reason: str = ""
    """Why, for people: it goes into the outcomes."""


class EpisodeStarted(Event):
    """The scheduler admitted one sample of a task, or refuses it by `verdict`."""

    id_fields = ("task", "sample")
    key_fields = ("task",)

    task: N63
    """The task's number: its offset in `tasks`."""
    sample: N31
    attempt: N31 = 0
    """The first attempt's number."""
    submitted: TaskSubmitted
    """The task, whole: no look-up is needed to run it."""
    seed: I64
    """Seed of the episode: of its agent and its environment."""
    deadline: Millis
    """When the episode ends whatever its state."""
    verdict: Failure | None = None
    """Set where the episode must end at once: refused, duplicate, cancelled, overdue."""


class GenerationRequested(Event):
    """A prompt. The token ids so far, and the new text that is not yet tokenized."""

    id_fields = ("task", "sample", "attempt", "call")
    key_fields = ("task",)

    task: N63
    sample: N31
    attempt: N31 = 0
    call: str
    """Path of the request within the attempt."""
    policy: str
    pinned: I64 | None = None
    """A version to be served with, or null for the newest."""
    kind: Literal["generate", "score"] = "generate"
    """`score`: only the logprobs of `tokens` are asked for."""
    tokens: bytes = b""
    """i32[]: the whole context so far, as token ids."""
    text: str = ""
    """New text, appended to the context after tokenizing."""
    chat: str = ""
    """JSON: new `messages`, and in an empty context `tools`, for the model's own chat template to
    append instead of text."""
    demonstration: str | None = None
    """What the policy should say: the answer is this, tokenized and ended as the sampling has it,
    and nothing is drawn. Null asks the policy itself."""
    sampling: Sampling
    priority: I32 = 0
    """Higher goes first."""
    expires_at: Millis
    """An answer after it is of no use: the request may be dropped then."""
    digest: Fixed16
    """Of the request's meaning: not of its expiry or priority."""


class GenerationCompleted(Event):
    """The answer to a GenerationRequested."""

    id_fields = ("task", "sample", "attempt", "call")
    key_fields = ("task",)

    task: N63
    sample: N31
    attempt: N31 = 0
    call: str
    digest: Fixed16
    """The request's digest: an answer to another meaning doesn't count."""
    policy: str
    worker: str
    """Id of the inference worker."""
    finish: Literal["stop", "length", "overflow", "failed"]
    """`stop`: by a stop id or text; `length`: at max_tokens; `overflow`: the context won't fit."""
    prompt_added: bytes = b""
    """i32[]: ids of the request's new text."""
    tokens: bytes = b""
    """i32[]: the sampled ids, or the demonstrated ones."""
    text: str = ""
    """These tokens as text."""
    logprobs: bytes = b""
    """f32[]: one a sampled token, after temperature and masks; none for demonstrated ones."""
    versions: bytes = b""
    """spans: the policy version of every sampled token; none for demonstrated ones."""
    kv: Literal["fresh", "mixed"] = "fresh"
    """`mixed`: part of the KV cache was computed by an older version."""
    prompt_tokens: N31 = 0
    """Tokens of the context, new text included."""
    cached_tokens: N31 = 0
    """Of them, how many were served from the KV cache."""
    queue_ms: N31 = 0
    """Milliseconds until the engine took the request."""
    run_ms: N31 = 0
    """Milliseconds in the engine."""
    failure: Failure | None = None
    """Set exactly where `finish` is `failed`."""


class ActionRequested(Event):
    """What an agent asks of an environment."""

    id_fields = ("task", "sample", "attempt", "call")
    key_fields = ("task",)

    task: N63
    sample: N31
    attempt: N31 = 0
    call: str
    index: N31
    """0 is the reset; steps count from 1, without gaps."""
    kind: Literal["reset", "step", "score", "close"]
    """`score` judges, without a step; `close` ends the environment."""
    environment: EnvironmentUse
    payload: str = "{}"
    """JSON: the task's payload with `reset`; else {"action": text}."""
    artifacts: tuple[Blob, ...] = ()
    """Files of the task, with `reset`."""
    seed: I64 = 0
    """Seed of the environment, with `reset`."""
    expires_at: Millis
    """The episode's deadline: the environment dies then, even without `close`."""
    repeatable: bool = False
    """Doing it twice is as good as once."""
    digest: Fixed16
    """Of the request's meaning: not of its expiry."""


class ObservationRecorded(Event):
    """What an environment answered to an ActionRequested."""

    id_fields = ("task", "sample", "attempt", "call")
    key_fields = ("task",)

    task: N63
    sample: N31
    attempt: N31 = 0
    call: str
    index: N31
    """The request's index."""
    digest: Fixed16
    """The request's digest: an answer to another meaning doesn't count."""
    text: str = ""
    """What the agent sees."""
    data: str = "{}"
    """JSON: what the agent's program sees beside the text."""
    artifacts: tuple[Blob, ...] = ()
    """Files that the environment made."""
    reward: float | None = None
    """Of this step; null where none was given."""
    rewards: dict[str, float] = {}
    """Named components of the reward, for reports."""
    terminated: bool = False
    """The environment reached an end of its own."""
    truncated: bool = False
    """The environment was cut short by a limit of its own."""
    state: Fixed16 | None = None
    """Digest of the environment's state, to check re-stepping by."""
    instance: str = ""
    """Id of the sandbox or worker that answered."""
    run_ms: N31 = 0
    """Milliseconds in the environment."""
    failure: Failure | None = None
    """Null where the environment answered."""


class Turn(Part):
    """One exchange. A trajectory is a tree of turns: each stores only what it adds."""

    parent: I32 = -1
    """Index of the turn it continues; -1 starts a context."""
    call: str
    """The generation's request path."""
    policy: str
    role: str = "policy"
    """The agent's role that the policy plays."""
    context: bytes = b""
    """i32[]: tokens added before the sampled ones, not sampled."""
    tokens: bytes = b""
    """i32[]: sampled tokens, or demonstrated ones."""
    logprobs: bytes = b""
    """f32[], one a sampled token."""
    versions: bytes = b""
    """spans of the sampled tokens."""
    kv: Literal["fresh", "mixed"] = "fresh"
    sampling: I32 = 0
    """Index into the trajectory's `samplings`."""
    finish: str = ""
    """As in GenerationCompleted."""
    reward: float | None = None
    """Reward earned by this turn; null where none was given."""
    text: str = ""
    """For people; never retokenized."""
    trainable: bool = True
    """False keeps the turn out of the loss; it is context still."""
    demonstrated: bool = False
    """The agent said what the policy should say here: its tokens were not sampled, so they have
    neither logprobs nor versions, and are learned by cross-entropy, whatever the reward."""


Ending = Literal[
    "finished", "turn_limit", "token_limit", "deadline", "overflow", "cancelled", "failed"
]


class TrajectoryRecorded(Event):
    """One attempt of an episode, whole. It counts only if a counting EpisodeEnded names it."""

    id_fields = ("task", "sample", "attempt")
    key_fields = ("task",)

    task: N63
    sample: N31
    attempt: N31 = 0
    """The attempt recorded here; earlier ones failed."""
    source: str
    task_id: str
    item_id: str
    epoch: I32 = 0
    purpose: Literal["train", "evaluate"] = "train"
    tokenizer: str = ""
    """Digest of the tokenizer that made the ids, or empty where no policy spoke."""
    agent: str
    environment: str = ""
    """Key of the recipe's `environments`; empty where none was used."""
    samplings: tuple[Sampling, ...] = ()
    """The distinct samplings of its turns, by index."""
    turns: tuple[Turn, ...] = ()
    """Ascending: a turn follows its parent."""
    reward: float | None = None
    """Of the whole episode; null where nothing may be learned from it."""
    rewards: dict[str, float] = {}
    ending: Ending
    failures: tuple[Failure, ...] = ()
    """What failed, in earlier attempts too."""
    started: Millis
    """When the episode was started."""
    ended: Millis
    """When the attempt ended."""
    metrics: dict[str, float] = {}
    """What the agent measured, for reports."""
    artifacts: tuple[Blob, ...] = ()
    """Files worth keeping."""


class PolicyUse(Part):
    """What one policy did in an episode: all that grouping and staleness need."""

    policy: str
    role: str = "policy"
    """The agent's role that the policy played."""
    tokens: N31
    """Sampled and demonstrated tokens that may be trained on."""
    longest: N31
    """Length of its longest sequence, context included, in tokens."""
    oldest_version: I64
    """Oldest version among its sampled tokens; -1 where it sampled none: it was demonstrated."""
    turn_rewards: bytes = b""
    """f32[], one a turn of this policy; NaN where none was given."""


class EpisodeEnded(Event):
    """The one terminal record of an episode."""

    id_fields = ("task", "sample")
    key_fields = ("task",)

    task: N63
    sample: N31
    attempt: N31 = 0
    """The attempt that counts."""
    tenant: str = "default"
    purpose: Literal["train", "evaluate"] = "train"
    item_id: str
    epoch: I32 = 0
    ending: Ending
    failure: Failure | None = None
    """Why it failed or was refused; null where it did neither."""
    trajectory: Ref | None = None
    """The trajectory that counts; null where none was recorded."""
    reward: float | None = None
    """Null where nothing may be learned from the episode."""
    rewards: dict[str, float] = {}
    policies: tuple[PolicyUse, ...] = ()
    """One for each policy that spoke."""
    attempts: N31 = 1
    """How many attempts were made."""
    seconds: float = 0.0
    """From the start in the log to the end."""


class TaskEnded(Event):
    """The one terminal record of a task, with the outcomes of all its samples."""

    id_fields = ("task",)
    key_fields = ("task",)

    task: N63
    source: str
    task_id: str
    tenant: str = "default"
    purpose: Literal["train", "evaluate"] = "train"
    item_id: str
    epoch: I32 = 0
    closed_by: Literal["all", "cancelled", "refused"]
    """`all`: every sample ended by itself."""
    minimum: I32 = 1
    """Fewest usable samples that still make a group."""
    outcomes: tuple[EpisodeEnded, ...]
    """One for each sample, the first in the log of each."""


class Exclusion(Part):
    """A sample that its group leaves out."""

    sample: N31
    reason: str
    """Why, in snake_case."""


class GroupSample(Part):
    """A sample that may be trained on, by reference."""

    sample: N31
    trajectory: Ref
    reward: float
    """The episode's reward."""
    advantages: bytes
    """f32[]: one for all turns, or one a turn of this policy."""
    tokens: N31
    """Tokens of this policy that may be trained on."""
    longest: N31
    """Length of its longest sequence, context included, in tokens."""
    oldest_version: I64
    """Oldest version among its sampled tokens of this policy; -1 where all were demonstrated."""


class GroupClosed(Event):
    """A task as one policy's training sees it: scored, or dropped with the reason."""

    id_fields = ("task", "policy")
    key_fields = ("task",)

    task: N63
    policy: str
    item_id: str
    epoch: I32 = 0
    verdict: Literal["scored", "dropped"]
    """`dropped`: nothing of it is trained on."""
    reason: str = ""
    """Why it was dropped, in snake_case; empty where scored."""
    estimator: str = ""
    """Name of the advantage estimator."""
    mean: float | None = None
    """Mean reward of the samples that count, but for those that were demonstrated throughout; null
    where none does."""
    deviation: float | None = None
    """Standard deviation of these rewards; null where there are none."""
    excluded: tuple[Exclusion, ...] = ()
    """The samples left out."""
    samples: tuple[GroupSample, ...] = ()
    """The samples that may be trained on; none where dropped."""
    ended: Millis = 0
    """When the task's TaskEnded was recorded, by the broker's clock: starts `batch_wait`."""


class BatchSample(Part):
    """One sample of a batch."""

    task: N63
    sample: N31
    trajectory: Ref
    advantages: bytes
    """f32[]: one for all turns, or one a turn of this policy."""
    weight: float = 1.0
    """Factor of the sample's loss."""
    tokens: N31
    """Tokens of this policy that may be trained on."""
    longest: N31
    """Length of its longest sequence, context included, in tokens."""
    oldest_version: I64
    """Oldest version among its sampled tokens of this policy; -1 where all were demonstrated."""
    use: N31 = 0
    """0 is fresh; n is the nth replay."""


class Dropped(Part):
    """What a batch decides without training on it."""

    task: N63
    sample: I32 = -1
    """Number of the sample; -1 is the whole group."""
    reason: str
    """Why, in snake_case."""


class Run(Part):
    """An inclusive run of task numbers."""

    first: N63
    """The lowest number."""
    last: N63
    """The highest number, which belongs to the run."""


class BatchAssembled(Event):
    """Batch n trains version n. Result and checkpoint in one atomic record."""

    id_fields = ("policy", "version")
    key_fields = ("policy",)

    policy: str
    version: Version
    """The version that training on this batch will produce."""
    recipe: Fixed32
    """SHA-256 of the canonical recipe."""
    seed: I64
    """Seed of the training on this batch."""
    samples: tuple[BatchSample, ...]
    """What is trained on; may be empty after `batch_wait`."""
    dropped: tuple[Dropped, ...] = ()
    """What it decides without training on it."""
    sampled_tokens: N63
    """Sum of the samples' trainable tokens: the loss's denominator."""
    reward_mean: float | None = None
    """Mean reward of all tasks it decides, filtered ones included, infrastructure failures not."""
    low_mark: N63
    """All task numbers below it are decided."""
    decided: tuple[Run, ...] = ()
    """Runs decided above the low mark."""
    groups_read: N63
    """Offset in `groups` of the oldest group read and undecided: where recovery seeks."""

    @model_validator(mode="after")
    def _is_a_frontier(self) -> BatchAssembled:
        self.frontier()
        return self

    def frontier(self) -> Frontier:
        """Builds the set of task numbers that are decided once this batch is written."""
        return Frontier(self.low_mark, ((run.first, run.last) for run in self.decided))


class WeightsDelta(Part):
    """What makes one version's weights of another's: `docs/weights.md` has the file's format."""

    blob: Blob
    """The delta's file."""
    from_version: Version
    """The version that it is applied to."""
    to_version: Version
    """The version that comes of it."""


class Adapter(Part):
    """What a policy's weights are an adapter of (LoRA), and how much they count."""

    base: Blob
    """The frozen weights of the whole model, a safetensors file."""
    base_digest: Fixed32
    """Of the base, as the publication's is of the adapter."""
    rank: N31
    """Of the adapter's pairs of matrices, at least 1."""
    alpha: float
    """A pair's product is added to its layer's weights alpha / rank times."""
    targets: tuple[str, ...]
    """The layers that have a pair, by their full names."""


class PolicyPublished(Event):
    """A version of a policy. Its weights lie in the blob store before this record is written."""

    id_fields = ("policy", "version", "digest")
    key_fields = ("policy",)

    policy: str
    version: Version
    """0 is the start; batch n trains version n."""
    status: Literal["initial", "trained", "skipped", "resumed"]
    """`initial`: version 0; `skipped`: weights unchanged; `resumed`: published anew on restart."""
    batch: Ref | None = None
    """The batch that it was trained on; null for version 0."""
    digest: Fixed32
    """Of the weights: names and bytes, independent of file layout."""
    full: Blob | None = None
    """The whole weights of `full_version`; null where the store does not have them."""
    full_version: Version
    """The version whose `full` weights these build on."""
    deltas: tuple[WeightsDelta, ...] = ()
    """What to apply to `full`, in this order, for these weights; empty where they are `full`."""
    base: str = ""
    """The base model's name; empty where unknown."""
    format: str = "safetensors"
    """File format of the weights."""
    dtype: str = "float32"
    """Number format of the weights."""
    tokenizer: Blob | None = None
    """The tokenizer's file; null where the model's folder has it."""
    context: N31 = 0
    """Context length in tokens; 0 where unknown."""
    adapter: Adapter | None = None
    """Where the weights are no whole model but an adapter, named as PEFT names them; else null."""
    updates: N31 = 1
    """Optimizer updates in this version."""
    wait_s: float = 0.0
    """Seconds the trainer waited for its batch."""
    step_s: float = 0.0
    """Seconds of training."""
    metrics: dict[str, float] = {}
    """Loss, gradient norm and the like, by name."""

    def weight_blobs(self) -> list[Blob]:
        """Returns the blobs that this version's weights are made of."""
        blobs = [] if self.full is None else [self.full]
        blobs += [delta.blob for delta in self.deltas]
        return blobs if self.adapter is None else [*blobs, self.adapter.base]


class InstanceStateEntered(Event):
    """A worker or a sandbox has entered a state of its life. It tells; nothing is decided by it."""

    id_fields = ("instance", "worker", "number")
    key_fields = ("instance",)

    instance: str
    """Id of the worker or of the sandbox."""
    worker: str
    """Id of the worker that says so. A sandbox may outlive the one that made it."""
    number: N31
    """Number of what this worker says of this instance, from 0."""
    kind: Literal["worker", "sandbox"]
    """What it is: a process of a service, or a container of an episode."""
    state: Literal["provisioning", "ready", "busy", "failed", "gone"]
    """`provisioning`: nothing is sent to it yet; `ready`: it may be; `busy`: an episode has it."""
    host: str = ""
    """Name of the worker's host."""
    reason: str = ""
    """Why the state was entered, for people."""


EVENTS: tuple[type[Event], ...] = (
    RunStateEntered,
    TaskSubmitted,
    TaskCancelled,
    EpisodeStarted,
    GenerationRequested,
    GenerationCompleted,
    ActionRequested,
    ObservationRecorded,
    TrajectoryRecorded,
    EpisodeEnded,
    TaskEnded,
    GroupClosed,
    BatchAssembled,
    PolicyPublished,
    InstanceStateEntered,
)
