"""The engine that asks a server: what it sends, what it takes, and what it does about failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import BlobError, InfrastructureError, UsageError
from headrace.schemas.recipe.policy import Policy
from headrace.schemas.recipe.tables import RecipeError
from headrace.services.inference.engine import EnginePrompt, EngineSetup, Weights
from headrace.services.inference.engines.openai.openai_engine import OpenaiEngine
from headrace.services.models.weights import model_folder
from headrace.services.operate.conformance.engine.check_engine import check_engine
from tests.contract.engines import make_model
from tests.contract.openai_server import MODEL, Fleet, serving

CONTEXT = 512
VOCABULARY = 32
SLOTS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY, max_position_embeddings=CONTEXT
    )


@pytest.fixture
def served(model: Path) -> Iterator[tuple[Fleet, str]]:
    with serving(model, CONTEXT) as (fleet, address):
        fleet.call(fleet.engine.load(weights(model, 0)))
        yield fleet, address


def weights(model: Path, version: int) -> Weights:
    return Weights("default", version, model / f"{version % 2}.safetensors")


def make(model: Path, address: str, **options: Any) -> OpenaiEngine:
    given = {"url": f"{address}/v1", "served_model": MODEL, "timeout_s": 20.0, **options}
    return OpenaiEngine(EngineSetup(model, SLOTS, options=given))


def prompt(max_tokens: int = 5, **settings: Any) -> EnginePrompt:
    return EnginePrompt("default", [1, 2, 3], max_tokens, **settings)


def drive(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.long
def test_keeps_every_rule_but_exact_versions_during_a_change() -> None:
    with serving(model_folder("tiny-llama"), CONTEXT) as (_, address):
        options = {
            "url": f"{address}/v1",
            "served_model": MODEL,
            "weights_url": f"{address}/weights",
        }
        report = check_engine("openai", options)
    assert report.failed == (), "\n".join(report.lines())
    unchecked = {one.rule for one in report.findings if one.verdict == "not checked"}
    assert unchecked <= {"a_seed_repeats", "scores_are_right", "weights_change_during_an_answer"}


def test_a_request_has_ids_and_an_answer_has_ids(model: Path, served: tuple[Fleet, str]) -> None:
    fleet, address = served
    fleet.token = "secret-token"

    async def main() -> None:
        engine = make(model, address, token="secret-token", extra={"user": "headrace"})
        assert engine.capacity().context == 0
        await engine.load(weights(model, 0))
        assert engine.capacity().context == CONTEXT
        answer = await engine.generate(prompt(seed=3, stop_ids=(4,), allowed=(4, 5)))
        assert set(answer.tokens) <= {4, 5}
        assert answer.versions == [0] * len(answer.tokens)
        sent = fleet.asked[-1]
        assert (sent["prompt"], sent["max_tokens"], sent["user"]) == ([1, 2, 3], 5, "headrace")
        assert (sent["stop_token_ids"], sent["allowed_token_ids"]) == ([4], [4, 5])
        await engine.close(1)

    drive(main)


def test_a_server_that_can_not_be_used_is_refused_at_the_start(
    model: Path, served: tuple[Fleet, str]
) -> None:
    fleet, address = served

    async def refused(message: str, **options: Any) -> None:
        engine = make(model, address, **options)
        with pytest.raises(UsageError, match=message):
            await engine.load(weights(model, 0))
        await engine.close(0)

    async def main() -> None:
        fleet.without = {"token_ids"}
        await refused("return_token_ids")
        fleet.without = {"logprobs"}
        await refused("token ids or logprobs")
        fleet.without = set()
        fleet.raw = True
        await refused("processed_logprobs")
        fleet.raw = False
        await refused("it has \\['tiny'\\]", served_model="other")
        fleet.token = "x"
        await refused("engine.options.token", context=CONTEXT)

    drive(main)


def test_a_busy_server_is_asked_again_for_a_bounded_time(
    model: Path, served: tuple[Fleet, str]
) -> None:
    fleet, address = served

    async def main() -> None:
        engine = make(model, address, tries=2, timeout_s=5.0)
        await engine.load(weights(model, 0))
        fleet.failing = [503]
        assert len((await engine.generate(prompt())).tokens) == 5
        fleet.failing = [503, 503]
        with pytest.raises(InfrastructureError, match="answered 503"):
            await engine.generate(prompt())
        fleet.failing = [400]
        before = len(fleet.asked)
        with pytest.raises(InfrastructureError, match="answered 400") as failed:
            await engine.generate(prompt())
        assert not failed.value.retryable
        assert len(fleet.asked) == before + 1
        await engine.close(1)
        silent = make(model, address, timeout_s=0.2)
        silent._context, silent._policies = CONTEXT, {"default": 0}
        fleet.delay_s = 5
        with pytest.raises(InfrastructureError, match=r"within 0\.2 s"):
            await silent.generate(prompt())
        await silent.close(0)

    drive(main)


def test_a_busy_server_is_left_alone_for_as_long_as_it_says(
    model: Path, served: tuple[Fleet, str]
) -> None:
    fleet, address = served

    async def main() -> None:
        engine = make(model, address, timeout_s=5.0)
        await engine.load(weights(model, 0))
        fleet.failing, fleet.retry_after = [429], "2"
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert len((await engine.generate(prompt())).tokens) == 5
        assert loop.time() - began >= 2
        fleet.failing, fleet.retry_after, before = [429, 429], "3600", len(fleet.asked)
        with pytest.raises(InfrastructureError, match="answered 429"):
            await engine.generate(prompt())
        assert len(fleet.asked) == before + 1
        await engine.close(1)

    drive(main)


def test_an_absent_server_is_a_failure_of_the_infrastructure(model: Path) -> None:
    async def main() -> None:
        engine = make(model, "http://127.0.0.1:9", tries=1, context=CONTEXT)
        with pytest.raises(InfrastructureError, match="engine_unreachable"):
            await engine.load(weights(model, 0))
        await engine.close(0)

    drive(main)


def test_cancelling_closes_the_request_and_slots_bound_them(
    model: Path, served: tuple[Fleet, str]
) -> None:
    fleet, address = served

    async def main() -> None:
        engine = make(model, address)
        await engine.load(weights(model, 0))
        fleet.delay_s = 30
        running = [asyncio.create_task(engine.generate(prompt())) for _ in range(3 * SLOTS)]
        while fleet.at_once < SLOTS:
            await asyncio.sleep(0.01)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert all(task.cancelled() for task in running)
        while fleet.closed_early < SLOTS:
            await asyncio.sleep(0.01)
        assert fleet.most_at_once == SLOTS
        assert engine.capacity().free_slots == SLOTS
        left = asyncio.create_task(engine.generate(prompt()))
        while fleet.at_once < 1:
            await asyncio.sleep(0.01)
        await engine.close(0.1)
        assert (await left).finish == "interrupted"

    drive(main)


def test_a_version_counts_when_the_address_has_acknowledged_it(
    model: Path, served: tuple[Fleet, str], tmp_path: Path
) -> None:
    fleet, address = served

    async def main() -> None:
        engine = make(model, address, weights_url=f"{address}/weights")
        await engine.load(weights(model, 0))
        fleet.delay_s = 0.5
        asked = len(fleet.asked)
        during = asyncio.create_task(engine.generate(prompt()))
        while len(fleet.asked) == asked:
            await asyncio.sleep(0.01)
        await engine.load(weights(model, 1))
        fleet.delay_s = 0.0
        answer = await during
        assert (answer.versions, answer.mixed) == ([0] * 5, True)
        answer = await engine.generate(prompt())
        assert (answer.versions, answer.mixed) == ([1] * 5, False)
        assert [one["version"] for one in fleet.announced] == [0, 1]
        assert {len(one["digest"]) for one in fleet.announced} == {64}
        (tmp_path / "bad").write_bytes(b"no weights")
        with pytest.raises(BlobError):
            await engine.load(Weights("default", 2, tmp_path / "bad"))
        assert len(fleet.announced) == 2
        with pytest.raises(UsageError, match="the same weights_url"):
            await engine.load(Weights("other", 0, model / "0.safetensors"))
        await engine.close(1)

    drive(main)


def test_a_fixed_version_stays(model: Path, served: tuple[Fleet, str]) -> None:
    _, address = served

    async def main() -> None:
        engine = make(model, address)
        await engine.load(weights(model, 0))
        with pytest.raises(UsageError, match=r"engine\.options\.weights_url"):
            await engine.load(weights(model, 1))
        await engine.close(1)

    drive(main)


def test_a_recipe_needs_an_address_for_versions_and_may_hide_the_token() -> None:
    options = {"url": "http://x/v1", "served_model": "m", "token": {"env": "KEY"}}
    engine = {"use": "openai", "options": options}
    assert Policy.model_validate({"model": "m", "engine": engine, "training": False})
    with pytest.raises(ValueError, match=r"engine\.options\.weights_url"):
        Policy.model_validate({"model": "m", "engine": engine})
    options["weights_url"] = "x"
    with pytest.raises((ValueError, RecipeError), match="give an address"):
        Policy.model_validate({"model": "m", "engine": engine})
