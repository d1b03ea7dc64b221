"""Images are pinned to their content, on an engine that says only what a test has it say."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.services.processes.docker.ceilings import Ceilings
from headrace.services.processes.docker.docker_engine import DockerEngine, NotThere
from headrace.services.processes.docker.pinned_images import PinnedImages
from tests.unit.processes.docker_fake import Answer, FakeEngine, on, says

DIGEST = f"sha256:{'1' * 64}"
OTHER = f"sha256:{'2' * 64}"
SOURCE = f"python@sha256:{'3' * 64}"
MISSING = says({"message": "No such image"}, 404)
NAMED = "GET /images/python:3/json"
BY_DIGEST = f"GET /images/{DIGEST}/json"
BY_SOURCE = f"GET /images/{SOURCE.replace('@', '%40')}/json"
PULL = "POST /images/create"
CREATE = "POST /containers/create"


def described(digest: str = DIGEST, **changes: Any) -> Answer:
    return says({"Id": digest, "RepoTags": ["python:3"], "RepoDigests": [SOURCE], **changes})


def in_turn(*answers: Answer) -> Answer:
    left = list(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(reader, writer)

    return answer


async def pinned(engine: DockerEngine) -> PinnedImages:
    images = PinnedImages("here", Ceilings())
    await images.pin(engine, "python:3")
    return images


def test_an_image_is_looked_up_once_and_then_has_its_digest(tmp_path: Path) -> None:
    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        images = await pinned(engine)
        await images.pin(engine, "python:3")
        assert made.asked.count(NAMED) == 2  # before and after the pull
        assert images["python:3"].digest == DIGEST
        assert images["python:3"].labels == {
            "headrace.image": "python:3",
            "headrace.digest": DIGEST,
        }

    answers = {NAMED: in_turn(MISSING, described(), described(OTHER)), PULL: says({})}
    on(tmp_path, answers, test)


@pytest.mark.parametrize("again", [DIGEST, OTHER])
def test_an_image_that_is_removed_is_pulled_again_by_its_digest(tmp_path: Path, again: str) -> None:
    """If the registry gives other content for it, no container is made of that."""

    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        images = await pinned(engine)
        body = {"Image": DIGEST}
        if again == OTHER:
            with pytest.raises(NotThere):
                await images.create(engine, "c", body)
            assert made.asked.count(CREATE) == 1
            return
        await images.create(engine, "c", body)
        assert made.asked[-5:] == [BY_DIGEST, PULL, BY_SOURCE, CREATE, "POST /containers/c/start"]

    answers = {
        NAMED: described(),
        CREATE: in_turn(MISSING, says({"Id": "c"}, 201)),
        BY_DIGEST: MISSING,
        PULL: says({}),
        BY_SOURCE: described(again),
        "POST /containers/c/start": says({}),
    }
    on(tmp_path, answers, test)


def test_the_source_is_the_registry_that_the_recipe_names(tmp_path: Path) -> None:
    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        assert (await pinned(engine))["python:3"].source == SOURCE

    other = SOURCE.replace("python", "127.0.0.1:5000/team/python")
    on(tmp_path, {NAMED: described(RepoDigests=[other, SOURCE])}, test)


def test_what_else_is_missing_is_no_reason_to_pull(tmp_path: Path) -> None:
    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        images = await pinned(engine)
        with pytest.raises(NotThere, match="network x not found"):
            await images.create(engine, "c", {"Image": DIGEST})
        assert PULL not in made.asked

    missing = says({"message": "network x not found"}, 404)
    on(tmp_path, {NAMED: described(), CREATE: missing, BY_DIGEST: described()}, test)


def test_an_image_with_volumes_is_refused_after_its_pull(tmp_path: Path) -> None:
    async def test(made: FakeEngine, engine: DockerEngine) -> None:
        with pytest.raises(UsageError, match=r"here: image 'python:3' declares volumes \(/data\)"):
            await pinned(engine)

    volumes = described(Config={"Volumes": {"/data": {}}})
    on(tmp_path, {NAMED: in_turn(MISSING, volumes), PULL: says({})}, test)
