"""Tasks that bring a file, and environments whose files are collected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

from headrace.schemas.events import ObservationRecorded
from headrace.schemas.recipe.recipe import Recipe
from headrace.services.models.blobs import BlobStore
from headrace.services.operate.verify.invariants.log_facts import Facts
from headrace.services.tasks.task_maker import Item

FILES = "files"
"""A kind of a scenario. No misbehaviour, and no excuse."""


def with_files(recipe: Recipe, chance: Random) -> Recipe:
    """The recipe with tasks that collect a file. If it can, they bring one, too."""
    tree = recipe.model_dump(mode="json")
    tree["environments"]["default"]["collect"] = ["out/*"]
    tree["tasks"]["labels"] = {"kind": FILES}
    if tree["tasks"]["use"] == "count" and chance.random() < 0.7:
        tree["tasks"]["use"] = "tests.simulation.files:bringing"
    return Recipe.model_validate(tree)


def bringing(items: int, same: bool = False) -> Iterator[Item]:
    """As the data set `count`, but each item brings a file."""
    brought = {"artifacts": {"in/a": str(Path(__file__))}}
    for number in range(items):
        yield Item("0", seed=0, task=brought) if same else Item(str(number), task=brought)


def unstored_files(facts: Facts, blobs: BlobStore) -> Iterator[str]:
    """Files that are named and not stored."""
    for observation in facts.events(ObservationRecorded):
        for blob in observation.artifacts:
            if not blobs.holds(blob):
                yield f"I2: observation {observation.event_id} names a file that is not stored"
