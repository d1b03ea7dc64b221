"""*Where* a run happens: broker, registry, blobs, local state. No part of the recipe."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from headrace.errors import UsageError
from headrace.schemas.recipe.read_recipe import load_recipe, parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.tables import RecipeError
from headrace.schemas.topics import NAME
from headrace.services.models.blob_url import open_blob_store
from headrace.services.models.blobs import BlobStore

RECIPES = Path(__file__).parents[2] / "infra" / "recipes"
"""The folder of the shipped recipes."""
RESERVED = frozenset(
    {
        "blobs",
        "blobs-cache",
        "kafka",
        "kafka-format",
        "launches",
        "logs",
        "recipes",
        "registry",
        "tmp",
    }
)
"""Folders of the state folder that are no namespace's."""


@dataclass(frozen=True)
class ClusterConfig:
    """Where to connect, and where this machine keeps its files."""

    state: Path = Path(".headrace")
    """Folder of the local stack, logs, caches and checkpoints."""
    bootstrap_servers: str | None = None
    """`host:port[,host:port]` of Kafka; None is the local stack of `state`."""
    registry_url: str | None = None
    """Base URL of the Confluent-compatible schema registry; None is the local stack's."""
    blobs: str | None = None
    """The blob store: a folder, or a URL that fsspec serves; None is `<state>/blobs`."""
    namespace: str | None = None
    """None is the recipe's name."""
    kafka_properties: Mapping[str, str] = field(default_factory=dict)
    """librdkafka properties, such as `security.protocol`."""

    def __post_init__(self) -> None:
        if self.namespace is not None and not NAME.match(self.namespace):
            raise UsageError(
                f"--namespace {self.namespace!r}: use lower-case letters, digits, - and _, "
                "at most 63"
            )
        if self.namespace in RESERVED:
            raise UsageError(f"--namespace {self.namespace}: the state folder uses that name")
        if self.registry_url is not None and self.bootstrap_servers is None:
            raise UsageError("--registry-url goes with --bootstrap-servers: give both or neither")

    @property
    def blob_url(self) -> str:
        """The blob store's place."""
        return self.blobs or str(self.state / "blobs")

    def open_blobs(self) -> BlobStore:
        """The blob store. UsageError where nothing here serves its URL."""
        return open_blob_store(self.blob_url, self.state / "blobs-cache")

    def folder(self, namespace: str) -> Path:
        """The namespace's folder on this machine: logs, caches, checkpoints."""
        return self.state / namespace

    def connected(self, bootstrap_servers: str, registry_url: str) -> ClusterConfig:
        """The same, with broker and registry known."""
        return replace(self, bootstrap_servers=bootstrap_servers, registry_url=registry_url)

    def to_json(self) -> str:
        """One line, for a child process."""
        return json.dumps({**asdict(self), "state": str(self.state)})

    @classmethod
    def from_json(cls, text: str) -> ClusterConfig:
        """The inverse of `to_json`."""
        tree = json.loads(text)
        return cls(**{**tree, "state": Path(tree["state"])})


def read_recipe(name_or_path: str, settings: Sequence[str] = ()) -> Recipe:
    """A shipped recipe by name, a file by path, with overrides. UsageError says what is wrong.

    A `.json` file is a recipe as `run` resolved it, taken as it stands.
    """
    try:
        if name_or_path.endswith(".json"):
            return parse_recipe(json.loads(Path(name_or_path).read_text()), name_or_path)
        return load_recipe(name_or_path, shipped=RECIPES, environment=os.environ, settings=settings)
    except RecipeError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{name_or_path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{name_or_path} is not JSON: {error}") from error


def write_resolved(recipe: Recipe, state: Path) -> Path:
    """Writes a recipe for child processes, named by its digest; one that is there is the same."""
    path = state / "recipes" / f"{recipe.digest.hex()[:16]}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(recipe.canonical())
    temporary.replace(path)
    return path
