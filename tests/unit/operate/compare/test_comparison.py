"""What a comparison of a run with its replays says, and what it draws."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from headrace.errors import DependencyError, UsageError
from headrace.schemas.events import PolicyPublished
from headrace.services.operate.compare.comparison import ComparedRun, Comparison
from headrace.services.operate.compare.comparison_output import print_comparison
from headrace.services.operate.compare.comparison_plot import draw
from headrace.services.operate.evaluation import EvaluationResult
from headrace.services.operate.plot.figure_file import empty_figure

RLOO = "policies.default.groups.advantage: 'grpo' -> 'rloo'"


def version(
    number: int, weights: str = "", status: str = "trained", **metrics: float
) -> PolicyPublished:
    return PolicyPublished.model_validate(
        {
            "policy": "default",
            "version": number,
            "status": status if number else "initial",
            "digest": (weights or str(number)).encode().ljust(32, b"."),
            "full_version": number,
            "metrics": metrics if number else {},
        }
    )


def a_run(
    name: str,
    *versions: PolicyPublished,
    replay_of: str | None = None,
    changes: tuple[str, ...] = (),
) -> ComparedRun:
    return ComparedRun(name, replay_of, {one.version: one for one in versions}, changes)


RECORDED = a_run(
    "exp",
    version(0),
    version(1, reward_mean=0.25, tokens=40.0, loss=0.5, kl=0.001, publish_wait_s=1.0),
    version(2, reward_mean=0.5, tokens=50.0, loss=0.4, kl=0.002),
    version(3, reward_mean=0.75, tokens=60.0, loss=0.3, kl=0.003),
)
REPLAY = a_run(
    "exp-replay",
    version(0),
    version(1, reward_mean=0.25, tokens=40.0, loss=0.5, kl=0.001),
    version(2, "other", reward_mean=0.5 + 1e-15, tokens=50.0, loss=0.9, kl=0.2),
    replay_of="exp",
    changes=(RLOO,),
)


def test_the_first_difference_is_found_among_the_versions_that_both_have() -> None:
    comparison = Comparison("default", RECORDED, [REPLAY])
    assert comparison.first_other_weights(REPLAY) == 2
    assert comparison.first_other_batch(REPLAY) is None, "a last bit is no other batch"
    assert comparison.newest_common() == 2
    assert comparison.metrics() == ["reward_mean", "loss", "kl"], "figures of training alone"
    assert [(number, run.namespace) for number, run, _ in comparison.rows()] == [
        (0, "exp"), (0, "exp-replay"), (1, "exp"), (1, "exp-replay"), (2, "exp"),
        (2, "exp-replay"), (3, "exp"),
    ]  # fmt: skip
    same = a_run("same", *RECORDED.versions.values(), replay_of="exp")
    assert Comparison("default", RECORDED, [same]).first_other_weights(same) is None


@pytest.mark.parametrize(
    ("changed", "first"),
    [
        ({"reward_mean": 0.5, "tokens": 51.0}, 2),
        ({"reward_mean": 0.4, "tokens": 50.0}, 2),
        ({"tokens": 50.0}, 2),
        ({"reward_mean": 0.5, "tokens": 50.0, "demonstrated_tokens": 3.0}, 2),
        ({"reward_mean": 0.5, "tokens": 50.0, "loss": 7.0}, None),
    ],
)
def test_another_batch_shows_in_what_it_decides(
    changed: dict[str, float], first: int | None
) -> None:
    trained = version(2).model_copy(update={"metrics": changed})
    other = a_run("other", trained, replay_of="exp")
    comparison = Comparison("default", RECORDED, [other])
    assert comparison.first_other_batch(other) == first
    skipped = a_run("other", version(2, status="skipped"), replay_of="exp")
    assert Comparison("default", RECORDED, [skipped]).first_other_batch(skipped) is None


def test_the_notes_say_what_a_replay_does_not_measure() -> None:
    notes = Comparison("default", RECORDED, [REPLAY]).notes()
    assert notes[0].startswith("exp-replay is a replay of exp.")
    assert "does not measure the replayed policy" in notes[0]
    assert any("recorded tokens" in note and "kl" in note for note in notes)
    assert any("--evaluate" in note for note in notes)
    assert any("different scales" in note for note in notes), "another advantage"

    other = a_run("other", *RECORDED.versions.values())
    notes = Comparison("default", RECORDED, [other]).notes()
    assert notes == ["other is not a replay. Its figures are measured on its own episodes."]


def test_runs_without_a_common_version_are_said() -> None:
    empty = a_run("empty", replay_of="exp")
    comparison = Comparison("default", RECORDED, [empty])
    assert comparison.newest_common() is None
    assert comparison.differences(empty) == ["has no version of policy default that exp has too"]


def evaluated() -> Comparison:
    comparison = Comparison("default", RECORDED, [REPLAY])
    for name, higher in (("exp", 0.0), ("exp-replay", 0.25)):
        result = comparison.evaluations[name] = EvaluationResult()
        result.asked = 2
        result.rewards = {("source", str(n)): (n / 8, n / 8 + higher) for n in range(4)}
    return comparison


def test_the_page_has_a_row_for_each_version_and_the_evaluation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_comparison(evaluated())
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[0].split("  ")[0] == "version"
    assert sum(line.startswith(("0 ", "1 ", "2 ", "3 ")) for line in lines) == 7
    assert "weights: differ from version 2 on" in shown
    assert "batches: no other reward or number of tokens in all 3 versions" in shown
    assert RLOO in shown
    assert "evaluation of version 2" in shown
    assert "exp-replay minus exp, by task   0.125 [-0.426, 0.554]" in shown
    assert "--evaluate" not in shown

    tree = json.loads(json.dumps(evaluated().to_tree()))
    first, replay = tree["runs"]
    assert (first["first_other_weights"], replay["first_other_weights"]) == (None, 2)
    assert first["evaluation"]["minus_first"] is None
    assert replay["evaluation"]["minus_first"]["value"] == 0.125
    assert first["versions"][1]["metrics"]["publish_wait_s"] == 1.0


@pytest.mark.slow
def test_a_plot_is_a_file_that_does_not_change(tmp_path: Path) -> None:
    files = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for file in files:
        draw(evaluated(), empty_figure(file, "--plot"), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    text = "".join(ElementTree.parse(files[0]).getroot().itertext())
    for expected in ("exp-replay (replay)", "reward_mean of recorded episodes", "kl", "avg@k"):
        assert expected in text
    picture = tmp_path / "plot.png"
    draw(
        Comparison("default", RECORDED, [a_run("empty")]), empty_figure(picture, "--plot"), picture
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_cant_be_drawn_is_said_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"ends in \.svg or \.png"):
        empty_figure(tmp_path / "plot.pdf", "--plot")
    with pytest.raises(UsageError, match="there is no folder"):
        empty_figure(tmp_path / "none" / "plot.svg", "--plot")
    (tmp_path / "folder.svg").mkdir()
    with pytest.raises(DependencyError, match="write"):
        draw(evaluated(), empty_figure(tmp_path / "folder.svg", "--plot"), tmp_path / "folder.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'headrace\[plot\]'"):
        empty_figure(tmp_path / "plot.svg", "--plot")
