"""What a seed draws before its run begins: the recipe, its limits, and the faults that are on.

Each kind of fault is on in some runs and off in others, stronger here and weaker there (swarm
testing, Groce et al., ISSTA 2012): a run in which everything fails gets nowhere, and hides what a
single fault would show. One run in ten has none.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

from headrace.schemas.recipe.recipe import Recipe
from tests.memory.memory_faults import Faults
from tests.simulation.blobs import BlobFaults
from tests.simulation.data_algorithms import ASKED, DATA, with_data
from tests.simulation.files import FILES, with_files
from tests.simulation.several_policies import BARRIER, SEVERAL, with_several
from tests.simulation.teaching import TEACHER, with_teacher
from tests.simulation.tenant_keys import REFUSED_LIMITS, REQUESTS, with_keys
from tests.simulation.world import LETTERS, TURNS

LATENCY_S = 0.004
"""Mean virtual seconds of each way to the log."""
DEADLINE_S = 60
"""Seconds that an episode may take."""
ACTS = (
    "kill",
    "freeze",
    "expel",
    "rebalance",
    "outage",
    "twin",
    "scale",
    "restart",
    "clock",
    "garbage",
    "foreign task",
    "submit again",
    "cancel",
    "foreign transaction",
    "repeat",
    "retention",
    "damage",
)
"""Faults that strike at a moment; what each does is in `acts.py`."""
MISBEHAVIOUR = (
    "environment fails",
    "environment hangs",
    "engine fails",
    "engine breaks",
    "agent moody",
    "sandbox",
    "lies",
    "weights differ",
    "batches unusable",
)
"""Faults of what users bring."""
Timing = Literal["any", "busy", "aimed"]
"""Of acts: from the start on, once an episode has started, or then a moment after a record comes:
between two steps of what somebody does, where a death matters most."""
TIMINGS: tuple[Timing, ...] = ("busy", "aimed", "any", "any")
RUIN = "truncation"
"""An act that no run may survive in silence: of mutants alone."""
UNSAFE = frozenset({"freeze", "expel", "outage", "garbage", "clock"})
"""Acts after which two may have acted who don't know of each other."""
SLOW, DEBATE = "engine slow", "debate"
"""No misbehaviour, and no excuse: answers that take seconds, and agents that ask twice at once."""
DEMONSTRATIONS = "demonstrations"
"""Nor is this one: a warm start, and turns that are demonstrated."""
CUT = "limits"
"""Episodes run into limits of context and of time, which the recipe penalises or masks."""
TENANTS = "tenants"
"""The tenant of the tasks has a limit of live episodes."""
WAITS = "waiting tenant"
"""An act: a tenant submits tasks, or its limit is changed, at times to 0."""
UNREPORTED = "unreported"
"""The scheduler does not ask whether workers report."""
UNREAD = "unread answers"
"""A worker that takes over keeps few answers in memory, and reads the others when agents ask."""
KEPT_BYTES = "headrace.services.agent.early_answers:KEPT_BYTES"
ROOMS = "environment limits"
"""The environment of the tasks has a limit of live episodes."""
CALLS = "call limits"
"""The calls of the policies' models have limits, which the inference workers share."""
WIRE = {"lost_sends": 0.05, "unknown_commits": 0.3, "disorder": True}
"""Faults of the way to the log that `draw_only` knows, and how strong they are there."""


@dataclass
class Scenario:
    """All that is drawn beforehand."""

    recipe: Recipe
    processes: dict[str, int]
    """How many of each service there are."""
    limits: dict[str, Any]
    """Module constants that are shrunk, by `module:NAME`."""
    faults: Faults
    blob_faults: BlobFaults
    acts: list[str] = field(default_factory=list)
    """In the order in which they strike."""
    pause_s: float = 1.0
    """Longest time between two acts."""
    victims: tuple[str, ...] = ()
    """Services whose processes alone are struck; empty: all."""
    timing: Timing = "any"
    """At which moments the acts strike."""
    misbehaviour: frozenset[str] = frozenset()
    ending_at: float | None = None
    """Virtual seconds until the run is told to end, where it is."""
    crash_while_saving: float = 0.0
    """Share of checkpoints in the middle of which the trainer dies."""

    @property
    def costs_attempts(self) -> bool:
        """Whether an episode may need a second attempt, or end otherwise than finished."""
        # A zombie that thaws after its successor has acted makes it diverge, and rightly so.
        costly = self.misbehaviour | UNSAFE | {"ending", CUT}
        return bool(costly & self.kinds - {SLOW, DEBATE})

    @property
    def kinds(self) -> frozenset[str]:
        """All that strikes, by name."""
        ending = () if self.ending_at is None else ("ending",)
        return self.misbehaviour.union(self.acts, ending)


def calm() -> Scenario:
    """A run without faults, in a recipe of middling size."""
    return Scenario(
        recipe=Recipe.model_validate(_recipe(Random(0), frozenset(), shrink=False)),
        processes=_PROCESSES,
        limits={},
        faults=Faults(Random(0), latency_s=LATENCY_S),
        blob_faults=BlobFaults(),
    )


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    # What was thought of later is of a chance of its own: a seed without it is what it was before.
    chance, later = Random(f"scenario {seed}"), Random(f"strikes {seed}")
    timing = TIMINGS[int(4 * later.random())]
    quiet = chance.random() < 0.1
    misbehaviour = frozenset() if quiet else _some(chance, MISBEHAVIOUR, 0.25)
    slow = {SLOW} if later.random() < 0.2 else set()
    scenario = _faultless(chance, misbehaviour | slow)
    scenario.faults.disorder = later.random() < 0.2
    if later.random() < 0.2:
        scenario.recipe = _with_demonstrations(scenario.recipe, later)
    if later.random() < 0.2 and not quiet:
        _add_limits(scenario, later)
    if Random(f"teacher {seed}").random() < 0.15:
        scenario.recipe = with_teacher(scenario.recipe)
    if (data := Random(f"data {seed}")).random() < 0.3:
        scenario.recipe = with_data(scenario.recipe, data)
    if (several := Random(f"several {seed}")).random() < 0.3:
        scenario.recipe = with_several(scenario.recipe, several)
    if Random(f"reports {seed}").random() < 0.2:
        scenario.recipe = _without_reports(scenario.recipe)
    if (tenants := Random(f"tenants {seed}")).random() < 0.2:
        scenario.recipe = _with_tenants(scenario.recipe, tenants)
    if (files := Random(f"files {seed}")).random() < 0.2:
        scenario.recipe = with_files(scenario.recipe, files)
    if (calls := Random(f"call limits {seed}")).random() < 0.2:
        scenario.recipe = _with_call_limits(scenario.recipe, calls)
    if (rooms := Random(f"environment limits {seed}")).random() < 0.1:
        scenario.recipe = _with_environment_limit(scenario.recipe, rooms)
    if (unread := Random(f"unread answers {seed}")).random() < 0.3:
        scenario.limits[KEPT_BYTES] = unread.choice([0, 10_000])
    if not quiet:
        scenario.timing = timing
        _add_faults(scenario, chance)
    if (waits := Random(f"waits {seed}")).random() < 0.3:
        for _ in range(waits.choice([2, 8])):
            scenario.acts.insert(waits.randint(0, len(scenario.acts)), WAITS)
    if (keys := Random(f"requests of tenants {seed}")).random() < 0.1:
        _add_keys(scenario, keys)
        scenario.ending_at = None  # What an end cancels would look like forged cancellations.
        for _ in range(keys.choice([2, 8])):
            scenario.acts.insert(keys.randint(0, len(scenario.acts)), REQUESTS)
    return scenario


def draw_only(seed: int, kinds: Collection[str]) -> Scenario:
    """A scenario of a seed with no faults but these kinds of ACTS, MISBEHAVIOUR and WIRE.

    Services among the kinds are the only ones whose processes are struck; `aimed` is a timing,
    SLOW, DEBATE, CUT, TEACHER, DEMONSTRATIONS, DATA, SEVERAL, BARRIER, TENANTS, FILES, UNREPORTED,
    UNREAD, ROOMS, CALLS and REQUESTS are what they are in a swarm's seed. ASKED are only here.
    """
    chance = Random(f"scenario {seed}")
    scenario = _faultless(chance, frozenset(kinds) & frozenset((*MISBEHAVIOUR, SLOW, DEBATE)))
    if acts := [kind for kind in (*ACTS, RUIN, WAITS, REQUESTS) if kind in kinds]:
        scenario.acts = chance.choices(acts, k=16)
    scenario.victims = tuple(service for service in _PROCESSES if service in kinds)
    scenario.pause_s = chance.choice([0.3, 1.0]) * (4 if scenario.victims else 1)
    scenario.timing = "aimed" if "aimed" in kinds else "busy"
    for fault in WIRE.keys() & kinds:
        setattr(scenario.faults, fault, WIRE[fault])
    if DEMONSTRATIONS in kinds:
        scenario.recipe = _with_demonstrations(scenario.recipe, chance)
    if CUT in kinds:
        _add_limits(scenario, chance)
    if TEACHER in kinds:
        scenario.recipe = with_teacher(scenario.recipe)
    if drawn := [kind for kind in (*DATA, *ASKED) if kind in kinds]:
        scenario.recipe = with_data(scenario.recipe, chance, drawn)
    if {SEVERAL, BARRIER} & set(kinds):
        scenario.recipe = with_several(scenario.recipe, chance, barrier=BARRIER in kinds)
    if TENANTS in kinds:
        scenario.recipe = _with_tenants(scenario.recipe, chance)
    if FILES in kinds:
        scenario.recipe = with_files(scenario.recipe, chance)
    if ROOMS in kinds:
        scenario.recipe = _with_environment_limit(scenario.recipe, chance)
    if CALLS in kinds:
        scenario.recipe = _with_call_limits(scenario.recipe, chance)
    if UNREAD in kinds:
        scenario.limits[KEPT_BYTES] = 0
    if UNREPORTED in kinds:
        scenario.recipe = _without_reports(scenario.recipe)
    if REQUESTS in kinds:
        _add_keys(scenario, chance)
    return scenario


def _add_keys(scenario: Scenario, chance: Random) -> None:
    """Gives two tenants and an operator keys, and shrinks what forged tasks may take."""
    scenario.recipe = with_keys(scenario.recipe)
    scenario.limits |= {name: chance.choice(values) for name, values in REFUSED_LIMITS.items()}


def _with_tenants(recipe: Recipe, chance: Random) -> Recipe:
    """The recipe, with a limit of the tenant that has nearly all tasks."""
    tree = recipe.model_dump(mode="json")
    most = tree["tasks"]["samples"] * chance.randint(1, 3)
    tree["scheduler"]["tenants"] = {"default": {"live_episodes": most}}
    return Recipe.model_validate(tree)


def _with_environment_limit(recipe: Recipe, chance: Random) -> Recipe:
    """The recipe, with a limit of live episodes in the environment that tasks have."""
    tree = recipe.model_dump(mode="json")
    most = tree["tasks"]["samples"] * chance.randint(1, 3)
    tree["scheduler"]["environments"] = {"default": most}
    return Recipe.model_validate(tree)


def _with_call_limits(recipe: Recipe, chance: Random) -> Recipe:
    """The recipe, with limits of the calls of each model, and more time for episodes."""
    tree = recipe.model_dump(mode="json")
    tree["tasks"]["deadline_s"] *= 3
    for policy in tree["policies"].values():
        policy["limits"]["in_flight"] = chance.choice([None, 1, 2, 4])
        policy["limits"]["calls"] = chance.choice([None, 4, 8])
        period_s = chance.choice([0.5, 2.0])
        if policy["limits"]["calls"] is not None:
            policy["limits"]["period_s"] = period_s
    return Recipe.model_validate(tree)


def _without_reports(recipe: Recipe) -> Recipe:
    """The recipe, with a scheduler that does not ask whether workers report."""
    tree = recipe.model_dump(mode="json")
    tree["scheduler"] |= {"require_reports": False, "waiting_per_slot": 1e9}
    return Recipe.model_validate(tree)


def _faultless(chance: Random, misbehaviour: frozenset[str]) -> Scenario:
    recipe = _recipe(chance, misbehaviour, shrink=True)
    if SLOW in misbehaviour and _crowded(recipe):
        recipe["tasks"]["deadline_s"] *= 3
    scenario = Scenario(
        recipe=Recipe.model_validate(recipe),
        processes={
            name: chance.randint(1, most) if most > 1 else 1 for name, most in _MOST.items()
        },
        limits={name: chance.choice(values) for name, values in LIMITS.items()},
        faults=Faults(chance, latency_s=chance.choice([0.001, LATENCY_S, 0.03])),
        blob_faults=BlobFaults(),
        misbehaviour=misbehaviour,
    )
    scenario.faults.fetch = chance.choice([1, 3, 500])
    return scenario


def _with_demonstrations(recipe: Recipe, chance: Random) -> Recipe:
    """With a warm start, and with turns here and there that are demonstrated later."""
    tree = recipe.model_dump(mode="json")
    tree["agents"]["teacher"] = {**tree["agents"]["wanderer"], "options": {"demonstrated": 1.0}}
    tree["agents"]["wanderer"]["options"]["demonstrated"] = chance.choice([0.0, 0.1, 0.7])
    tree["warm_start"] = {"tasks": chance.choice([1, 5]), "samples": chance.choice([1, 2])}
    return Recipe.model_validate(tree)


def _add_limits(scenario: Scenario, chance: Random) -> None:
    """Contexts that some turn fills, steps that take too long or raise, and what counts of it."""
    tree = scenario.recipe.model_dump(mode="json")
    for agent in tree["agents"].values():
        agent["overlong"] = chance.choice(["penalise", "mask"])
        agent["timeouts"] = chance.choice(["exclude", "unfinished"])
        agent["exceptions"] = chance.choice(["exclude", "unfinished"])
        agent["unfinished_reward"] = chance.choice([None, -1.0])
    tree["environments"]["default"]["step_s"] = 2.0
    tree["environments"]["default"]["options"]["hangs"] = chance.choice([0.0, 0.3])
    tree["environments"]["default"]["options"]["raises"] = chance.choice([0.0, 0.1])
    tree["policies"]["default"]["engine"]["options"]["full"] = chance.choice([0.1, 0.3])
    # With it an answer ends by itself; without it each reaches its limit of tokens.
    tree["policies"]["default"]["engine"]["options"]["count"] = chance.choice([2, 2, None])
    scenario.recipe = Recipe.model_validate(tree)
    scenario.misbehaviour |= {CUT}


def _crowded(recipe: dict[str, Any]) -> bool:
    """Whether so many episodes wait for one slot that slow answers use up their time."""
    slots: int = recipe["environments"]["default"]["slots"]
    live: int = recipe["scheduler"]["live_episodes"]
    return live > 15 * slots


def _add_faults(scenario: Scenario, chance: Random) -> None:
    faults, blobs = scenario.faults, scenario.blob_faults
    for share in ("late", "lost_answers", "lost_sends", "aborts", "unknown_commits"):
        if chance.random() < 0.4:
            setattr(faults, share, chance.choice([0.001, 0.01]))
    faults.late = chance.choice([0.0, 0.5, 0.9])
    faults.aborts *= chance.choice([0, 1, 30])
    faults.unknown_commits *= chance.choice([1, 5])
    faults.lost_commits = chance.choice([0.0, 0.0, 0.3, 1.0])
    faults.piecemeal = chance.random() < 0.5
    faults.fail_s = chance.choice([0.5, 5.0])
    for share in ("late", "torn", "refused"):
        if chance.random() < 0.25:
            setattr(blobs, share, chance.choice([0.1, 0.4]))
    scenario.crash_while_saving = chance.choice([0.0, 0.0, 0.3])
    kinds = sorted(_some(chance, ACTS, 0.35))
    count = chance.choice([2, 6, 12, 20])
    scenario.acts = [chance.choice(kinds) for _ in range(count)] if kinds else []
    scenario.pause_s = chance.choice([0.3, 1.5, 4.0])
    if chance.random() < 0.1:
        scenario.ending_at = chance.uniform(0.5, 15.0)


_PROCESSES = {
    "source": 1,
    "scheduler": 2,
    "agent": 2,
    "env": 2,
    "inference": 2,
    "assemble-groups": 2,
    "assemble-batches": 1,
    "item-statistics": 1,
    "trainer": 1,
}
_MOST = _PROCESSES | {"agent": 3, "env": 3, "inference": 3}
LIMITS: dict[str, tuple[Any, ...]] = {
    "headrace.services.worker.shard_host:INTAKE": (1, 4, 1_000),
    "headrace.services.worker.worker:COMMIT_INTERVAL_S": (0.2, 1.0, 5.0),
    "headrace.services.log.log_reader:TAIL": (2, 64),
    "headrace.services.scheduler.service:STARTS_A_TRANSACTION": (1, 512),
    "headrace.services.scheduler.service:QUEUE_HIGH": (2, 1_000_000),
    "headrace.services.scheduler.service:UNDECIDED_HIGH": (2, 10_000),
    "headrace.services.scheduler.task_bodies:KEPT": (0, 1, 1_000),
    "headrace.services.scheduler.waiting_record:RECORD_EVERY_S": (0.3, 2.0, 60.0),
    "headrace.services.scheduler.waiting_record:RECORD_EVERY_TASKS": (1, 3, 10_000),
    "headrace.stream_jobs.waiting_groups:BATCH_BYTES": (700, 500_000),
    "headrace.stream_jobs.measure_items:MAX_CHANGED": (1, 1_024),
}
"""Module constants and what they may be: small enough to be reached, or as they are."""


def _recipe(chance: Random, misbehaviour: frozenset[str], *, shrink: bool) -> dict[str, Any]:
    def either(as_it_is: Any, *others: Any) -> Any:
        return chance.choice([as_it_is, *others]) if shrink else as_it_is

    fails = {name: either(0.06, 0.2) if name in misbehaviour else 0.0 for name in MISBEHAVIOUR}
    debate = either(False, False, False, True) or DEBATE in misbehaviour
    training = {"checkpoint_every": either(3, 1), "keep_checkpoints": either(2, 1)}
    return {
        "name": "sim",
        "partitions": either(3, 1, 2),
        "pool_partitions": 5,
        "tasks": {
            "options": {"items": either(16, 3, 8, 12)},
            "epochs": 1,
            "backlog": either(6, 1, 3),
            "samples": either(3, 1, 2, 4),
            "minimum": 1,
            "agent": "debater" if debate else "wanderer",
            "mode": either("ephemeral", "persistent"),
            "max_turns": TURNS * (2 if debate else 1),
            "max_tokens": 4 * TURNS,
            "deadline_s": DEADLINE_S if shrink else 3 * DEADLINE_S,
        },
        "agents": {
            "wanderer": {
                "use": "tests.simulation.world:wanderer",
                "options": {"moody": fails["agent moody"]},
            },
            "debater": {"use": "tests.simulation.world:debater"},
        },
        "environments": {
            "default": {
                "use": "tests.simulation.world:Labyrinth",
                "slots": either(16, 1, 3),
                "options": {
                    "sandbox": "sandbox" in misbehaviour or "lies" in misbehaviour,
                    "lies": "lies" in misbehaviour,
                    "fails": fails["environment fails"],
                    "hangs": fails["environment hangs"] / 20,
                },
            },
            "jury": {"use": "tests.simulation.world:Jury", "slots": either(16, 1)},
        },
        "scheduler": {
            "live_episodes": either(20, 1, 5),
            "starts_per_s": either(None, None, 6.0),
        },
        "policies": {
            "default": {
                "model": "tiny-llama",
                "engine": {
                    "use": "tests.simulation.world:Dice",
                    "slots": either(8, 1, 2),
                    "options": {
                        "fails": fails["engine fails"],
                        "breaks": fails["engine breaks"] / 20,
                        "slow": 0.1 if SLOW in misbehaviour else 0.0,
                    },
                },
                "sampling": {"max_tokens": 2, "allowed": list(LETTERS)},
                "groups": {
                    "filters": either(
                        [],
                        [],
                        ["zero_advantage"],
                        ["tests.simulation.world:drop_many"],
                        ["tests.simulation.world:drop_all"],
                    )
                },
                "batches": {
                    "groups": either(3, 1, 2),
                    "batch_wait_s": either(5, 0.3, 2),
                    "max_staleness": either(1, 0, 2),
                    "prefetch": either(1, 0, 2),
                    "order": either("edf", "fifo"),
                },
                "training": training,
            }
        },
    }


def _some(chance: Random, kinds: tuple[str, ...], share: float) -> frozenset[str]:
    return frozenset(kind for kind in kinds if chance.random() < share)
