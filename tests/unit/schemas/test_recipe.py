"""Recipes: what overrides what, what equals what, and what the messages say."""

from __future__ import annotations

import hashlib
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas.recipe.read_recipe import change_recipe, load_recipe, parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.tables import RecipeError
from headrace.schemas.topics import Topics
from headrace.services.worker.open_episodes import SCHEDULER_TOPICS

SMALLEST = 'name = "demo"\n[policies.default]\nmodel = "tiny-llama"\n'


@pytest.fixture
def shipped(tmp_path: Path) -> Path:
    (tmp_path / "demo.toml").write_text(SMALLEST)
    return tmp_path


def refused(text: str) -> str:
    with pytest.raises(RecipeError) as raised:
        parse_recipe(tomllib.loads(text), "demo.toml")
    return str(raised.value)


def test_the_smallest_recipe_is_found_by_name_and_by_path(shipped: Path) -> None:
    by_name = load_recipe("demo", shipped=shipped)
    assert by_name == load_recipe(str(shipped / "demo.toml"), shipped=Path("elsewhere"))
    assert by_name.policies["default"].model == "tiny-llama"


def test_a_problem_names_the_source_of_its_key(shipped: Path) -> None:
    for environment, settings, told in (
        ({"HEADRACE__TASKS__SAMPLE": "16"}, (), "HEADRACE__TASKS__SAMPLE: tasks.sample: no such"),
        ({"HEADRACE__NO__SUCH": "16"}, (), "HEADRACE__NO__SUCH: no: no such key"),
        ({}, ("tasks.samples=x",), "--set: tasks.samples: Input should be"),
    ):
        with pytest.raises(RecipeError) as raised:
            load_recipe("demo", shipped=shipped, environment=environment, settings=settings)
        assert str(raised.value).startswith(told)
    (shipped / "demo.toml").write_text(f"more = 1\n{SMALLEST}")
    with pytest.raises(RecipeError, match=r"--set: tasks.a: no such key; .*toml: more: no such"):
        load_recipe("demo", shipped=shipped, settings=("tasks.a=1",))


def test_a_byte_order_mark_is_passed_over(shipped: Path) -> None:
    (shipped / "demo.toml").write_text(SMALLEST, encoding="utf-8-sig")
    assert load_recipe("demo", shipped=shipped).name == "demo"


def test_later_sources_win(shipped: Path) -> None:
    environment = {
        "HEADRACE__SCHEDULER__LIVE_EPISODES": "64",
        "HEADRACE__STOP__REWARD": "0.5",
        "HEADRACE__DESCRIPTION": "just text",
        "HOME": "/",
    }
    recipe = load_recipe(
        "demo",
        shipped=shipped,
        environment=environment,
        settings=["scheduler.live_episodes=8", 'tasks.options={"a": [1]}', "tasks.agent=default"],
    )
    assert recipe.scheduler.live_episodes == recipe.live_episodes == 8
    assert recipe.stop.reward == 0.5
    assert recipe.description == "just text"
    assert recipe.tasks.options == {"a": [1]}


def test_without_a_limit_as_many_episodes_run_as_the_largest_batch_has() -> None:
    def live(*groups: int, training: bool = True, **scheduler: int) -> int:
        tree = {
            "name": "demo",
            "tasks": {"samples": 4},
            "scheduler": scheduler,
            "policies": {
                ("default", "other")[number]: {
                    "model": "tiny-llama",
                    "batches": {"groups": count},
                    **({} if training else {"training": None}),
                }
                for number, count in enumerate(groups)
            },
        }
        return Recipe.model_validate(tree).live_episodes

    assert live(3, 5) == 20
    assert live(3, 5, live_episodes=7) == 7
    assert live(3, training=False) == 512


def test_training_can_be_switched_off(shipped: Path) -> None:
    recipe = load_recipe("demo", shipped=shipped, settings=["policies.default.training=false"])
    assert recipe.policies["default"].training is None
    assert Recipe.model_validate_json(recipe.canonical()) == recipe


def test_equal_recipes_have_equal_digests(shipped: Path) -> None:
    one = load_recipe("demo", shipped=shipped)
    spelt = load_recipe(
        "demo", shipped=shipped, settings=["partitions=4", "stop.reward_versions=3"]
    )
    other = load_recipe("demo", shipped=shipped, settings=["partitions=5"])
    assert one.digest == spelt.digest == hashlib.sha256(one.canonical().encode()).digest()
    assert one.digest != other.digest


def test_the_canonical_text_gives_the_recipe_back(shipped: Path) -> None:
    recipe = load_recipe("demo", shipped=shipped)
    assert Recipe.model_validate_json(recipe.canonical()) == recipe
    assert parse_recipe(json.loads(recipe.canonical()), "log").digest == recipe.digest


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("[scheduler]\nlive = 3", "demo.toml: scheduler.live: no such key"),
        ("[scheduler]\nlive_episodes = 0", "scheduler.live_episodes: Input should be greater"),
        ("[policies.Big]\nmodel = 'x'", "'Big' can't be a name"),
        ("[tasks]\nagent = 'none'", "tasks.agent: no agent 'none' among ['default']"),
        ("[tasks]\nenvironment = 'none'", "tasks.environment: no 'none' among ['default']"),
        ("[tasks.roles]\npolicy = 'none'", "tasks.roles.policy: no policy 'none'"),
        ("[tasks]\nsamples = 2\nminimum = 3", "tasks.minimum: 3 is more than tasks.samples, 2"),
        (
            "[policies.policy]\nmodel = 'm'\nchat_template_kwargs = { messages = [] }",
            "policies.policy.chat_template_kwargs: Headrace itself gives the chat template "
            "`messages`",
        ),
        (
            "[policies.policy]\nmodel = 'm'\nlimits = { in_flight = 4, period_s = 60 }",
            "period_s: it is the time for `calls`",
        ),
        ("[stop]\nreward = nan", "stop.reward: Input should be a finite number"),
    ],
)
def test_what_is_wrong_is_named(more: str, message: str) -> None:
    assert message in refused(SMALLEST + more)


def test_everything_wrong_is_said_at_once() -> None:
    message = refused(SMALLEST + "[scheduler]\nlive = 3\n[stop]\nversions = 0")
    assert "scheduler.live: no such key; " in message or "; scheduler.live: no such key" in message
    assert "stop.versions: Input should be greater than 0" in message


def test_a_recipe_needs_a_policy() -> None:
    assert "policies: a recipe needs at least one" in refused('name = "x"\n[policies]')


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("scheduler", "--set scheduler: give key=value"),
        ("name.x=3", "--set name.x: name is a value, not a table"),
        ("scheduler.x=3", "scheduler.x: no such key"),
        ("=3", "no such key"),
    ],
)
def test_settings_that_fit_nowhere_are_refused(shipped: Path, settings: str, message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_recipe("demo", shipped=shipped, settings=[settings])
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"env": "TOKEN"}', {"env": "TOKEN"}),
        ('{ env = "TOKEN" }', {"env": "TOKEN"}),
        ("['L', 'R']", ["L", "R"]),
        ("{question}: answer", "{question}: answer"),
        ("3", 3),
        ("yes", "yes"),
    ],
)
def test_a_setting_is_json_or_a_table_of_toml_or_text(
    shipped: Path, text: str, value: object
) -> None:
    recipe = load_recipe(
        "demo", shipped=shipped, settings=[f"environments.default.options.x={text}"]
    )
    assert recipe.environments["default"].options["x"] == value


def test_an_environment_variable_that_fits_nowhere_is_named(shipped: Path) -> None:
    with pytest.raises(RecipeError, match="HEADRACE__NAME__X: name is a value, not a table"):
        load_recipe("demo", shipped=shipped, environment={"HEADRACE__NAME__X": "3"})


def test_files_that_are_no_recipe_are_refused(shipped: Path) -> None:
    with pytest.raises(RecipeError, match=r"no recipe 'demmo': .* or one of: demo"):
        load_recipe("demmo", shipped=shipped)
    with pytest.raises(RecipeError, match=r"there is no file /.*/gone\.toml; .* are: demo"):
        load_recipe("gone.toml", shipped=shipped)
    (shipped / "bad.toml").write_bytes(b"a = \xff")
    with pytest.raises(RecipeError, match=r"bad\.toml is not TOML"):
        load_recipe("bad", shipped=shipped)
    (shipped / "folder.toml").mkdir()
    with pytest.raises(RecipeError, match=r"folder\.toml can't be read: Is a directory"):
        load_recipe("folder", shipped=shipped)


def test_a_recipe_is_changed_by_keys_and_nothing_else(shipped: Path) -> None:
    recipe = load_recipe("demo", shipped=shipped)
    assert change_recipe(recipe, []) == recipe
    changed = change_recipe(
        recipe, ["policies.default.groups.advantage=rloo", "policies.default.training.loss=a:b"]
    )
    policy = changed.policies["default"]
    assert policy.training is not None
    assert (policy.groups.advantage, policy.training.loss) == ("rloo", "a:b")
    assert change_recipe(changed, ["policies.default.groups.advantage=grpo"]) != recipe
    for wrong, message in (("nope=1", "nope"), ("tasks", "key=value")):
        with pytest.raises(RecipeError, match=message):
            change_recipe(recipe, [wrong])


def test_greedy_sampling_is_of_policies_that_do_not_train() -> None:
    greedy: dict[str, Any] = {"model": "m", "sampling": {"temperature": 0}}
    with pytest.raises(RecipeError, match=r"default\.sampling\.temperature: 0 can't be trained on"):
        parse_recipe({"name": "r", "policies": {"default": greedy}}, "test")
    greedy["training"] = False
    recipe = parse_recipe({"name": "r", "policies": {"default": greedy}}, "test")
    assert recipe.policies["default"].sampling.temperature == 0


def test_a_namespace_that_references_may_lead_into_has_a_valid_name(shipped: Path) -> None:
    named = load_recipe("demo", shipped=shipped, settings=['reads_from=["run-1"]'])
    assert named.reads_from == ("run-1",)
    with pytest.raises(RecipeError, match=r"'a\.b' can't be a name"):
        load_recipe("demo", shipped=shipped, settings=['reads_from=["a.b"]'])


def synchronous(live: int | None = None, **batches: int) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "a-run",
            "mode": "sync",
            "tasks": {"samples": 8},
            "scheduler": {} if live is None else {"live_episodes": live},
            "policies": {"default": {"model": "tiny", "batches": {"groups": 4, **batches}}},
        }
    )


def test_a_synchronous_run_sets_what_follows_from_it() -> None:
    recipe = synchronous()
    batches = recipe.policies["default"].batches
    assert (batches.max_staleness, batches.prefetch, recipe.live_episodes) == (0, 0, 32)
    assert synchronous(live=16).live_episodes == 16, "fewer at once are fine"
    assert Recipe.model_validate_json(recipe.canonical()) == recipe


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"max_staleness": 1}, "policies.default.batches.max_staleness: 1 contradicts mode"),
        ({"prefetch": 1}, "policies.default.batches.prefetch: 1 contradicts mode"),
        ({"live": 33}, "scheduler.live_episodes: 33 contradicts mode"),
    ],
)
def test_what_contradicts_a_synchronous_run_is_refused(
    changes: dict[str, int], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        synchronous(**changes)


def test_a_teacher_is_not_weighed_by_replays() -> None:
    tree = {
        "model": "tiny",
        "batches": {"replay": {"share": 0.2, "weight": 0.5}},
        "training": {"loss": "distill", "teacher": "teacher"},
    }
    teacher = {"model": "tiny", "training": False}
    with pytest.raises(ValueError, match="does not weigh"):
        Recipe.model_validate({"name": "r", "policies": {"default": tree, "teacher": teacher}})


TWO = {"a": {"model": "tiny-llama"}, "b": {"model": "tiny-llama"}}
FROZEN = {"a": {"model": "tiny-llama"}, "b": {"model": "tiny-llama", "training": False}}


@pytest.mark.parametrize(
    ("tasks", "policies", "chosen"),
    [
        ({}, FROZEN, None),
        ({"curators": ["greso"]}, FROZEN, "a"),
        ({"curators": ["greso"], "curated_by": "b"}, TWO, "b"),
        ({"use": "curriculum"}, FROZEN, "a"),
        ({"use": "curriculum", "purpose": "evaluate"}, TWO, None),
    ],
)
def test_the_statistics_of_one_policy_choose_items(
    tasks: dict[str, Any], policies: dict[str, Any], chosen: str | None
) -> None:
    tasks = {"roles": {"policy": "a"}, **tasks}
    recipe = Recipe.model_validate({"name": "r", "tasks": tasks, "policies": policies})
    assert recipe.curating_policy == chosen


@pytest.mark.parametrize(
    ("tasks", "policies", "message"),
    [
        ({"curators": ["greso"]}, TWO, "needs the policy whose statistics count. Choose from a, b"),
        ({"use": "curriculum"}, TWO, "the data set 'curriculum' needs the policy"),
        ({"curators": ["greso"], "curated_by": "b"}, FROZEN, "'b' is not a policy that trains"),
        ({"curators": ["greso"], "purpose": "evaluate"}, FROZEN, "so it has no statistics"),
        ({"curators": [{"tries": 2}]}, FROZEN, "a table must name what it chooses"),
    ],
)
def test_items_that_no_statistics_can_choose_are_refused(
    tasks: dict[str, Any], policies: dict[str, Any], message: str
) -> None:
    tasks = {"roles": {"policy": "a"}, **tasks}
    with pytest.raises(ValueError, match=message):
        Recipe.model_validate({"name": "r", "tasks": tasks, "policies": policies})


@pytest.mark.parametrize(
    "workers", [{"inference": 2}, {"autoscale": {"least": 1, "most": 2}}], ids=str
)
def test_one_worker_announces_versions_to_a_server(workers: dict[str, Any]) -> None:
    """Of two, each would give tokens the version that it was told itself."""
    options = {"url": "http://127.0.0.1:1/v1", "served_model": "m", "weights_url": "http://w"}
    policy: dict[str, Any] = {
        "model": "tiny-llama", "engine": {"use": "openai", "options": options},
    }  # fmt: skip
    tree = {"name": "r", "policies": {"default": policy}, "workers": workers}
    with pytest.raises(ValueError, match=r"policies\.default\.engine: 2 workers would announce"):
        Recipe.model_validate(tree)
    policy["training"] = False
    Recipe.model_validate(tree)


def test_more_partitions_than_a_commit_of_the_scheduler_holds_are_refused() -> None:
    parse_recipe(tomllib.loads(f"partitions = 314\n{SMALLEST}"), "demo.toml")
    assert "315 is more than 314" in refused(f"partitions = 315\n{SMALLEST}")
    more = "".join(f'[policies.p{number}]\nmodel = "tiny-llama"\n' for number in range(2))
    assert "Use 313 or fewer" in refused(f"partitions = 314\n{SMALLEST}{more}")


def test_a_commit_has_the_positions_that_are_counted_for_a_recipe() -> None:
    topics = Topics("space", ["a", "b"], 300)
    noted = [one for topic in SCHEDULER_TOPICS for one in topics.partitions_of(topic)]
    assert len(noted) == 2 * 300 + 2
