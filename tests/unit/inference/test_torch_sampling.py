"""Drawing: each row by its own settings, and the logprob of what was drawn from."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from headrace.services.inference.engine import EnginePrompt  # noqa: E402
from headrace.services.inference.engines.torch_sampling import draw, plan_sampling  # noqa: E402

CPU = torch.device("cpu")
LOGITS = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
ROWS = 20_000


def drawn(**settings: Any) -> tuple[list[float], dict[int, float]]:
    """How often each id is drawn of LOGITS, and the logprob said of each."""
    torch.manual_seed(0)
    prompts = [EnginePrompt("default", [1], 1, **settings)] * ROWS
    ids, logprobs = draw(LOGITS.expand(ROWS, 4), plan_sampling(prompts, 4, CPU), [])
    assert logprobs.dtype == torch.float32
    said = dict(zip(ids.tolist(), logprobs.tolist(), strict=True))
    return (torch.bincount(ids, minlength=4) / ROWS).tolist(), said


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [0.4, 0.3, 0.2, 0.1]),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"allowed": (1, 3)}, [0, 0.75, 0, 0.25]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_k": 9}, [0.4, 0.3, 0.2, 0.1]),
        ({"top_p": 0.6}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"top_k": 3, "top_p": 0.5}, [4 / 7, 3 / 7, 0, 0]),
        ({"min_p": 0.5}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"allowed": (2, 3), "min_p": 0.9}, [0, 0, 1, 0]),
    ],
    ids=str,
)
def test_draws_follow_the_distribution_that_the_logprobs_say(
    settings: dict[str, Any], expected: list[float]
) -> None:
    shares, said = drawn(**settings)
    assert shares == pytest.approx(expected, abs=0.02)
    for token, logprob in said.items():
        assert logprob == pytest.approx(torch.tensor(expected[token]).log().item(), abs=1e-5)


def test_greedy_takes_the_likeliest_and_says_its_logprob_at_temperature_1() -> None:
    shares, said = drawn(temperature=0.0)
    assert shares == [1, 0, 0, 0]
    assert said[0] == pytest.approx(LOGITS[0].item())


def test_rows_of_different_settings_share_a_batch() -> None:
    prompts = [
        EnginePrompt("default", [1], 1, temperature=0.0),
        EnginePrompt("default", [1], 1, allowed=(3,)),
        EnginePrompt("default", [1], 1, top_k=1),
        EnginePrompt("default", [1], 1, min_p=1.0),
        EnginePrompt("default", [1], 1, temperature=0.0, allowed=(2, 3)),
    ]
    ids, logprobs = draw(LOGITS.expand(5, 4), plan_sampling(prompts, 4, CPU), [])
    assert ids.tolist() == [0, 3, 0, 0, 2]
    assert logprobs.tolist() == pytest.approx([LOGITS[0].item(), 0, 0, 0, -0.405465], abs=1e-5)


def test_a_plan_of_plain_sampling_costs_nothing() -> None:
    plan = plan_sampling([EnginePrompt("default", [1], 1)] * 3, 4, CPU)
    assert (plan.greedy, plan.temperature, plan.allowed) == (None, None, None)
    assert (plan.top_k, plan.top_p, plan.min_p) == (None, None, None)
