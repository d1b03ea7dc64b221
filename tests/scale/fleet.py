"""What a simulated deployment has, and what it meets. Times in seconds, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

GIGABIT = 1e9 / 8


@dataclass(frozen=True)
class Region:
    """Where workers are. Kafka, the scheduler, the batch jobs and the trainer are at home."""

    name: str = "home"
    delay_s: float = 0.0
    """From here to Kafka, one way."""
    bytes_per_s: float | None = None
    """Of the link to the blob store, which all workers of the region share. None: at home, where
    weights come from a folder."""


HOME = Region()


@dataclass(frozen=True)
class Pool:
    """Inference workers that are alike."""

    workers: int
    speed: float = 1.0
    region: Region = HOME
    hosts: int = 0
    """Workers of a host fetch a version once for all of them. 0: each fetches for itself."""
    joins_s: float = 0.0


@dataclass(frozen=True)
class Work:
    """The episodes. Numbers of a random size are log-normal: a median, and the standard deviation
    of the logarithm."""

    samples: int = 1
    turns: float = 1.0
    turns_sigma: float = 0.0
    most_turns: int = 100
    shared: int = 1500
    """Tokens that all samples of a task begin with."""
    generated: float = 300.0
    generated_sigma: float = 0.7
    most_generated: int = 4096
    observed: int = 500
    """Tokens that the environment adds after each turn."""
    most_context: int = 32_000
    step_s: float = 5.0
    step_sigma: float = 0.8
    start_s: float = 0.0
    """Median time until an environment is ready."""
    start_sigma: float = 0.3


@dataclass(frozen=True)
class Training:
    """The trainer, and the weights that it publishes."""

    groups: int
    """Groups of a batch."""
    train_s: float
    full_bytes: float
    delta_bytes: float
    full_every: int = 20
    home_load_s: float = 3.0
    """From a publication until a worker at home has read the version."""
    pause_s: float = 1.0
    """For which an engine stops to take a version over."""
    prefetch: int = 1
    max_staleness: int = 32


@dataclass(frozen=True)
class Losses:
    """Machines that go. Each has the same chance in each hour."""

    inference_per_h: float = 0.0
    environments_per_h: float = 0.0
    """An environment has an instance of its own."""
    replaced_s: float = 300.0
    """Until a new inference worker serves in place of a lost one."""


@dataclass(frozen=True)
class Fleet:
    """A deployment, its work, and for how long it is simulated."""

    pools: tuple[Pool, ...]
    work: Work
    live: int
    """Live episodes at most."""
    seconds: float
    tasks: int | None = None
    """The run ends when so many have ended. None: only the time ends it."""
    versions: int | None = None
    """The run ends when so many versions are published."""
    training: Training | None = None
    losses: Losses = field(default_factory=Losses)
    slots: int = 64
    cache: int = 1_500_000
    """Tokens that the prefix cache of a worker holds."""
    agents: int = 4
    agents_region: Region = HOME
    """Where agents and environments are."""
    partitions: int = 64
    """`pool_partitions`."""
    attempts: int = 3
    deadline_s: float = 4 * 3600.0
    warm_s: float = 0.0
    """Measured from then on."""
    seed: int = 0
