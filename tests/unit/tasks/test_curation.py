"""What comes next: curators, mixtures, curricula, and that the log gives the same choices again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from pydantic import PrivateAttr

from headrace.errors import HeadraceError, UsageError
from headrace.schemas.events import GroupClosed, TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.tasks.curation import choose_items
from headrace.services.tasks.curation.check_curator import check_contract
from headrace.services.tasks.curation.choose_items import Chosen, Curation, Cursor, Unchosen
from headrace.services.tasks.curation.composed_data_sets import Curriculum
from headrace.services.tasks.curation.curator import Curator
from headrace.services.tasks.curation.curators import CURATORS, load_curator
from headrace.services.tasks.curation.item_statistics import ItemRecord, ItemStatistics
from headrace.services.tasks.data_sets import items_of
from tests.unit.tasks.test_item_statistics import a_closed_group, folded, record_of

SEED = 7
PASS_RATE = {"use": "pass_rate", "episodes": 1}


def curated(*curators: Any, **tasks: Any) -> Recipe:
    """A recipe with these curators, over four items unless `tasks` says otherwise."""
    keys = {"use": "count", "options": {"items": 4}, "seed": SEED, "curators": curators, **tasks}
    policy = {"model": "tiny-llama"}
    return Recipe.model_validate({"name": "r", "tasks": keys, "policies": {"default": policy}})


def a_curation(recipe: Recipe) -> Curation:
    return Curation(recipe, ItemStatistics("default"))


def next_of(curation: Curation) -> Chosen | Unchosen:
    *others, last = curation.search()
    assert last is not None
    assert others == [None] * len(others)
    if isinstance(last, Chosen):
        curation.accept(last)
    return last


def ids(curation: Curation, most: int) -> list[str]:
    """The ids of the next tasks, as many as there are."""
    found: list[str] = []
    while len(found) < most and isinstance(chosen := next_of(curation), Chosen):
        found.append(chosen.task_id)
    return found


def test_without_statistics_every_item_is_chosen_epoch_by_epoch() -> None:
    curation = a_curation(curated("pass_rate", "greso", "difficulty", "uniform"))
    assert ids(curation, 6) == ["0-0", "0-1", "0-2", "0-3", "1-0", "1-1"]


def test_items_that_all_failed_or_all_passed_are_dropped_after_some_tries() -> None:
    curation = a_curation(curated({"use": "pass_rate", "tries": 2}, epochs=3))
    rewards = {0: (0.0, 0.0), 1: (1.0, 1.0), 2: (0.0, 1.0), 3: (0.0, 0.0)}
    assert len(ids(curation, 4)) == 4
    for task in range(4):
        curation.on_group(a_closed_group(task, str(task), *rewards[task]), task)
    assert ids(curation, 4) == ["1-0", "1-1", "1-2", "1-3"], "one try is not enough"
    for task in range(4, 7):
        curation.on_group(a_closed_group(task, str(task - 4), *rewards[task - 4]), task)
    assert ids(curation, 3) == ["2-2", "2-3"], "item 3 has had one try"
    assert next_of(curation) == Unchosen(exhausted=True)


def test_an_item_whose_environment_hangs_is_not_dropped_for_good_after_one_episode() -> None:
    curator = load_curator("pass_rate")
    groups = [a_closed_group(task, "a", 0.0) for task in range(4)]
    assert curator.chance(record_of(folded(*groups[:3]), "a"), 1) == 1.0
    assert curator.chance(record_of(folded(*groups), "a"), 1) == 0.0


def test_the_first_curator_that_skips_gives_the_reason() -> None:
    curation = a_curation(curated("uniform", PASS_RATE, {"use": "greso", "warmup_epochs": 0}))
    curation.on_group(a_closed_group(0, "0", 0.0, 0.0), 0)
    chosen = next_of(curation)
    assert isinstance(chosen, Chosen)
    assert chosen.task_id == "0-1"
    labels = chosen.labels
    assert json.loads(labels["curation.skipped"]) == {"pass_rate": 1}
    chances = {"greso": 1.0, "pass_rate": 1.0, "uniform": 1.0}
    assert json.loads(labels["curation.chances"]) == chances
    assert labels["curation.policy"] == "default"
    assert labels["curation.group"] == "0"
    assert labels["curation.seed"] == str(SEED)


def test_two_curators_of_one_name_have_their_own_keys_in_the_labels() -> None:
    curation = a_curation(curated("uniform", PASS_RATE, PASS_RATE | {"low": 0.6}))
    curation.on_group(a_closed_group(0, "0", 0.0, 0.0), 0)
    curation.on_group(a_closed_group(1, "1", 0.0, 1.0), 1)
    curation.on_group(a_closed_group(2, "2", 1.0, 1.0, 0.0), 2)
    chosen = next_of(curation)
    assert isinstance(chosen, Chosen)
    labels = chosen.labels
    assert chosen.task_id == "0-2"
    assert json.loads(labels["curation.skipped"]) == {"1:pass_rate": 1, "2:pass_rate": 1}
    chances = {"uniform": 1.0, "1:pass_rate": 1.0, "2:pass_rate": 1.0}
    assert json.loads(labels["curation.chances"]) == chances


def test_difficulty_prefers_items_near_its_target() -> None:
    curator = load_curator({"use": "difficulty", "target": 0.5, "width": 0.25, "floor": 0.02})

    def chance(passed: int) -> float:
        rewards = [1.0] * passed + [0.0] * (8 - passed)
        return curator.chance(record_of(folded(a_closed_group(0, "a", *rewards)), "a"), 1)

    assert chance(4) == 1.0
    assert chance(2) == chance(6) == pytest.approx(0.6065, abs=1e-4)
    assert chance(0) == pytest.approx(0.1353, abs=1e-4)
    assert curator.chance(None, 0) == 1.0
    narrow = load_curator({"use": "difficulty", "width": 0.01, "floor": 0.02})
    assert narrow.chance(record_of(folded(a_closed_group(0, "a", 1.0)), "a"), 1) == 0.02


def test_greso_adapts_towards_its_targets_after_the_warm_up() -> None:
    greso = load_curator({"use": "greso", "window": 10})
    streak = record_of(folded(*(a_closed_group(task, "a", 0.0, 0.0) for task in range(3))), "a")
    assert greso.chance(None, 1) == 1.0
    assert greso.chance(streak, 0) == 0.5**3, "an epoch of a mixture may have an item often"
    patient = load_curator({"use": "greso", "warmup_epochs": 4})
    assert patient.chance(streak, 1) == 1.0
    for task in range(10):
        greso.on_group(a_closed_group(task, "a", 0.0, 0.0))
    assert greso.chance(streak, 1) == 0.5**3, "the first epoch changes nothing"
    for task in range(10):
        greso.on_group(a_closed_group(task, "a", 0.0, 0.0, epoch=1))
    assert greso.state()["p"] == {"easy": pytest.approx(0.51), "hard": pytest.approx(0.49)}
    assert greso.chance(streak, 1) == pytest.approx(0.49**3)
    for task in range(10 * 100):
        greso.on_group(a_closed_group(task, "a", 1.0, 1.0, epoch=1))
    assert greso.state()["p"] == {"easy": 0.05, "hard": 1.0}


def test_greso_gives_up_no_item() -> None:
    hard = (a_closed_group(task, "a", 0.0, 0.0) for task in range(40))
    greso = load_curator("greso")
    assert greso.chance(record_of(folded(*hard), "a"), 1) == 1e-3, "0.5**40 would never come"


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("nothing", "no curator 'nothing'"),
        ({"use": "greso", "windows": 3}, "windows"),
        ({"use": "greso", "easy_target": 2}, "easy_target"),
        ({"use": "pass_rate", "tries": 0}, "tries"),
        ("json:loads", "not a subclass of headrace.Curator"),
    ],
)
def test_a_wrong_curator_or_option_is_refused(choice: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_curator(choice)


class Whims(Curator):
    """Options and a state of its own: it refuses an item for each `every` groups that it saw."""

    every: int = 2
    _groups: int = PrivateAttr(default=0)

    def chance(self, item: ItemRecord | None, epoch: int) -> float:
        return 1.0 if item is None else 1 / (1 + self._groups // self.every)

    def on_group(self, group: GroupClosed) -> None:
        self._groups += 1

    def state(self) -> dict[str, Any]:
        return {"groups": self._groups}

    def restore(self, state: Any) -> None:
        self._groups = state["groups"]


class Wrong(Curator):
    """Its chance is none."""

    def chance(self, item: ItemRecord | None, epoch: int) -> float:
        return float("nan")


def test_a_chance_that_is_none_is_an_error_that_names_the_curator() -> None:
    curation = a_curation(curated(f"{__name__}:Wrong"))
    with pytest.raises(HeadraceError, match=r"Wrong.*'0'.*nan"):
        list(curation.search())


def test_a_whole_pass_without_a_chance_ends_the_search_and_newer_statistics_go_on() -> None:
    curation = a_curation(curated(PASS_RATE))
    assert len(ids(curation, 4)) == 4
    for task in range(4):
        curation.on_group(a_closed_group(task, str(task), 0.0, 0.0), task)
    assert next_of(curation) == Unchosen(exhausted=False)
    assert curation.cursor == Cursor(0, 4)
    curation.on_group(a_closed_group(4, "2", 1.0, 0.0), 4)
    assert ids(curation, 2) == ["1-2", "2-2"]


def test_chance_alone_does_not_end_a_search_soon() -> None:
    curation = a_curation(curated({"use": "greso", "warmup_epochs": 0}))
    groups = [a_closed_group(task, str(task % 4), 0.0, 0.0) for task in range(16)]
    for offset, group in enumerate(groups):
        curation.on_group(group, offset)
    found = ids(curation, 5)
    assert len(found) == 5, "each item has a chance of 1/16 in each pass"
    assert int(found[-1].split("-")[0]) > 5


def test_a_search_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_items, "MAX_SKIPPED", 1_000)
    recipe = curated(PASS_RATE | {"low": 1.0}, options={"same": True})
    curation = a_curation(recipe)
    curation.on_group(a_closed_group(0, "0", 0.0), 0)
    steps = list(curation.search())
    assert steps[-1] == Unchosen(exhausted=False)
    assert len(steps) == 1 + 1_000 // choose_items.CHUNK, "others ran in between"


def test_an_empty_data_set_ends() -> None:
    assert next_of(a_curation(curated("uniform", options={"items": 0}))) == Unchosen(exhausted=True)


def played(recipe: Recipe, tasks: int, *, restarts: Sequence[int] = (), late: int = 6) -> list[Any]:
    """Chooses tasks one by one, with groups that come `late` tasks later, and restarts.

    Returns the tasks and groups in the order of the log.
    """
    random = Random(1)
    curation = a_curation(recipe)
    log: list[Any] = []
    groups: list[GroupClosed] = []
    waiting: list[GroupClosed] = []
    for number in range(tasks):
        if number in restarts:
            newest = next(one for one in reversed(log) if isinstance(one, TaskSubmitted))
            # The service may have counted fewer groups than the source, or more.
            known = ItemStatistics("default")
            counted = ItemStatistics("default")
            for offset, group in enumerate(groups[: random.randrange(len(groups) + 1)]):
                counted.on_group(group, offset)
            for event in counted.take_changed():
                known.restore(event)
            curation = Curation(recipe, known)
            curation.restore(newest)
            for offset in range(curation.groups_read, len(groups)):
                curation.on_group(groups[offset], offset)
        while len(waiting) > late or (waiting and random.random() < 0.3):
            group = waiting.pop(random.randrange(len(waiting)))
            curation.on_group(group, len(groups))
            groups.append(group)
            log.append(group)
        if (chosen := next_of(curation)) == Unchosen(exhausted=True):
            break
        assert isinstance(chosen, Chosen)
        log.append(
            TaskSubmitted(
                source="source",
                task_id=chosen.task_id,
                item_id=chosen.item.item_id,
                epoch=chosen.epoch,
                agent="default",
                roles={},
                max_turns=1,
                max_tokens=1,
                deadline_s=1,
                labels=chosen.labels,
            )
        )
        kind = sum(chosen.item.item_id.encode()) % 4
        rewards = [float(random.random() < (0.0, 1.0, 0.5, 0.9)[kind]) for _ in range(4)]
        waiting.append(a_closed_group(number, chosen.item.item_id, *rewards, epoch=chosen.epoch))
    return log


EVERYTHING = (
    {"use": "pass_rate", "tries": 3},
    {"use": "greso", "window": 4},
    {"use": "difficulty", "floor": 0.2},
    {"use": f"{__name__}:Whims", "every": 40},
)


def recomputed(recipe: Recipe, log: Sequence[Any]) -> int:
    """Chooses every task of a log again. Returns how many there are."""
    curation = a_curation(recipe)
    groups = [one for one in log if isinstance(one, GroupClosed)]
    tasks = [one for one in log if isinstance(one, TaskSubmitted)]
    read = 0
    for task in tasks:
        while read <= int(task.labels["curation.group"]):
            curation.on_group(groups[read], read)
            read += 1
        chosen = next_of(curation)
        assert isinstance(chosen, Chosen)
        assert (chosen.task_id, chosen.item.item_id) == (task.task_id, task.item_id)
        assert chosen.labels == task.labels
    return len(tasks)


def test_the_log_gives_every_choice_again() -> None:
    recipe = curated(*EVERYTHING, options={"items": 40})
    log = played(recipe, 300)
    assert recomputed(recipe, log) == 300
    skipped: Counter[str] = Counter()
    for one in log:
        if isinstance(one, TaskSubmitted):
            skipped.update(json.loads(one.labels["curation.skipped"]))
    assert set(skipped) == {"pass_rate", "greso", "difficulty", f"{__name__}:Whims"}


@pytest.mark.parametrize("seed", range(5))
def test_restarts_at_any_point_leave_every_choice_as_it_was(seed: int) -> None:
    recipe = curated(*EVERYTHING, options={"items": 40}, seed=seed)
    restarts = sorted(Random(seed).sample(range(20, 250), 12))
    log = played(recipe, 250, restarts=restarts)
    assert recomputed(recipe, log) == 250


STAGES = {
    "stages": [
        {"name": "easy", "use": "count", "options": {"items": 5}, "pass_rate": 0.7, "groups": 6},
        {"name": "mid", "use": "count", "options": {"items": 3}, "passes": 2},
        {"name": "hard", "use": "count", "options": {"items": 4}},
    ]
}


def test_a_curriculum_goes_on_when_its_gate_opens_or_its_passes_are_over() -> None:
    curation = a_curation(curated(use="curriculum", options=STAGES, epochs=5))
    assert ids(curation, 7) == ["0-0", "0-1", "0-2", "0-3", "0-4", "1-0", "1-1"]
    for task in range(5):
        curation.on_group(a_closed_group(task, f"easy/{task}", 1.0, 1.0), task)
    curation.on_group(a_closed_group(5, "mid/0", 1.0, 1.0), 5)
    assert ids(curation, 1) == ["1-2"], "six groups of the stage are needed"
    curation.on_group(a_closed_group(6, "easy/0", 0.0, 0.0, epoch=1), 6)
    found = [next_of(curation) for _ in range(11)]
    chosen = [one for one in found if isinstance(one, Chosen)]
    assert [(one.task_id, one.item.item_id) for one in chosen] == [
        *((f"2-{number}", f"mid/{number}") for number in range(3)),
        *((f"3-{number}", f"mid/{number}") for number in range(3)),
        *((f"4-{number}", f"hard/{number}") for number in range(4)),
    ]
    assert [one.labels["curation.stage"] for one in chosen[::3]] == ["mid", "mid", "hard", "hard"]
    assert found[-1] == Unchosen(exhausted=True), "after five epochs"


@pytest.mark.parametrize("curators", [(), ("greso",), ("difficulty",)])
def test_a_gate_opens_by_all_items_and_not_by_those_that_curators_choose(
    curators: Sequence[str],
) -> None:
    """Of 200 items one after the other becomes easy, in the first 8,000 tasks."""
    random, items, gate = Random(1), 200, 0.8
    stages = [
        {"name": "easy", "use": "count", "options": {"items": items}, "pass_rate": gate},
        {"name": "hard", "use": "count"},
    ]
    curation = a_curation(curated(*curators, use="curriculum", options={"stages": stages}))
    easy_from = [random.random() * 8_000 for _ in range(items)]
    for task in range(8_000):
        chosen = next_of(curation)
        assert isinstance(chosen, Chosen)
        stage, _, item = chosen.item.item_id.partition("/")
        if stage == "hard":
            break
        chance = 1.0 if easy_from[int(item)] < task else 0.3
        rewards = [float(random.random() < chance) for _ in range(8)]
        group = a_closed_group(task, chosen.item.item_id, *rewards, epoch=chosen.epoch)
        curation.on_group(group, task)
    true = sum(1.0 if since < task else 0.3 for since in easy_from) / items
    assert true == pytest.approx(gate, abs=0.1)


def test_chance_opens_no_gate() -> None:
    """Each item is always or never solved, which is the worst case: a rate of 0.65 seemed 0.8."""
    stages = [{"name": "one", "use": "count", "pass_rate": 0.8}, {"name": "two", "use": "count"}]
    random, curriculum = Random(1), Curriculum.model_validate({"stages": stages})
    for task in range(2_000):
        reward = float(random.random() < 0.65)
        curriculum.on_group(a_closed_group(task, "one/1", reward, reward))
        assert not curriculum.open_gate(0)


def test_a_curriculum_with_curators_is_computed_again_after_restarts() -> None:
    recipe = curated(*EVERYTHING[:3], use="curriculum", options=STAGES)
    log = played(recipe, 120, restarts=(30, 31, 60, 90))
    assert recomputed(recipe, log) == len([one for one in log if isinstance(one, TaskSubmitted)])
    stages = {one.labels["curation.stage"] for one in log if isinstance(one, TaskSubmitted)}
    assert stages == {"easy", "mid", "hard"}


def test_elsewhere_a_curriculum_is_all_its_stages() -> None:
    found = [item.item_id for item in items_of("curriculum", STAGES)]
    assert (len(found), found[0], found[-1]) == (12, "easy/0", "hard/3")


def a_mixture(**options: Any) -> dict[str, Any]:
    parts = [
        {"name": "a", "use": "count", "options": {"items": 300}, "weight": 3},
        {"name": "b", "use": "count", "options": {"items": 50}, "weight": 1},
    ]
    return {"parts": parts, **options}


def test_a_mixture_has_its_weights_and_is_the_same_each_time() -> None:
    found = [item.item_id for item in items_of("mixture", a_mixture(count=20_000))]
    assert len(found) == 20_000
    drawn = 0
    for number, one in enumerate(found, 1):
        drawn += one.startswith("a/")
        assert abs(drawn - 0.75 * number) <= 1, "of the first items, too"
    assert found == [item.item_id for item in items_of("mixture", a_mixture(count=20_000))]
    assert found != [item.item_id for item in items_of("mixture", a_mixture(count=20_000, seed=1))]


@pytest.mark.parametrize("weights", [[100, *[1] * 20], [1000, 1, 1, 1], [1] * 30], ids=str)
def test_a_mixture_of_many_parts_has_its_weights_but_for_as_many_items(weights: list[int]) -> None:
    parts = [
        {"name": f"{number}", "use": "count", "options": {"items": 50}, "weight": weight}
        for number, weight in enumerate(weights)
    ]
    drawn = [0] * len(weights)
    items = items_of("mixture", {"parts": parts, "count": 5_000})
    for number, item in enumerate(items, 1):
        drawn[int(item.item_id.partition("/")[0])] += 1
        ahead = [
            have - number * weight / sum(weights)
            for have, weight in zip(drawn, weights, strict=True)
        ]
        assert max(ahead) < 1 + 1e-6
        assert min(ahead) > 1 - len(weights)


def test_a_pass_over_a_mixture_has_every_item_of_each_part() -> None:
    found = [item.item_id for item in items_of("mixture", a_mixture())]
    assert set(found) == {f"a/{n}" for n in range(300)} | {f"b/{n}" for n in range(50)}


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        ("mixture", {"parts": []}, "parts"),
        ("mixture", a_mixture(count=0), "count"),
        ("mixture", {"parts": [{"name": "a", "use": "count", "weight": 0}]}, "weight"),
        ("mixture", {"parts": [*a_mixture()["parts"], *a_mixture()["parts"]]}, "must differ"),
        ("curriculum", {"stages": [{"name": "x/y", "use": "count"}]}, "name"),
        ("curriculum", {"stages": [STAGES["stages"][2], STAGES["stages"][0]]}, "never ends"),
    ],
)
def test_wrong_options_of_a_composed_data_set_are_refused(
    use: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        list(items_of(use, options))


def test_a_part_without_items_is_an_error() -> None:
    parts = [{"name": "a", "use": "count", "options": {"items": 0}, "weight": 1}]
    with pytest.raises(UsageError, match="the part 'a' has no items"):
        list(items_of("mixture", {"parts": parts, "count": 3}))


def test_a_task_without_labels_can_not_be_continued() -> None:
    log = played(curated("uniform"), 1)
    curation = a_curation(curated("uniform"))
    with pytest.raises(UsageError, match="lacks the labels"):
        curation.restore(log[0].model_copy(update={"labels": {}}))


@pytest.mark.parametrize("choice", [*CURATORS, f"{__name__}:Whims", EVERYTHING[0], EVERYTHING[2]])
def test_every_curator_keeps_the_contract(choice: Any) -> None:
    check_contract(load_curator(choice))


class Drawing(Curator):
    """Draws itself."""

    _random: Any = PrivateAttr(default_factory=Random)

    def chance(self, item: ItemRecord | None, epoch: int) -> float:
        return float(self._random.random())


class Forgetful(Whims):
    """Has a state that it does not say."""

    def state(self) -> dict[str, Any]:
        return {"groups": 0}


class Opaque(Whims):
    """Has a state that is no JSON."""

    def state(self) -> dict[str, Any]:
        return {"groups": {1, 2}}


@pytest.mark.parametrize(
    ("curator", "message"),
    [
        (Wrong(), "returned nan"),
        (Drawing(), "draw no random number"),
        (Forgetful(), "restored from Forgetful.state"),
        (Opaque(), "not JSON"),
    ],
)
def test_what_breaks_the_contract_is_named(curator: Curator, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_contract(curator)
