"""What status says of policies that wait at the barrier."""

from __future__ import annotations

from headrace.schemas.events import BatchAssembled, BatchSample, Dropped, PolicyPublished, Ref
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.operate.run.progress import Progress

RECIPE = Recipe.model_validate(
    {
        "name": "r",
        "tasks": {"roles": {"solver": "solver", "verifier": "verifier"}},
        "barrier": {"versions": 1},
        "policies": {name: {"model": "tiny"} for name in ("solver", "verifier")},
    }
)


def published(policy: str, version: int) -> PolicyPublished:
    return PolicyPublished(
        policy=policy, version=version, status="trained", digest=bytes(32), full_version=version
    )


def batch(policy: str, version: int, *, samples: int) -> BatchAssembled:
    sample = BatchSample(
        task=0, sample=0, trajectory=Ref(topic="t", partition=0, offset=0, digest=bytes(16)),
        advantages=b"", tokens=1, longest=1, oldest_version=0,
    )  # fmt: skip
    reasons = ("zero_advantage", "stale", "zero_advantage", *["evaluate"] * 3)
    return BatchAssembled(
        policy=policy, version=version, recipe=bytes(32), seed=0, samples=(sample,) * samples,
        dropped=tuple(Dropped(task=n, reason=one) for n, one in enumerate(reasons)),
        sampled_tokens=0, low_mark=0, groups_read=0,
    )  # fmt: skip


def waiting() -> Progress:
    """The solver has published version 1, and the verifier no more than version 0."""
    progress = Progress(RECIPE)
    for policy in ("solver", "verifier"):
        progress.on_event(published(policy, 0), 0.0, 0)
    progress.on_event(published("solver", 1), 60.0, 2)
    return progress


def test_a_short_wait_is_no_hint() -> None:
    assert waiting().hints() == []


def test_a_long_wait_for_groups_says_where_to_look() -> None:
    progress = waiting()
    progress.on_event(published("solver", 0), 60.0 + 1_500, 3)
    (hint,) = progress.hints()
    assert hint.startswith("solver waits at the barrier for verifier, for 25 minutes now")
    assert "headrace tail groups.verifier" in hint
    progress.on_event(published("verifier", 1), 1_600.0, 4)
    assert progress.hints() == []


def test_a_long_wait_for_a_trainer_says_so() -> None:
    progress = waiting()
    progress.on_event(batch("verifier", 1, samples=1), 700.0, 0)
    (hint,) = progress.hints()
    assert "its trainer has not published version 1" in hint


def test_a_batch_with_nothing_to_train_on_is_a_hint_at_once() -> None:
    progress = waiting()
    progress.on_event(batch("verifier", 1, samples=0), 61.0, 0)
    (hint,) = progress.hints()
    assert "its 3 groups were dropped, most of them for 'zero_advantage'" in hint
