"""A simulated inference worker: slots, a prefix cache, and compute that its prompts share.

The figures are about those of a model of 8B on one GPU (`tests/simulation/inference_pool.py`).
Weights are loaded as the product loads them: the worker fetches the newest version while it goes on
with the old one, and draws with the new one after a pause. A prompt waits until its engine has the
version that was the newest when its episode began, but at most for LOAD_WAIT_S.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from headrace.schemas import packed
from headrace.schemas.events import GenerationRequested, LoadReported, PoolLoad
from headrace.services.inference.serving import LOAD_WAIT_S
from tests.scale.fleet import Fleet, Pool
from tests.scale.fluid import Events, Shared
from tests.simulation.inference_pool import DECODE, PREFILL, TOKEN_S

POLICY = "default"
NEWEST = 64


@dataclass(eq=False)
class SimulatedEpisode:
    """An attempt at an episode."""

    task: int
    sample: int
    began_s: float
    minimum: int
    """The newest version when it was started."""
    attempt: int = 0
    turns: int = 0
    turn: int = 0
    context: int = 0
    generated: int = 0
    home: str | None = None
    oldest: int | None = None
    """The version of its first token."""
    request: GenerationRequested | None = None
    lost_at_s: float = float("inf")
    """When its environment's instance goes."""


@dataclass(eq=False)
class SimulatedPrompt:
    """A prompt, wherever it is."""

    episode: SimulatedEpisode
    tokens: int
    partition: int
    route: AbstractContextManager[int | None]
    sent_s: float
    alone_s: float = 0.0
    """How long it takes on an engine of its own, with what is cached there."""
    job: int | None = None
    began_s: float = 0.0
    version: int = -1


@dataclass
class Counted:
    """What a worker did in the measured time."""

    tokens: int = 0
    prompted: int = 0
    cached: int = 0
    repeated: int = 0
    """Prompts that were begun and abandoned."""


@dataclass(eq=False)
class SimulatedWorker:
    """One inference worker."""

    name: str
    pool: Pool
    fleet: Fleet
    events: Events
    answered: Callable[[SimulatedWorker, SimulatedPrompt], None]
    waiting: deque[SimulatedPrompt] = field(default_factory=deque)
    behind: dict[SimulatedPrompt, None] = field(default_factory=dict)
    """Prompts that wait for a version, in the order in which they came."""
    active: dict[SimulatedPrompt, None] = field(default_factory=dict)
    partitions: list[int] = field(default_factory=list)
    version: int = 0
    newest: int = 0
    alive: bool = True
    counted: Counted = field(default_factory=Counted)

    def __post_init__(self) -> None:
        self._speed = self.pool.speed
        self._compute = Shared[SimulatedPrompt](self.events, self._finish, lambda: self._speed)
        self._prefixes: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._cached = 0
        self._given_up = -1
        self._run_s = 0.0
        self._measured = 0
        self._reports = 0

    def take(self, prompt: SimulatedPrompt) -> None:
        """Takes a prompt that came from the log."""
        if max(self.version, self._given_up) < prompt.episode.minimum:
            self.behind[prompt] = None
            self.events.after(LOAD_WAIT_S, lambda: self._waited_enough(prompt))
        else:
            self.waiting.append(prompt)
            self._admit()

    def load(self, version: int) -> None:
        """Stops for a moment, and draws with another version from then on."""
        self._set_speed(0.0)
        pause_s = self.fleet.training.pause_s if self.fleet.training else 0.0
        self.events.after(pause_s, lambda: self._loaded(version))

    def abandon(self, partitions: set[int]) -> list[SimulatedPrompt]:
        """Takes back the prompts of partitions. What was generated for them is lost."""
        gone = [one for one in self.active if one.partition in partitions]
        for prompt in gone:
            del self.active[prompt]
            assert prompt.job is not None
            self._compute.remove(prompt.job)
            prompt.job = None
            self.counted.repeated += 1
        gone += [one for one in self.behind if one.partition in partitions]
        gone += [one for one in self.waiting if one.partition in partitions]
        self.behind = {one: None for one in self.behind if one.partition not in partitions}
        self.waiting = deque(one for one in self.waiting if one.partition not in partitions)
        self._admit()
        return sorted(gone, key=lambda one: (one.sent_s, one.episode.task, one.episode.sample))

    def report(self) -> LoadReported:
        """What `services/inference/service.py` reports."""
        load = PoolLoad(
            policy=POLICY,
            partitions=packed.pack_i32(self.partitions),
            slots=self.fleet.slots,
            busy=len(self.active),
            waiting=len(self.waiting) + len(self.behind),
            run_ms=int(1000 * self._run_s),
            version=self.version,
        )
        self._reports += 1
        return LoadReported(worker=self.name, number=self._reports, every_ms=1000, pools=(load,))

    def _set_speed(self, speed: float) -> None:
        self._compute.before_change()
        self._speed = speed
        self._compute.changed()

    def _loaded(self, version: int) -> None:
        self.version = version
        self._set_speed(self.pool.speed)
        for prompt in list(self.behind):
            if prompt.episode.minimum <= version:
                del self.behind[prompt]
                self.waiting.append(prompt)
        self._admit()

    def _waited_enough(self, prompt: SimulatedPrompt) -> None:
        if prompt in self.behind:
            self._given_up = max(self._given_up, min(prompt.episode.minimum, self.newest))
            del self.behind[prompt]
            self.waiting.append(prompt)
            self._admit()

    def _admit(self) -> None:
        while self.alive and self.waiting and len(self.active) < self.fleet.slots:
            prompt = self.waiting.popleft()
            episode = prompt.episode
            known = ((episode.task, episode.sample), (episode.task, -1))
            cached = max(self._prefixes.get(key, 0) for key in known)
            cached = min(cached, episode.context)
            if not cached:
                self._cache(known[1], min(episode.context, self.fleet.work.shared))
            self.counted.prompted += episode.context
            self.counted.cached += cached
            read_s = (episode.context - cached) / PREFILL
            compute_s = read_s + prompt.tokens / DECODE
            prompt.alone_s = (read_s + prompt.tokens * TOKEN_S) / self.pool.speed
            prompt.began_s, prompt.version = self.events.now_s, self.version
            self.active[prompt] = None
            prompt.job = self._compute.add(prompt, prompt.alone_s, compute_s / prompt.alone_s)

    def _cache(self, key: tuple[int, int], tokens: int) -> None:
        self._cached += tokens - self._prefixes.pop(key, 0)
        self._prefixes[key] = tokens
        while self._cached > self.fleet.cache:
            self._cached -= self._prefixes.popitem(last=False)[1]

    def _finish(self, prompt: SimulatedPrompt) -> None:
        del self.active[prompt]
        prompt.job = None
        episode = prompt.episode
        self._measured = min(self._measured + 1, NEWEST)
        self._run_s += (self.events.now_s - prompt.began_s - self._run_s) / self._measured
        self._cache((episode.task, episode.sample), episode.context + prompt.tokens)
        self.counted.tokens += prompt.tokens
        self._admit()
        self.answered(self, prompt)
