"""The cluster that a run uses, and the folder of this machine. They are not part of the recipe."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from headrace.errors import UsageError
from headrace.schemas.recipe.read_recipe import load_recipe, parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.topics import NAME
from headrace.services.base.files import private, private_folder
from headrace.services.base.redactor import REDACTOR
from headrace.services.models.blobs import BlobStore
from headrace.services.models.remote_blobs import open_blob_store
from headrace.services.namespace.credentials import (
    OPERATOR,
    REGISTRY,
    parse_properties,
    read_credentials,
)

RECIPES = Path(__file__).parents[2] / "infra" / "recipes"
"""The folder of the recipes that ship with Headrace."""
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
        "stack-credentials",
        "tmp",
    }
)
"""Names of folders in the state folder that no namespace may have."""

_SECRET_PROPERTY = re.compile(
    r"(password|passphrase|secret|token(?!\.endpoint)|\.pem$|user\.info$|oauthbearer\.config$)"
)
"""The properties of librdkafka that hold secrets."""
_USER_INFO = "user.info"
"""The end of a property that is `user:password`. A message may show the password alone."""


@dataclass(frozen=True)
class ClusterConfig:
    """The addresses of Kafka, the schema registry and the blob store, the namespace, and the folder
    in which this machine keeps its files.
    """

    state: Path = Path(".headrace")
    """The folder of the local stack, logs, caches and checkpoints."""
    bootstrap_servers: str | None = None
    """Addresses of Kafka, `host:port[,host:port]`. None means the local stack of `state`."""
    registry_url: str | None = None
    """Base URL of a Confluent-compatible schema registry. None means that of the local stack."""
    blobs: str | None = None
    """The blob store: a folder, or a URL that fsspec supports. None means `<state>/blobs`."""
    namespace: str | None = None
    """The namespace. None means the recipe's name."""
    kafka_properties: Mapping[str, str] = field(default_factory=dict)
    """Properties of librdkafka, for example `security.protocol`. Those of the role come on top."""
    credentials: Path | None = None
    """A folder with a file of properties for each role, or the file of this one. See
    `credentials.py`."""
    role: str = OPERATOR
    """As which role of `access_table.py` this process connects, if it has credentials."""
    schema_ids: Mapping[str, int] = field(default_factory=dict)
    """What `headrace run` knows of the registry, so that its processes need not ask again."""

    def __post_init__(self) -> None:
        if self.namespace is not None and not NAME.match(self.namespace):
            raise UsageError(
                f"--namespace {self.namespace!r}: use lower-case letters, digits, - and _, "
                "at most 63"
            )
        if self.namespace in RESERVED:
            raise UsageError(
                f"--namespace {self.namespace}: a folder of Headrace uses that name. Use another"
            )
        if (self.registry_url is None) != (self.bootstrap_servers is None):
            raise UsageError(
                "--bootstrap-servers and --registry-url need each other: give both or neither"
            )

    @classmethod
    def of_environment(
        cls,
        *,
        state: Path | None,
        bootstrap_servers: str | None,
        registry_url: str | None,
        namespace: str | None,
        kafka_properties: Mapping[str, str],
    ) -> ClusterConfig:
        """Returns a configuration; what is None comes from the variables of the command line.

        Raises UsageError if they contradict each other, or a name is not allowed.
        """
        known = os.environ.get
        properties = parse_properties(known("HEADRACE_KAFKA_PROPERTIES", "").split())
        return cls(
            state=state or Path(known("HEADRACE_STATE") or ".headrace"),
            bootstrap_servers=bootstrap_servers or known("HEADRACE_BOOTSTRAP_SERVERS") or None,
            registry_url=registry_url or known("HEADRACE_REGISTRY_URL") or None,
            blobs=known("HEADRACE_BLOBS") or None,
            namespace=namespace or known("HEADRACE_NAMESPACE") or None,
            kafka_properties={**properties, **kafka_properties},
            credentials=credentials_of(known("HEADRACE_CREDENTIALS")),
        )

    def properties(self) -> dict[str, str]:
        """Returns all properties of the role. Their secrets are redacted from now on.

        Raises UsageError if its credentials are missing.
        """
        own = {} if self.credentials is None else read_credentials(self.credentials, self.role)
        properties = {**self.kafka_properties, **own}
        for name, secret in _secrets_of(properties):
            REDACTOR.add(name, secret)
        return properties

    def broker_properties(self) -> dict[str, str]:
        """Returns the properties for clients of the brokers. Raises the same error."""
        every = self.properties().items()
        return {name: value for name, value in every if not name.startswith(REGISTRY)}

    def registry_properties(self) -> dict[str, str]:
        """Returns the properties for the client of the registry, without their prefix."""
        every = self.properties().items()
        return {
            name.removeprefix(REGISTRY): value for name, value in every if name.startswith(REGISTRY)
        }

    @property
    def blob_url(self) -> str:
        """The folder or URL of the blob store."""
        return self.blobs or str(self.state / "blobs")

    def open_blobs(self, owner: str | None) -> BlobStore:
        """Opens the blob store. Raises UsageError if no installed package supports its URL.

        `owner` is who puts blobs (see `owner_name`). With None, what is put has no marker until its
        owner claims it.
        """
        return open_blob_store(self.blob_url, self.state / "blobs-cache", owner)

    def folder(self, namespace: str) -> Path:
        """Returns the namespace's folder on this machine, with its logs, caches and checkpoints."""
        return self.state / namespace

    def cluster_folder(self, namespace: str, cluster_id: str) -> Path:
        """Returns the folder of the namespace's caches and checkpoints, within `folder`.

        Each Kafka cluster has its own, because another one may have a run of the same name.
        """
        return self.folder(namespace) / f"cluster-{quote(cluster_id, safe='')}"

    def secrets(self) -> Iterator[tuple[str, str]]:
        """Yields the name and the text of each secret: of Kafka's properties, and in URLs."""
        yield from _secrets_of(self.properties())
        for name, urls in (("registry password", self.registry_url), ("blobs", self.blobs)):
            for url in (urls or "").split(","):
                with suppress(ValueError):  # Whoever opens a wrong URL reports it.
                    password = urlsplit(url).password
                    if password is not None:
                        yield name, unquote(password)

    def connected(
        self, bootstrap_servers: str, registry_url: str, credentials: Path | None = None
    ) -> ClusterConfig:
        """Returns the same configuration with the addresses of the broker and the registry.

        `credentials` are those of a local stack. Those that the configuration names go before.
        """
        return replace(
            self,
            bootstrap_servers=bootstrap_servers,
            registry_url=registry_url,
            credentials=self.credentials or credentials,
        )

    def to_json(self) -> str:
        """Returns the configuration as one line, for a child process."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> ClusterConfig:
        """Returns the configuration that `to_json` has written."""
        tree = json.loads(text)
        credentials = credentials_of(tree["credentials"])
        return cls(**{**tree, "state": Path(tree["state"]), "credentials": credentials})


def _secrets_of(properties: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name, value in properties.items():
        if not _SECRET_PROPERTY.search(name):
            continue
        yield name, value
        if name.endswith(_USER_INFO):
            yield name, value.partition(":")[2]


def credentials_of(text: str | None) -> Path | None:
    """Returns the folder or file of credentials that a variable or an option names."""
    return Path(text).absolute() if text else None


def read_recipe(name_or_path: str, settings: Sequence[str] = ()) -> Recipe:
    """Reads a recipe by its name or path, with overrides from the environment and `settings`.

    A `.json` file is a recipe that `write_resolved` has written; nothing overrides it. Raises
    UsageError, which says what is wrong.
    """
    try:
        if name_or_path.endswith(".json"):
            return parse_recipe(json.loads(Path(name_or_path).read_text()), name_or_path)
        return load_recipe(name_or_path, shipped=RECIPES, environment=os.environ, settings=settings)
    except OSError as error:
        raise UsageError(f"can't read the recipe {name_or_path}: {error.strerror}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{name_or_path} is not JSON: {error}") from error


def write_resolved(recipe: Recipe, state: Path) -> Path:
    """Writes a recipe for child processes and returns its path, which contains its digest."""
    path = state / "recipes" / f"{recipe.digest.hex()[:16]}.json"
    private_folder(path.parent)
    temporary = path.with_suffix(f".{os.getpid()}")
    with open(temporary, "w", encoding="utf-8", opener=private) as file:
        file.write(recipe.canonical())
    temporary.replace(path)
    return path
