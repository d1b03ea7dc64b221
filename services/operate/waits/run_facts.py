"""What is known of a live run: a fold over its log, and what is known beside it. Pure.

Memory is bounded by the live episodes: at most MOST_EPISODES of them and MOST_TASKS tasks that wait
are known one by one, and the others are counted. Requests and answers are known by the ids in their
headers, so that nothing has to decode them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.schemas.events import (
    BatchAssembled,
    EpisodeEnded,
    EpisodeStarted,
    Event,
    GroupClosed,
    InstanceStateEntered,
    LimitSet,
    LoadReported,
    PolicyPublished,
    QuotaSet,
    RunStateEntered,
    TaskSubmitted,
)
from headrace.schemas.recipe.limit_settings import Tenant
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.kafka.broker import Partition, Position
from headrace.services.operate.waits.heard_workers import HeardWorkers
from headrace.services.operate.waits.policy_facts import PolicyFacts
from headrace.services.worker.limits.limits_of import (
    all_limits,
    environment_limits,
    limits_of_use,
)
from headrace.services.worker.worker_loads import EnvironmentLoads, WorkerLoads

MOST_EPISODES = 20_000
MOST_TASKS = 10_000
MOST_ENDED = 100_000
"""Ids of ended episodes that are remembered, so that late requests don't open them again."""
MOST_ANSWERS = 256
"""Answered requests of a live episode that are remembered, the newest ones."""
MOST_EARLY = 20_000
"""Episodes of which only requests or answers were read so far, the newest ones: an answer that
comes after its episode's end may be read without it."""
LONGEST_NUMBER = 18
"""Digits of a number in an id. Any program may write any header."""

EpisodeId = tuple[int, int]
"""Task number, sample."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt or an action that has no answer yet."""

    kind: str
    """`prompt` or `action`."""
    id: str
    """`task/sample/attempt/call`."""
    at: float
    """When it was recorded, in epoch seconds."""
    position: Position
    policy: str = ""
    """Of a prompt."""

    @property
    def call(self) -> str:
        """Path of the request within its attempt."""
        return self.id.split("/", 3)[3]


@dataclass(frozen=True, slots=True)
class ActionDetail:
    """What an action asks for."""

    environment: str
    scores: bool
    """Whether a judge shall score."""


@dataclass(slots=True)
class LiveEpisode:
    """An episode that was started and has not ended."""

    started: EpisodeStarted | None = None
    """None: only its requests have been read so far."""
    at: float = 0.0
    """When it was started."""
    newest: float = 0.0
    """When its newest request or answer was recorded."""
    attempt: int = 0
    requests: dict[str, Request] = field(default_factory=dict)
    """Requests of the newest attempt without an answer, by id."""
    answered: OrderedDict[str, None] = field(default_factory=OrderedDict)


@dataclass(frozen=True, slots=True)
class WaitingFact:
    """A task that was submitted and has not started."""

    at: float
    tenant: str
    purpose: str
    environment: str
    image: str
    policies: frozenset[str]
    samples: int


@dataclass(frozen=True, slots=True)
class MemberCount:
    """A consumer group as it is now."""

    members: int
    lag: int
    """Records that it has not processed yet."""
    since: float
    """Since when its number of members is what it is. 0: since before it was watched."""


@dataclass(frozen=True, slots=True)
class SideProblem:
    """A problem that the log does not show."""

    kind: str
    """`disk`, `weights`, `blobs`, or `broker`: the broker's disk."""
    name: str
    since: float
    """When it was first seen, in epoch seconds."""
    cause: str
    help: str
    policy: str = ""
    """The policy whose work it stops. Empty: that of all."""


class RunFacts:
    """Folds the events of a run. Times are epoch seconds, by the broker's clock."""

    def __init__(self, recipe: Recipe, *, partitions: tuple[int, int] = (0, 0)) -> None:
        """`partitions` are the numbers of partitions of prompts and of actions."""
        self.recipe = recipe
        self.started_at = 0.0
        self.state = "started"
        self.episodes: dict[EpisodeId, LiveEpisode] = {}
        """Those that were started."""
        self._early: OrderedDict[EpisodeId, LiveEpisode] = OrderedDict()
        """Those whose start has not been read."""
        self.more_episodes = 0
        """Live episodes beyond MOST_EPISODES."""
        self.ended: OrderedDict[EpisodeId, None] = OrderedDict()
        self.tasks: dict[int, WaitingFact] = {}
        self.more_tasks = 0
        """Tasks that wait and are not in `tasks`."""
        self.known_starts: OrderedDict[int, None] = OrderedDict()
        self.policies = {name: PolicyFacts(recipe, name) for name in recipe.policies}
        self.tenants: dict[str, Tenant] = dict(recipe.scheduler.tenants)
        self.limits = {
            name: limit.units
            for name, limit in (all_limits(recipe) | environment_limits(recipe)).items()
        }
        self.pools = WorkerLoads(recipe.policies, partitions[0])
        self.environments = EnvironmentLoads(recipe.environments, partitions[1])
        self.workers = HeardWorkers(recipe.policies)
        self.answered_in: dict[Partition, float] = {}
        """When the newest answer to a known request in a partition came."""
        self.members: dict[str, MemberCount] = {}
        """By service."""
        self.details: dict[str, ActionDetail] = {}
        """By id: the oldest open actions."""
        self.ended_here: dict[str, float] = {}
        """Workers whose processes have gone from this machine, to when that was first seen."""
        self.problems: list[SideProblem] = []
        self.errors: dict[str, str] = {}
        """Service to the newest error in its log on this machine."""
        self.answered_at: float | None = None
        """When the broker answered last. None: it is not watched."""

    def on_event(self, event: Event, at: float, offset: int) -> None:
        """Adds an event that was recorded at `at`, at this offset."""
        match event:
            case EpisodeStarted():
                self._on_start(event, at)
            case EpisodeEnded():
                self._on_end((event.task, event.sample))
            case TaskSubmitted():
                self._on_task(event, at, offset)
            case GroupClosed() | BatchAssembled() | PolicyPublished():
                if event.policy in self.policies:
                    self.policies[event.policy].on_event(event, at)
            case LoadReported():
                self.pools.on_report(event, at)
                self.environments.on_report(event, at)
                self.workers.on_report(event, at)
            case InstanceStateEntered():
                self.workers.on_life(event, at)
            case _:
                self._on_setting(event, at)

    def _on_setting(self, event: Event, at: float) -> None:
        match event:
            case QuotaSet():
                limits = Tenant(weight=event.weight, live_episodes=event.live_episodes)
                self.tenants[event.tenant] = limits
            case LimitSet():
                self.limits[event.limit] = event.units
            case RunStateEntered():
                self.state = event.state
                if event.state == "started":
                    self.started_at = at

    def on_request(self, request: Request) -> None:
        """Adds a prompt or an action."""
        episode, attempt = self._of(request.id)
        if episode is None or attempt < episode.attempt or request.call.endswith(".close"):
            return  # a close has no answer
        if attempt > episode.attempt:
            episode.attempt = attempt
            episode.requests.clear()
        episode.newest = max(episode.newest, request.at)
        if request.id not in episode.answered:
            episode.requests.setdefault(request.id, request)

    def on_answer(self, identity: str, at: float) -> None:
        """Adds a generation or an observation."""
        episode, _ = self._of(identity)
        if episode is None:
            return
        episode.newest = max(episode.newest, at)
        if (request := episode.requests.pop(identity, None)) is not None:
            partition = request.position.partition
            self.answered_in[partition] = max(at, self.answered_in.get(partition, 0.0))
        episode.answered[identity] = None
        while len(episode.answered) > MOST_ANSWERS:
            episode.answered.popitem(last=False)

    def _of(self, identity: str) -> tuple[LiveEpisode | None, int]:
        """Returns the episode of a request, and the number of the attempt. None if it has ended."""
        parts = identity.split("/", 3)
        if len(parts) < 4 or not all(
            part.isdecimal() and len(part) <= LONGEST_NUMBER for part in parts[:3]
        ):
            return None, 0
        return self._episode((int(parts[0]), int(parts[1]))), int(parts[2])

    def _episode(self, key: EpisodeId) -> LiveEpisode | None:
        """Returns a live episode, also if its start has not been read yet."""
        if key in self.ended:
            return None
        known = self.episodes.get(key)
        if known is None:
            known = self._early.setdefault(key, LiveEpisode())
            if len(self._early) > MOST_EARLY:
                self._early.popitem(last=False)
        return known

    def _on_start(self, started: EpisodeStarted, at: float) -> None:
        if self.tasks.pop(started.task, None) is None and started.task not in self.known_starts:
            self.more_tasks -= self.more_tasks > 0
            self.known_starts[started.task] = None
            while len(self.known_starts) > MOST_ENDED:
                self.known_starts.popitem(last=False)
        self._add_episode(started, at)
        if started.verdict is None and started.submitted.purpose == "train":
            for policy in self.policies.values():
                policy.on_start(started.task)

    def _add_episode(self, started: EpisodeStarted, at: float) -> None:
        key = started.task, started.sample
        if key in self.ended or key in self.episodes:
            return
        episode = self._early.pop(key, None) or LiveEpisode()
        if len(self.episodes) >= MOST_EPISODES:
            self.more_episodes += 1
            return
        episode.started, episode.at = started, at
        episode.newest = max(episode.newest, at)
        self.episodes[key] = episode

    def _on_end(self, key: EpisodeId) -> None:
        self._early.pop(key, None)
        if key in self.ended:
            return
        if self.episodes.pop(key, None) is None and self.more_episodes:
            self.more_episodes -= 1
        self.ended[key] = None
        while len(self.ended) > MOST_ENDED:
            self.ended.popitem(last=False)

    def _on_task(self, task: TaskSubmitted, at: float, number: int) -> None:
        if number in self.known_starts:
            return
        if len(self.tasks) >= MOST_TASKS:
            self.more_tasks += 1
            return
        environment = task.environment
        self.tasks[number] = WaitingFact(
            at=at,
            tenant=task.tenant,
            purpose=task.purpose,
            environment="" if environment is None else environment.use,
            image="" if environment is None else environment.image,
            policies=frozenset(use.policy for use in task.roles.values()),
            samples=task.samples,
        )

    def paused_at(self, now: float) -> float | None:
        """Returns since when no process of the run runs. None: one does, or none was heard of."""
        if any(one.members for one in self.members.values()):
            return None
        return self.workers.ended_at(now, self.ended_here)

    def live_of(self, purpose: str) -> int:
        """Returns how many episodes of a purpose are live."""
        return sum(
            one.started is not None and one.started.submitted.purpose == purpose
            for one in self.episodes.values()
        )

    def live_by(self) -> tuple[Mapping[tuple[str, str], int], Mapping[str, int]]:
        """Returns the live episodes by tenant and purpose, and by limit of `limits_of_use`."""
        tenants: Counter[tuple[str, str]] = Counter()
        limits: Counter[str] = Counter()
        for one in self.episodes.values():
            if one.started is not None:
                task = one.started.submitted
                tenants[task.tenant, task.purpose] += 1
                if (use := task.environment) is not None:
                    limits.update(limits_of_use(self.recipe, use.use, use.image))
        return tenants, limits
