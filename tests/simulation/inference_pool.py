"""A pool of inference workers with prefix caches, and episodes of many turns. No Kafka, no clock.

A worker shares its compute among the prompts in its slots. A prompt needs compute for the tokens of
its context that are not in the prefix cache, and for the tokens that it generates, each of which
takes a least time. The figures are about those of a model of 8B on one GPU: 20,000 prompt tokens or
12,000 generated ones a second, and 20 ms for a token.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from random import Random
from statistics import quantiles

from headrace.schemas import packed
from headrace.schemas.events import GenerationRequested, LoadReported, PoolLoad, Sampling
from headrace.services.agent.routing.prompt_routes import PromptRoutes

PREFILL, DECODE, TOKEN_S = 20_000.0, 12_000.0, 0.02
STEP_S = 0.1
REPORT_S = 1.0
PARTITIONS = 64


@dataclass(frozen=True)
class Pool:
    """What is simulated."""

    speeds: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0)
    slots: int = 64
    live: int = 400
    turns: int = 20
    """Median number of turns of an episode."""
    shared: int = 1500
    """Tokens that all samples of a task begin with."""
    generated: int = 300
    """Median number of tokens of a generation."""
    observed: int = 500
    """Tokens that the environment adds after each turn."""
    thinking_s: float = 5.0
    """Median time in the environment."""
    cache: int = 1_500_000
    """Tokens that a worker's prefix cache holds."""
    agents: int = 1
    joins_s: float | None = None
    """When the last worker joins; None: at the start."""
    seconds: float = 600.0
    routed: bool = True
    """Without it the task decides, as the key of a record does."""
    seed: int = 0


@dataclass
class Result:
    """What the pool did after the first third of the time."""

    tokens: dict[str, int] = field(default_factory=dict)
    """Generated tokens by worker."""
    cached: int = 0
    prompted: int = 0
    waits: list[float] = field(default_factory=list)
    """From sending a prompt to its answer."""
    first_s: dict[str, float] = field(default_factory=dict)
    """When each worker gave its first answer."""

    @property
    def total(self) -> int:
        return sum(self.tokens.values())

    @property
    def hits(self) -> float:
        """The share of the prompts' tokens that came from a prefix cache."""
        return self.cached / self.prompted

    def shares(self) -> dict[str, float]:
        return {worker: count / self.total for worker, count in self.tokens.items()}

    def p99(self) -> float:
        return quantiles(self.waits, n=100)[98]


@dataclass
class Episode:
    number: int
    agent: int
    turns: int
    context: int
    turn: int = 0
    home: str | None = None

    @property
    def task(self) -> int:
        return self.number // 8


@dataclass
class Prompt:
    episode: Episode
    sent_s: float
    tokens: int
    route: AbstractContextManager[int | None]
    began_s: float = 0.0
    compute: float = 0.0
    least_s: float = 0.0


@dataclass
class Worker:
    """One engine."""

    name: str
    speed: float
    pool: Pool
    active: list[Prompt] = field(default_factory=list)
    waiting: deque[Prompt] = field(default_factory=deque)
    prefixes: OrderedDict[tuple[str, int], int] = field(default_factory=OrderedDict)
    cached: int = 0
    run_s: float = 0.0
    answered: int = 0

    def report(self, number: int, partitions: list[int]) -> LoadReported:
        load = PoolLoad(
            policy="p",
            partitions=packed.pack_i32(partitions),
            slots=self.pool.slots,
            busy=len(self.active),
            waiting=len(self.waiting),
            run_ms=int(1000 * self.run_s),
        )
        return LoadReported(worker=self.name, number=number, every_ms=1000, pools=(load,))

    def admit(self, now_s: float, result: Result) -> None:
        while self.waiting and len(self.active) < self.pool.slots:
            prompt = self.waiting.popleft()
            episode = prompt.episode
            cached = self._cached(episode)
            if not cached:
                self._cache(("task", episode.task), min(episode.context, self.pool.shared))
            result.cached += cached
            result.prompted += episode.context
            prompt.began_s = now_s
            prompt.compute = (episode.context - cached) / PREFILL + prompt.tokens / DECODE
            prompt.least_s = prompt.tokens * TOKEN_S / self.speed
            self.active.append(prompt)

    def step(self, now_s: float) -> list[Prompt]:
        """Works for STEP_S. Returns what has ended."""
        wanted = [one.compute / max(one.least_s, STEP_S) * STEP_S for one in self.active]
        share = min(1.0, self.speed * STEP_S / sum(wanted)) if wanted else 1.0
        done = []
        for one, compute in zip(self.active, wanted, strict=True):
            one.compute -= compute * share
            one.least_s -= STEP_S * share
            if one.least_s <= STEP_S / 2:
                done.append(one)
        for one in done:
            self.active.remove(one)
            self.answered += 1
            self.run_s += (now_s + STEP_S - one.began_s - self.run_s) / min(64, self.answered)
            one.episode.context += one.tokens
            self._cache(("episode", one.episode.number), one.episode.context)
        return done

    def _cached(self, episode: Episode) -> int:
        keys = (("episode", episode.number), ("task", episode.task))
        return max((self.prefixes.get(key, 0) for key in keys), default=0)

    def _cache(self, key: tuple[str, int], tokens: int) -> None:
        self.cached += tokens - self.prefixes.pop(key, 0)
        self.prefixes[key] = tokens
        while self.cached > self.pool.cache:
            self.cached -= self.prefixes.popitem(last=False)[1]


class Simulation:
    """Runs a pool."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.result = Result()
        self._chance = Random(pool.seed)
        self._workers = [Worker(str(n), speed, pool) for n, speed in enumerate(pool.speeds)]
        self._routes = [
            PromptRoutes(["p"], PARTITIONS, lambda: pool.agents, seed=number)
            for number in range(pool.agents)
        ]
        self._made = 0
        self._wakes: list[tuple[float, int, Episode]] = []
        self._order = 0
        self._reported = 0

    def run(self) -> Result:
        for _ in range(self.pool.live):
            self._wake(self._chance.random() * 30, self._episode())
        now_s = 0.0
        for step in range(int(self.pool.seconds / STEP_S)):
            now_s = step * STEP_S
            if step % int(REPORT_S / STEP_S) == 0:
                self._report(now_s)
            while self._wakes and self._wakes[0][0] <= now_s:
                self._send(heapq.heappop(self._wakes)[2], now_s)
            for worker in self._joined(now_s):
                worker.admit(now_s, self.result)
                for prompt in worker.step(now_s):
                    self._answered(worker, prompt, now_s + STEP_S)
        return self.result

    def _joined(self, now_s: float) -> list[Worker]:
        late = self.pool.joins_s is not None and now_s < self.pool.joins_s
        return self._workers[:-1] if late else self._workers

    def _report(self, now_s: float) -> None:
        joined = self._joined(now_s)
        for number, worker in enumerate(joined):
            partitions = list(range(number, PARTITIONS, len(joined)))
            report = worker.report(self._reported, partitions)
            for routes in self._routes:
                routes.on_report(report, now_s)
        self._reported += 1

    def _episode(self) -> Episode:
        number, self._made = self._made, self._made + 1
        turns = max(1, round(self._chance.lognormvariate(math.log(self.pool.turns), 0.5)))
        agent = number // 8 % self.pool.agents
        return Episode(number, agent, turns, self.pool.shared)

    def _wake(self, at_s: float, episode: Episode) -> None:
        self._order += 1
        heapq.heappush(self._wakes, (at_s, self._order, episode))

    def _send(self, episode: Episode, now_s: float) -> None:
        request = GenerationRequested(
            task=episode.task,
            sample=episode.number % 8,
            call=str(episode.turn),
            policy="p",
            sampling=Sampling(max_tokens=1),
            expires_at=0,
            digest=bytes(16),
        )
        route = self._routes[episode.agent].route(request, episode.home, now_s)
        partition = route.__enter__()
        if partition is None or not self.pool.routed:
            partition = hash((episode.task, 7)) % PARTITIONS
        tokens = max(20, round(self._chance.lognormvariate(math.log(self.pool.generated), 0.7)))
        owner = self._workers[partition % len(self._joined(now_s))]
        owner.waiting.append(Prompt(episode, now_s, tokens, route))

    def _answered(self, worker: Worker, prompt: Prompt, now_s: float) -> None:
        prompt.route.__exit__(None, None, None)
        self.result.first_s.setdefault(worker.name, now_s)
        if now_s > self.pool.seconds / 3:
            tokens = self.result.tokens
            tokens[worker.name] = tokens.get(worker.name, 0) + prompt.tokens
            self.result.waits.append(now_s - prompt.sent_s)
        episode = prompt.episode
        episode.home = worker.name
        episode.turn += 1
        episode.context += self.pool.observed
        if episode.turn >= episode.turns or episode.context > 32_000:
            episode = self._episode()
        thinking_s = self._chance.lognormvariate(math.log(self.pool.thinking_s), 0.8)
        self._wake(now_s + thinking_s, episode)
