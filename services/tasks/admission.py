"""Refuses tasks that a recipe can't run. The reason is the verdict on their episodes.

The scheduler checks a task before it starts it. The agent worker checks it again, because another
program may have written the start to the log.
"""

from __future__ import annotations

import json

from headrace.schemas.events import EnvironmentUse, Failure, TaskSubmitted
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.role_rewards import OVERLONG
from headrace.schemas.untrusted.artifact_names import by_name, check_limits, check_patterns

MAX_TASK_CHARACTERS = 1_000_000
"""Maximum length of a task as text. Each of its episodes carries the whole task in one record."""
MAX_SAMPLES = 4_096
"""Maximum number of samples of a task. They start in one transaction."""
MAX_START_BYTES = 64_000_000
"""Maximum size of a task times its samples, in bytes of its text."""

MAX_ID_BYTES = 65_536
"""Maximum length of a source, a task_id or an item_id in UTF-8. Records carry them up to three
times: in the key, in a header and in the value."""
MAX_LABELS = 64
"""Maximum number of labels of a task. Each of its terminal records repeats them."""
MAX_LABEL_NAME = 64
"""Maximum number of characters of a label's name."""
MAX_LABEL = 256
"""Maximum number of characters of a label."""
MAX_MESSAGE = 2_000
"""A verdict keeps at most so many characters of its message, which may repeat a name."""
SOURCE_LABELS = ("curation.", "league.")
"""How the labels begin that Headrace's task source writes. They are not copied into records."""
DOCKER = "docker"
"""The environment whose episodes have containers, and which alone uses an image."""


def refusal(recipe: Recipe, submitted: TaskSubmitted) -> Failure | None:
    """Returns why this recipe can't run this task, or None if it can."""
    text = repr(submitted)
    if len(text) > MAX_TASK_CHARACTERS:
        return refused("too_large", f"the task has more than {MAX_TASK_CHARACTERS} characters")
    if submitted.agent not in recipe.agents:
        return refused("unknown_agent", f"no agent {submitted.agent!r} in the recipe")
    environment = submitted.environment
    use = environment.use if environment else None
    if use is not None and use not in recipe.environments:
        return refused("unknown_environment", f"no environment {use!r} in the recipe")
    if environment is not None and (why := _bad_image(recipe, environment)):
        return refused("unknown_image", why)
    for role, played in submitted.roles.items():
        if played.policy not in recipe.policies:
            return refused(
                "unknown_policy", f"role {role!r}: no policy {played.policy!r} in the recipe"
            )
        if role == OVERLONG or (role in recipe.environments and role != use):
            return refused(
                "bad_task",
                f"role {role!r}: a penalty or a judge gives a reward of this name. Rename the role",
            )
    if not 1 <= submitted.samples <= MAX_SAMPLES:
        return refused("bad_task", f"samples is {submitted.samples}, not 1 to {MAX_SAMPLES}")
    if (whole := _bytes(text) * submitted.samples) > MAX_START_BYTES:
        return refused(
            "too_large",
            f"each of the {submitted.samples} samples carries the whole task, {whole:,} bytes in "
            f"all, and {MAX_START_BYTES:,} are allowed. Submit it with fewer samples, or put what "
            f"is long into files (`artifacts`)",
        )
    limits = submitted.max_turns, submitted.max_tokens, submitted.deadline_s, submitted.attempts
    if min(limits) < 1:
        return refused(
            "bad_task", "max_turns, max_tokens, deadline_s and attempts must be at least 1"
        )
    bad = _bad_json(submitted) or _bad_files(recipe, submitted) or _bad_labels(submitted)
    return bad or _long_ids(submitted)


def size_of(submitted: TaskSubmitted) -> int:
    """Returns about how many bytes a task takes in a record: those of its text."""
    return _bytes(repr(submitted))


def own_labels(submitted: TaskSubmitted) -> dict[str, str]:
    """Returns the labels that come back in the records of a task: those of its submitter."""
    return {
        name: label
        for name, label in submitted.labels.items()
        if not name.startswith(SOURCE_LABELS)
    }


def refused(code: str, message: str) -> Failure:
    """Returns a verdict that the operator or the submitter of the task must act on."""
    return Failure(origin="operator", code=code, message=message[:MAX_MESSAGE])


def _bytes(text: str) -> int:
    return len(text.encode(errors="replace"))


def _bad_image(recipe: Recipe, environment: EnvironmentUse) -> str:
    """Returns why a task can't use an image, or an empty text."""
    settings, image = recipe.environments[environment.use], environment.image
    if not image or settings.external:
        return ""
    whose = f"environments.{environment.use}"
    if settings.use != DOCKER:
        return f"image {image!r}: {whose} has no containers. Leave the image out"
    listed = [settings.options.get("image"), *settings.options.get("images", ())]
    if image in listed:
        return ""
    return f"image {image!r} is not among the images of {whose}.options. Add it to `images` there"


def _bad_files(recipe: Recipe, submitted: TaskSubmitted) -> Failure | None:
    """Returns why the files of a task, or those that it collects, can't be used."""
    limits, environment = recipe.artifacts, submitted.environment
    try:
        sizes = [one.size for one in by_name(submitted.artifacts).values()]
        check_limits(sizes, limits.files, limits.file_mb, limits.task_mb)
        check_patterns(environment.collect if environment is not None else ())
    except ValueError as error:
        return refused("bad_artifacts", f"artifacts: {error}")
    if sizes and environment is None:
        return refused("bad_artifacts", "artifacts: a task without an environment takes no files")
    return None


def _long_ids(submitted: TaskSubmitted) -> Failure | None:
    for name in ("source", "task_id", "item_id"):
        if (size := _bytes(getattr(submitted, name))) > MAX_ID_BYTES:
            return refused("bad_task", f"{name} has {size:,} bytes; {MAX_ID_BYTES:,} are allowed")
    return None


def _bad_labels(submitted: TaskSubmitted) -> Failure | None:
    labels = own_labels(submitted)
    if len(labels) > MAX_LABELS:
        return refused("bad_task", f"{len(labels)} labels; at most {MAX_LABELS} are allowed")
    for name, label in labels.items():
        if not 0 < len(name) <= MAX_LABEL_NAME or len(label) > MAX_LABEL:
            return refused(
                "bad_task",
                f"label {name[:MAX_LABEL_NAME]!r}: a name has 1 to {MAX_LABEL_NAME} characters, "
                f"and a label at most {MAX_LABEL}",
            )
    return None


def _bad_json(submitted: TaskSubmitted) -> Failure | None:
    texts = {"payload": submitted.payload, "options": submitted.options}
    if submitted.environment is not None:
        texts["environment.options"] = submitted.environment.options
    for name, text in texts.items():
        try:
            fits = isinstance(json.loads(text), dict)
        except (ValueError, RecursionError):
            fits = False
        if not fits:
            return refused("bad_task", f"{name} is not a JSON object")
    return None
