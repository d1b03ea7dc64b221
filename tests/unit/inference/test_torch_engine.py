"""The torch engine against a plain full forward of the same model: tokens and logprobs."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from headrace.errors import BlobError, HeadraceError, InfrastructureError, UsageError  # noqa: E402
from headrace.services.inference.engine import (  # noqa: E402
    EngineOutput,
    EnginePrompt,
    EngineSetup,
    Weights,
)
from headrace.services.inference.engines import engine_thread  # noqa: E402
from headrace.services.inference.engines.row import Row  # noqa: E402
from headrace.services.inference.engines.torch_batch import buckets  # noqa: E402
from headrace.services.inference.engines.torch_engine import TorchEngine  # noqa: E402
from tests.contract.engines import hold  # noqa: E402

VOCABULARY = 128


def make_model(folder: Path, **settings: Any) -> None:
    """Configuration and two versions of weights, sharp enough that greedy draws are no ties."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.3,
        **{"tie_word_embeddings": True} | settings,
    )
    config.save_pretrained(folder)
    for version in (0, 1):
        torch.manual_seed(version)
        model = transformers.LlamaForCausalLM(config)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        if config.tie_word_embeddings:
            del state["lm_head.weight"]
        save_file(state, folder / f"{version}.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path


def reference(folder: Path, version: int) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.load_state_dict(load_file(folder / f"{version}.safetensors"), strict=False)
    model.tie_weights()
    return model.eval()


def expected_logprobs(model: Any, prompt: EnginePrompt, tokens: Sequence[int]) -> Any:
    """[tokens, V]: one plain forward of the whole sequence, then temperature and mask."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt.tokens, *tokens]])).logits[0].float()
    logits = logits[len(prompt.tokens) - 1 : -1]
    if prompt.allowed:
        mask = torch.full((VOCABULARY,), -torch.inf)
        mask[list(prompt.allowed)] = 0
        logits = logits + mask
    return torch.log_softmax(logits / (prompt.temperature or 1.0), -1)


def check(model: Any, prompt: EnginePrompt, answer: EngineOutput) -> None:
    expected = expected_logprobs(model, prompt, answer.tokens)
    if prompt.temperature == 0:
        assert answer.tokens == expected.argmax(-1).tolist()
    drawn = expected.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(answer.logprobs), drawn, rtol=1e-4, atol=1e-4)


def random_prompts(count: int, seed: int) -> list[EnginePrompt]:
    """Ragged prompts of all kinds."""
    pick = random.Random(seed)
    return [
        EnginePrompt(
            policy="default",
            tokens=[pick.randrange(VOCABULARY) for _ in range(pick.choice([1, 2, 7, 20, 40, 90]))],
            max_tokens=pick.choice([1, 2, 5, 30]),
            temperature=pick.choice([0.0, 0.7, 1.0, 2.0]),
            allowed=pick.choice([(), (), (3, 4, 5, 6), (100, 7)]),
            stop_ids=pick.choice([(), (5,)]),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("slots", [1, 5, 64])
@pytest.mark.parametrize("seed", range(2))
def test_ragged_batches_equal_a_plain_forward(folder: Path, slots: int, seed: int) -> None:
    prompts = random_prompts(40, seed)

    async def main() -> list[EngineOutput]:
        engine = TorchEngine(EngineSetup(folder, slots, device="cpu"))
        await engine.load(Weights("default", 0, folder / "0.safetensors"))
        answers = []

        async def late(index: int, prompt: EnginePrompt) -> EngineOutput:
            await asyncio.sleep(index * 0.001)  # they join while others are under way
            return await engine.generate(prompt)

        answers = await asyncio.gather(*(late(i, prompt) for i, prompt in enumerate(prompts)))
        await engine.close(1)
        return answers

    model = reference(folder, 0)
    for prompt, answer in zip(prompts, asyncio.run(main()), strict=True):
        check(model, prompt, answer)
        ended = answer.tokens[-1] in prompt.stop_ids
        assert answer.finish == ("stop" if ended else "length")
        assert ended or len(answer.tokens) == prompt.max_tokens


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gpt2"])
def test_other_architectures_equal_a_plain_forward(tmp_path: Path, architecture: str) -> None:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "tie_word_embeddings": False,
    }
    if architecture == "gpt2":
        settings = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4}
        settings |= {"n_positions": 256, "tie_word_embeddings": False}
    config = transformers.AutoConfig.for_model(architecture, **settings)
    config.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config)
    save_file(model.state_dict(), tmp_path / "0.safetensors")
    prompts = random_prompts(12, 0)

    async def main() -> list[EngineOutput]:
        engine = TorchEngine(EngineSetup(tmp_path, 8, device="cpu"))
        await engine.load(Weights("default", 0, tmp_path / "0.safetensors"))
        answers = await asyncio.gather(*map(engine.generate, prompts))
        await engine.close(1)
        return answers

    for prompt, answer in zip(prompts, asyncio.run(main()), strict=True):
        check(reference(tmp_path, 0), prompt, answer)


def test_after_a_change_the_kv_of_before_is_kept_and_new_prompts_are_fresh(folder: Path) -> None:
    prompt = EnginePrompt("default", [1, 2, 3, 4], max_tokens=200, temperature=0.0)

    async def main() -> tuple[EngineOutput, EngineOutput]:
        engine = TorchEngine(EngineSetup(folder, 4, device="cpu"))
        await engine.load(Weights("default", 0, folder / "0.safetensors"))
        hold(engine, 20)
        running = asyncio.create_task(engine.generate(prompt))
        await engine.load(Weights("default", 1, folder / "1.safetensors"))
        fresh = await engine.generate(prompt)
        old = await running
        await engine.close(1)
        return old, fresh

    old, fresh = asyncio.run(main())
    check(reference(folder, 1), prompt, fresh)
    assert (set(fresh.versions), fresh.mixed) == ({1}, False)
    assert (set(old.versions), old.mixed) == ({0, 1}, True)
    models = [reference(folder, 0), reference(folder, 1)]
    cache, tokens = transformers.DynamicCache(), list(prompt.tokens)
    with torch.inference_mode():
        for token, logprob, version in zip(old.tokens, old.logprobs, old.versions, strict=True):
            output = models[version](torch.tensor([tokens]), past_key_values=cache)
            expected = torch.log_softmax(output.logits[0, -1], -1)
            assert token == int(expected.argmax())
            assert logprob == pytest.approx(float(expected[token]), abs=1e-4)
            tokens = [token]


def test_weights_of_another_model_are_refused(folder: Path, tmp_path: Path) -> None:
    state = load_file(folder / "0.safetensors")
    missing = {name: value for name, value in state.items() if name != "model.norm.weight"}
    variants = {
        "missing: model.norm.weight": missing,
        "unknown: extra": state | {"extra": torch.zeros(1)},
        r"model.norm.weight \[3\], not \[64\]": state | {"model.norm.weight": torch.zeros(3)},
    }

    async def main() -> None:
        engine = TorchEngine(EngineSetup(folder, 4, device="cpu"))
        await engine.load(Weights("default", 0, folder / "0.safetensors"))
        for number, (message, variant) in enumerate(variants.items(), start=1):
            path = tmp_path / f"{number}.safetensors"
            save_file(variant, path)
            with pytest.raises(BlobError, match=message):
                await engine.load(Weights("default", number, path))
        prompt = EnginePrompt("default", [1, 2, 3], 5, temperature=0.0)
        check(reference(folder, 0), prompt, await engine.generate(prompt))
        await engine.close(1)

    asyncio.run(main())


def test_diverged_weights_fail_the_prompt_and_leave_nothing_behind(
    folder: Path, tmp_path: Path
) -> None:
    state = load_file(folder / "0.safetensors")
    values = state["model.layers.0.self_attn.v_proj.weight"]
    state["model.layers.0.self_attn.v_proj.weight"] = torch.full_like(values, float("nan"))
    save_file(state, tmp_path / "nan.safetensors")
    prompts = [EnginePrompt("default", [1, 2, 3] * n, 30, temperature=0.0) for n in (1, 5, 25)]

    async def main() -> list[EngineOutput]:
        engine = TorchEngine(EngineSetup(folder, 4, device="cpu"))
        await engine.load(Weights("default", 0, folder / "0.safetensors"))
        hold(engine, 20)
        under_way = asyncio.create_task(engine.generate(EnginePrompt("default", [1] * 40, 200)))
        await engine.load(Weights("default", 1, tmp_path / "nan.safetensors"))
        failing = [under_way, *(asyncio.create_task(engine.generate(prompts[2])) for _ in "abc")]
        for error in await asyncio.gather(*failing, return_exceptions=True):
            assert isinstance(error, InfrastructureError)
            assert error.code == "not_finite"
        await engine.load(Weights("default", 2, folder / "0.safetensors"))
        answers = await asyncio.gather(*map(engine.generate, prompts))
        await engine.close(1)
        return answers

    for prompt, answer in zip(prompts, asyncio.run(main()), strict=True):
        check(reference(folder, 0), prompt, answer)


def test_a_broken_step_fails_what_is_in_it_and_the_engine_serves_on(folder: Path) -> None:
    async def main() -> None:
        engine = TorchEngine(EngineSetup(folder, 4, device="cpu"))
        await engine.load(Weights("default", 0, folder / "0.safetensors"))

        def broken(*_: Any) -> None:
            raise RuntimeError("out of memory")

        model = engine._batches["default"].model
        hook = model.get_input_embeddings().register_forward_pre_hook(broken)
        with pytest.raises(InfrastructureError, match="out of memory"):
            await engine.generate(EnginePrompt("default", [1, 2], 3))
        hook.remove()
        assert len((await engine.generate(EnginePrompt("default", [1, 2], 3))).tokens) == 3
        assert engine.capacity().free_slots == 4
        await engine.close(1)

    asyncio.run(main())


def test_a_thread_that_ends_tells_all_who_wait(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        engine = TorchEngine(EngineSetup(folder, 4, device="cpu"))
        await engine.load(Weights("default", 0, folder / "0.safetensors"))

        def broken() -> None:
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(engine._batches["default"], "drop_cancelled", broken)
        prompt = EnginePrompt("default", [1, 2], 3)
        failed = asyncio.create_task(engine.failed())
        for _ in range(2):
            with pytest.raises(HeadraceError, match="the device is lost") as raised:
                await engine.generate(prompt)
            assert not isinstance(raised.value, InfrastructureError)
        with pytest.raises(HeadraceError, match="the device is lost"):
            await failed
        with pytest.raises(HeadraceError, match="the device is lost"):
            await engine.load(Weights("default", 1, folder / "1.safetensors"))
        await engine.close(1)

    asyncio.run(main())


@pytest.mark.parametrize("asked", ["before", "after"])
def test_an_engine_that_ends_before_it_has_weights_says_so(folder: Path, asked: str) -> None:
    """To whoever waits already, and to whoever asks afterwards. The first cause counts."""

    async def main() -> None:
        engine = TorchEngine(EngineSetup(folder, 4, device="cpu"))
        if asked == "before":
            failed = asyncio.create_task(engine.failed())
            await asyncio.sleep(0)
        for cause in ("rank 1 ended", "no answer of rank 1"):
            await asyncio.to_thread(engine._die, cause)
        if asked == "after":
            failed = asyncio.create_task(engine.failed())
        with pytest.raises(HeadraceError, match=r"can't go on: rank 1 ended\. Restart"):
            await asyncio.wait_for(failed, 5)
        with pytest.raises(HeadraceError, match="rank 1 ended"):
            await engine.load(Weights("default", 0, folder / "0.safetensors"))
        await engine.close(1)

    asyncio.run(main())


def test_an_engine_whose_step_hangs_does_not_keep_its_worker_from_ending(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other engine of the worker has failed, and its reason is in the log before that."""
    monkeypatch.setattr(engine_thread, "CLOSE_S", 0.2)
    begun, goes_on = threading.Event(), threading.Event()

    def hang(_: Any) -> list[Any]:
        begun.set()
        goes_on.wait(60)
        return []

    async def main() -> None:
        hanging, failing = (TorchEngine(EngineSetup(folder, 4, device="cpu")) for _ in range(2))
        await hanging.load(Weights("default", 0, folder / "0.safetensors"))
        monkeypatch.setattr(hanging, "_advance", hang)
        waiting = asyncio.create_task(hanging.generate(EnginePrompt("default", [1, 2], 3)))
        await asyncio.to_thread(begun.wait, 60)
        failing._die("rank 1 ended")
        assert "the torch engine can't go on: rank 1 ended. Restart the worker" in caplog.text
        await asyncio.wait_for(hanging.close(0), 30)
        assert "the torch engine has not ended within 0.2 s" in caplog.text
        goes_on.set()
        waiting.cancel()

    asyncio.run(main())


def test_a_seed_repeats_the_draw(folder: Path) -> None:
    async def main() -> None:
        engine = TorchEngine(EngineSetup(folder, 4, device="cpu"))
        await engine.load(Weights("default", 0, folder / "0.safetensors"))
        seeded = EnginePrompt("default", [1, 2], 20, seed=9)
        first, second = [await engine.generate(seeded) for _ in range(2)]
        other = await engine.generate(EnginePrompt("default", [1, 2], 20, seed=10))
        assert first.tokens == second.tokens != other.tokens
        await engine.close(1)

    asyncio.run(main())


def test_sliding_windows_are_refused(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("mistral", sliding_window=8, num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="full attention"):
        TorchEngine(EngineSetup(tmp_path, 4))


def test_the_context_can_be_shortened_but_not_extended(folder: Path) -> None:
    for wanted, context in ((64, 64), (9_999, 256)):
        engine = TorchEngine(EngineSetup(folder, 4, options={"context": wanted}))
        assert engine.capacity().context == context
    for wrong in (0, "long"):
        with pytest.raises(UsageError, match="context"):
            TorchEngine(EngineSetup(folder, 4, options={"context": wrong}))


def test_bfloat16_serves(folder: Path) -> None:
    async def main() -> None:
        engine = TorchEngine(EngineSetup(folder, 4, device="cpu", dtype="bfloat16"))
        await engine.load(Weights("default", 0, folder / "0.safetensors"))
        prompts = [EnginePrompt("default", [1] * n, 5) for n in (1, 9, 30)]
        answers = await asyncio.gather(*map(engine.generate, prompts))
        assert [len(answer.tokens) for answer in answers] == [5, 5, 5]
        await engine.close(1)

    asyncio.run(main())


def test_buckets_hold_every_row_once_with_little_padding() -> None:
    loop = asyncio.new_event_loop()
    pick = random.Random(0)
    rows = [
        Row(
            EnginePrompt("default", [1] * pick.randint(1, 300), 1),
            loop.create_future(),
            1,
            "length",
        )
        for _ in range(500)
    ]
    result = buckets(rows, 1_024)
    assert sorted(map(id, rows)) == sorted(id(row) for bucket in result for row in bucket)
    for bucket in result:
        lengths = [len(row.prompt.tokens) for row in bucket]
        assert len(lengths) * max(lengths) <= 1_024
        assert max(lengths) - min(lengths) <= max(4, max(lengths) // 8)
    assert [len(bucket) for bucket in buckets(rows[:1], 1)] == [1]
    for bucket in buckets(rows, 1_024, 200):
        lengths = [len(row.prompt.tokens) for row in bucket]
        padding = len(lengths) * max(lengths) - sum(lengths)
        assert padding <= 200 or max(lengths) - min(lengths) <= max(4, max(lengths) // 8)
    few = [
        replace(row, prompt=EnginePrompt("default", [1] * length, 1))
        for row, length in zip(rows, (60, 40, 30, 8, 8), strict=False)
    ]
    joined = [[len(row.prompt.tokens) for row in one] for one in buckets(few, 1_024, 60)]
    assert joined == [[60, 40, 30], [8, 8]]  # The next row would need 52 more tokens of padding.
    assert len(buckets(few, 1_024)) == 4
    loop.close()
