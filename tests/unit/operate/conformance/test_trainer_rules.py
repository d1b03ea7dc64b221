"""The rules for trainers: a good run breaks none, and each fault breaks the rule that names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from headrace.schemas.events import Blob, PolicyPublished, Ref
from headrace.services.operate.conformance.conformance_report import check_rules, rules_of
from headrace.services.operate.conformance.trainer.observed_run import ObservedRun, Publication
from headrace.services.operate.conformance.trainer.trainer_rules import TrainerRules
from headrace.services.operate.conformance.trainer.trainer_trial import weights_distance
from headrace.trainer.contract.weight_files import pack_weights

POISON, LAST = 2, 3


def digest_of(number: int) -> bytes:
    return bytes([number]) * 32


def batch(version: int) -> Ref:
    return Ref(topic="t", partition=0, offset=version, digest=bytes(16))


def publication(version: int, status: str = "", weights: int = -1) -> Publication:
    """Each version has weights of its own, except the poison one."""
    weights = weights if weights >= 0 else version - (version == POISON)
    usual = "initial" if not version else "skipped" if version == POISON else "trained"
    status = status or usual
    event = PolicyPublished(
        policy="p",
        version=version,
        status=status,  # type: ignore[arg-type]
        digest=digest_of(weights),
        full=Blob(sha256=digest_of(weights), size=1),
        full_version=version,
        batch=None if status in ("initial", "resumed") else batch(version),
    )
    return Publication(event, event.digest)


def good_run() -> ObservedRun:
    return ObservedRun(
        publications=[publication(version) for version in range(LAST + 1)],
        batches={version: batch(version) for version in range(1, LAST + 1)},
        stopped_after_s=0.5,
        fenced="",
    )


def broken(rules: TrainerRules) -> list[str]:
    """The rules that do not hold."""
    return list(check_rules("trainer", "", rules_of(rules)).failed)


def judged(break_it: Callable[[ObservedRun], object], **changes: float) -> list[str]:
    """The rules that a run with kills breaks if this was done to it."""
    run = good_run()
    break_it(run)
    return broken(TrainerRules(good_run(), run, POISON, LAST, **changes))


def changed(run: ObservedRun, version: int, **changes: object) -> None:
    old = run.publications[version]
    run.publications[version] = replace(old, event=old.event.model_copy(update=changes))


def test_a_good_run_breaks_no_rule() -> None:
    assert judged(lambda run: None) == []


def test_resumed_weights_break_no_rule_if_the_trainer_differs_from_itself() -> None:
    def resume(run: ObservedRun) -> None:
        run.publications.append(publication(LAST, "resumed", weights=9))

    assert judged(resume, spread=0.1, distance=0.3) == []
    assert judged(resume, spread=0.1, distance=0.5) == ["keeps_its_state"]


@pytest.mark.parametrize(
    ("fault", "rules"),
    [
        (lambda run: run.publications.clear(), ["publishes_version_0"]),
        (lambda run: run.publications.pop(1), ["versions_in_order"]),
        (lambda run: run.publications.pop(2), ["versions_in_order", "skips_a_poison_batch"]),
        (lambda run: run.publications.insert(2, publication(0)),
         ["versions_in_order", "each_version_once"]),
        (lambda run: run.publications.append(publication(LAST + 1)),
         ["versions_in_order", "names_its_batch"]),
        (lambda run: run.publications.append(publication(LAST)), ["each_version_once"]),
        (lambda run: run.publications.append(publication(LAST, "resumed")), ["each_version_once"]),
        (lambda run: run.publications.__setitem__(3, replace(publication(3), digest=digest_of(8))),
         ["digests_are_right"]),
        (lambda run: run.publications.__setitem__(3, replace(publication(3), digest=None)),
         ["digests_are_right"]),
        (lambda run: changed(run, 3, batch=batch(1)), ["names_its_batch"]),
        (lambda run: run.publications.__setitem__(2, publication(2, "trained")),
         ["skips_a_poison_batch"]),
        (lambda run: run.publications.__setitem__(2, publication(2, weights=2)),
         ["skips_a_poison_batch"]),
        (lambda run: setattr(run, "fenced", "it published"), ["is_fenced"]),
        (lambda run: setattr(run, "stopped_after_s", None), ["ends_on_sigterm"]),
        (lambda run: setattr(run, "left_behind", ["sleep 99"]), ["leaves_no_process"]),
        (lambda run: run.failures.append("it ended"), ["makes_every_version"]),
    ],
)  # fmt: skip
def test_each_fault_breaks_the_rule_that_names_it(
    fault: Callable[[ObservedRun], object], rules: list[str]
) -> None:
    assert judged(fault) == rules


def test_lost_state_shows_in_the_weights() -> None:
    def lose(run: ObservedRun) -> None:
        run.publications[3] = publication(3, weights=7)

    assert judged(lose, distance=0.01) == ["keeps_its_state"]


def test_batches_that_teach_nothing_are_seen_without_kills() -> None:
    run = good_run()
    run.publications[1] = publication(1, weights=0)
    run.publications[2] = publication(2, weights=0)
    assert broken(TrainerRules(run, good_run(), POISON, LAST)) == ["each_batch_trains"]
    run.publications[1] = publication(1, "skipped", weights=0)
    assert broken(TrainerRules(run, good_run(), POISON, LAST)) == ["each_batch_trains"]


def test_without_kills_some_rules_are_not_checked() -> None:
    rules = rules_of(TrainerRules(good_run(), None, POISON, LAST))
    report = check_rules("trainer", "", rules)
    unchecked = [one.rule for one in report.findings if one.verdict == "not checked"]
    assert unchecked == ["keeps_its_state", "is_fenced"]
    assert not report.failed


@pytest.mark.parametrize("published", [0, 1])
def test_rules_about_what_was_not_published_are_not_checked(published: int) -> None:
    run = ObservedRun(publications=good_run().publications[:published], failures=["it ended"])
    report = check_rules("trainer", "", rules_of(TrainerRules(run, None, POISON, LAST)))
    about_batches = {"names_its_batch", "each_batch_trains"}
    about_all = {"versions_in_order", "each_version_once", "digests_are_right"}
    verdicts = {one.rule: one.verdict for one in report.findings}
    assert {verdicts[name] for name in about_batches} == {"not checked"}
    assert {verdicts[name] for name in about_all} == {"pass" if published else "not checked"}
    assert verdicts["publishes_version_0"] == ("pass" if published else "fail")


def test_the_distance_of_weights_is_relative() -> None:
    one = pack_weights({"a": np.array([3.0, 4.0], np.float32), "n": np.array([7])})
    other = pack_weights({"a": np.array([3.0, 4.5], np.float32), "n": np.array([8])})
    assert weights_distance(one, one) == 0
    assert weights_distance(one, other) == pytest.approx(0.1)
    assert weights_distance(one, b"") == 1
    assert weights_distance(b"", b"") == 1
