"""What every engine owes its worker: each built-in, on a tiny model of random weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import InfrastructureError, UsageError
from headrace.services.inference.engine import Engine, EnginePrompt, EngineSetup, Weights
from headrace.services.inference.engines.scripted import ScriptedEngine
from headrace.services.inference.engines.torch_engine import TorchEngine
from headrace.services.operate.conformance.engine.check_engine import check_engine
from tests.contract.engines import KINDS, MakeEngine, drive, hold, make_engine_of, make_model, slow

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM and what it imports warn of themselves

CONTEXT = 4_096
VOCABULARY = 32
SLOTS = 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `config.json` and weights `0.safetensors` and `1.safetensors`."""
    return make_model(
        tmp_path_factory.mktemp("model"), vocab_size=VOCABULARY, max_position_embeddings=CONTEXT
    )


@pytest.fixture(params=[*KINDS, "scripted"])
def make_engine(request: pytest.FixtureRequest, model: Path) -> MakeEngine:
    """Makes an engine whose generations take a while, so that things happen during them."""

    def make() -> Engine:
        if request.param == "scripted":
            options = {"tokens": [3, 5], "delay_ms": 1}
            return ScriptedEngine(EngineSetup(model, SLOTS, options=options))
        return make_engine_of(request.param, model, SLOTS)

    return make


def weights(model: Path, version: int, policy: str = "default") -> Weights:
    return Weights(policy, version, model / f"{version % 2}.safetensors")


def prompt(max_tokens: int = 5, **settings: Any) -> EnginePrompt:
    given: dict[str, Any] = {"policy": "default", "tokens": [1, 2, 3], "max_tokens": max_tokens}
    return EnginePrompt(**(given | settings))


async def busy(engine: Engine, slots: int) -> None:
    """Waits until so many slots are taken."""
    while engine.capacity().free_slots > SLOTS - slots:
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("kind", KINDS)
def test_keeps_every_rule_of_the_contract(kind: str) -> None:
    """The rules that everybody can try with `python -m headrace.conformance engine`."""

    def make(setup: EngineSetup) -> Engine:
        return make_engine_of(kind, setup.model, setup.slots)

    report = check_engine(kind, {}, engine=make)
    open_rules = {one.rule for one in report.findings if one.verdict != "pass"}
    assert open_rules == {"a_seed_repeats"}, "\n".join(report.lines())


def test_a_stop_id_ends_the_generation_and_belongs_to_it(
    make_engine: MakeEngine, model: Path
) -> None:
    async def main() -> None:
        engine = make_engine()
        await engine.load(weights(model, 0))
        answer = await engine.generate(prompt(20, stop_ids=range(VOCABULARY)))
        assert (len(answer.tokens), answer.finish) == (1, "stop")
        answer = await engine.generate(prompt(20, allowed=[4], stop_ids=[5]))
        assert (len(answer.tokens), answer.finish) == (20, "length")
        await engine.close(1)

    drive(main)


def test_weights_change_between_tokens(make_engine: MakeEngine, model: Path) -> None:
    async def main() -> None:
        engine = make_engine()
        await engine.load(weights(model, 0))
        hold(engine, 100)
        running = asyncio.create_task(engine.generate(prompt(400)))
        await busy(engine, 1)
        await engine.load(weights(model, 1))
        after = await engine.generate(prompt(2))
        answer = await running
        assert len(answer.tokens) == 400
        assert answer.versions == sorted(answer.versions)
        assert answer.versions[-1] == 1
        assert answer.mixed == (answer.versions[0] == 0)
        assert (after.versions, after.mixed) == ([1, 1], False)
        await engine.close(1)

    drive(main)


def test_policies_have_weights_of_their_own(make_engine: MakeEngine, model: Path) -> None:
    async def main() -> None:
        engine = make_engine()
        await engine.load(weights(model, 3, "left"))
        with pytest.raises(InfrastructureError, match="no_weights"):
            await engine.generate(prompt(policy="right"))
        await engine.load(weights(model, 4, "right"))
        left, right = await asyncio.gather(
            engine.generate(prompt(3, policy="left")), engine.generate(prompt(3, policy="right"))
        )
        assert (left.versions, right.versions) == ([3] * 3, [4] * 3)
        await engine.close(1)

    drive(main)


def test_cancelling_frees_the_slot(make_engine: MakeEngine, model: Path) -> None:
    async def main() -> None:
        engine = make_engine()
        await engine.load(weights(model, 0))
        running = [asyncio.create_task(engine.generate(prompt(4_000))) for _ in range(SLOTS)]
        await busy(engine, SLOTS)
        waiting = asyncio.create_task(engine.generate(prompt(1)))
        running[1].cancel()
        assert (await waiting).finish == "length"
        assert engine.capacity().free_slots == 1
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        assert engine.capacity().free_slots == SLOTS
        await engine.close(1)

    drive(main)


def test_closing_drains_then_interrupts(make_engine: MakeEngine, model: Path) -> None:
    async def main() -> None:
        engine = make_engine()
        slow(engine)
        await engine.load(weights(model, 0))
        long = asyncio.create_task(engine.generate(prompt(4_000)))
        await busy(engine, 1)
        short = asyncio.create_task(engine.generate(prompt(2)))
        await asyncio.sleep(0)  # it has begun
        await engine.close(2.0)
        assert (await short).finish == "length"
        answer = await long
        assert answer.finish == "interrupted"
        assert 0 < len(answer.tokens) < 4_000
        assert engine.capacity().free_slots == 0
        with pytest.raises(InfrastructureError, match="engine_closed"):
            await engine.generate(prompt())

    drive(main)


WRONG: tuple[dict[str, Any], ...] = (
    {"tokens": []},
    {"tokens": [VOCABULARY]},
    {"tokens": [-1]},
    {"allowed": [VOCABULARY]},
    {"max_tokens": 0},
    {"temperature": -1.0},
    {"temperature": float("nan")},
    {"top_p": 0.0},
    {"top_k": -1},
    {"min_p": 2.0},
)


def test_a_prompt_that_can_never_be_continued_is_refused(
    make_engine: MakeEngine, model: Path
) -> None:
    async def main() -> None:
        engine = make_engine()
        await engine.load(weights(model, 0))
        for wrong in WRONG:
            with pytest.raises(ValueError, match=r"token|allowed|temperature|top_k"):
                await engine.generate(prompt(**wrong))
        assert len((await engine.generate(prompt(1))).tokens) == 1
        await engine.close(1)

    drive(main)


def test_unknown_options_and_a_folder_without_a_model_are_refused(
    model: Path, tmp_path: Path
) -> None:
    for engine in (TorchEngine, ScriptedEngine):
        with pytest.raises(UsageError, match="speed: no such key"):
            engine(EngineSetup(model, SLOTS, options={"speed": 11}))
        with pytest.raises(UsageError, match=r"config\.json"):
            engine(EngineSetup(tmp_path, SLOTS))


@pytest.mark.vllm
def test_vllm_refuses_what_it_cannot_use(model: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"speed": 11}, "speed: no such key"),
        ({"kv": "forget"}, "kv"),
        ({"arguments": {"seed": 1}}, "seed"),
        ({"arguments": {"speed": 11}}, "speed"),
        ({"context": CONTEXT + 1}, "max_model_len"),
    ):
        with pytest.raises(UsageError, match=message):
            make_engine_of("vllm", model, SLOTS, **options)
    with pytest.raises(UsageError, match=r"config\.json"):
        make_engine_of("vllm", tmp_path, SLOTS)
