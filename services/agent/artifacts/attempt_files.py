"""The files that an attempt's environment and judges gave out so far."""

from __future__ import annotations

from headrace.schemas.events import Blob, Failure, ObservationRecorded
from headrace.schemas.untrusted.artifact_names import check_names
from headrace.services.agent.stops import AttemptFailed

MAX_FILES = 1024
"""Maximum number of files of an attempt. The recipe's `artifacts.files` is at most this."""


class AttemptFiles:
    """The files of one attempt. Those of an earlier attempt never count."""

    def __init__(self) -> None:
        self.by_name: dict[str, Blob] = {}
        """If a name occurs again, the newer file counts. Those of a judge have the judge's name
        and `/` before their names."""

    def add(self, answer: ObservationRecorded, prefix: str = "") -> None:
        """Adds the files that an answer names.

        Raises AttemptFailed if they can't be files of one episode: anybody may write an answer.
        """
        named = {
            prefix + one.name: one.model_copy(update={"name": prefix + one.name})
            for one in answer.artifacts
        }
        found = {**self.by_name, **named}
        try:
            check_names([one.name for one in answer.artifacts])
            check_names(found)
            if len(found) > MAX_FILES:
                raise ValueError(f"{len(found)} files; at most {MAX_FILES} are kept")
        except ValueError as error:
            failure = Failure(
                origin="environment", code="bad_artifacts", message=str(error), retryable=True
            )
            raise AttemptFailed(failure) from error
        self.by_name = found
