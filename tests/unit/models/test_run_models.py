"""References to versions of runs, as recipes spell them."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace.schemas.events import Blob
from headrace.services.models.run_models import RunModel
from headrace.services.models.weights import model_folder

FILES = Blob(sha256=bytes(range(32)), size=1234)


@pytest.mark.parametrize(
    "model",
    [
        RunModel("exp-7", "solver"),
        RunModel("exp-7", "solver", 0),
        RunModel("exp-7", "solver", 120, FILES),
    ],
)
def test_a_reference_is_read_as_it_is_written(model: RunModel) -> None:
    assert RunModel.parse(str(model)) == model


@pytest.mark.parametrize("text", ["tiny-llama", "owner/name@main", "/a/folder", "./run:x/y"])
def test_other_models_are_no_references(text: str) -> None:
    assert RunModel.parse(text) is None


@pytest.mark.parametrize(
    "text", ["run:", "run:a", "run:a/b@", "run:a/b@x", "run:a/b#00-1", "run:A/b", "run:a/b@1#00-1"]
)
def test_a_wrong_reference_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write run:NAMESPACE/POLICY@VERSION"):
        RunModel.parse(text)


def test_a_reference_covers_the_versions_that_it_may_stand_for() -> None:
    exact = RunModel("a", "p", 3, FILES)
    assert RunModel("a", "p").covers(exact)
    assert RunModel("a", "p", 3).covers(exact)
    assert exact.covers(exact)
    assert not RunModel("a", "p", 4).covers(exact)
    assert not RunModel("b", "p").covers(exact)
    assert not RunModel("a", "p", 3, Blob(sha256=bytes(32), size=1)).covers(exact)


def test_a_folder_is_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_MODELS", str(tmp_path))
    exact = RunModel("a", "p", 3, FILES)
    with pytest.raises(UsageError, match="is not in the cache"):
        model_folder(str(exact))
    with pytest.raises(UsageError, match="not resolved to an exact version"):
        model_folder("run:a/p@3")
    described = tmp_path / f"{FILES.sha256.hex()}-described"
    described.mkdir()
    assert model_folder(str(exact)) == described
    with pytest.raises(UsageError, match="is not in the cache"):
        model_folder(str(exact), weights=True)
    whole = tmp_path / FILES.sha256.hex()
    whole.mkdir()
    assert model_folder(str(exact)) == model_folder(str(exact), weights=True) == whole
