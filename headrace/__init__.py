"""The event backbone for reinforcement learning of LLM agents, on Apache Kafka.

This is everything that a plug-in of your own needs, and the client that reads and writes a run:

    from headrace import Episode, Environment, Observation, TaskView, Client

Each name is imported when it is first used, so `import headrace` takes no time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.async_client import AsyncClient, SubmittedTask
    from headrace.client import Client
    from headrace.errors import (
        BlobError,
        DependencyError,
        EnvironmentFailed,
        Fenced,
        HeadraceError,
        InfrastructureError,
        RecordsLost,
        UsageError,
    )
    from headrace.schemas.events import GroupClosed
    from headrace.schemas.recipe.tables import Settings
    from headrace.schemas.untrusted.artifact_names import matches
    from headrace.services.agent.conversation import Conversation, Generation
    from headrace.services.agent.episode import Episode
    from headrace.services.agent.stops import NoScore
    from headrace.services.base.types import Observation, TaskFile, TaskView
    from headrace.services.env.environment import (
        Collecting,
        Environment,
        Judge,
        Named,
        Resumable,
    )
    from headrace.services.env.sandbox.command_start import SandboxEnded
    from headrace.services.env.sandbox.sandbox import BadArgument, Sandbox
    from headrace.services.env.sandbox.tools import Tool
    from headrace.services.inference.engine import (
        AdapterWeights,
        Capacity,
        Engine,
        EngineOutput,
        EnginePrompt,
        EngineSetup,
        Weights,
        check_prompt,
    )
    from headrace.services.operate.try_episode.play_episode import play_episode
    from headrace.services.tasks.curation.curator import Curator
    from headrace.services.tasks.curation.item_statistics import ItemRecord
    from headrace.services.tasks.task_maker import Item
    from headrace.stream_jobs.advantages import TurnAdvantage
    from headrace.stream_jobs.filters import Group
    from headrace.stream_jobs.selection import Candidates
    from headrace.trainer.checkpoint import Checkpoint
    from headrace.trainer.contract.packed_plan import PackedMicroBatch, plan
    from headrace.trainer.contract.training_batch import SampleOrigin, TrainingBatch
    from headrace.trainer.losses.loss import Loss, MicroBatch
    from headrace.trainer_client import TrainerClient
    from headrace.trajectories import PathArrays, Trajectory, TurnArrays

_MODULES = {
    "headrace.async_client": ("AsyncClient", "SubmittedTask"),
    "headrace.client": ("Client",),
    "headrace.errors": (
        "BlobError", "DependencyError", "EnvironmentFailed", "Fenced", "HeadraceError",
        "InfrastructureError", "RecordsLost", "UsageError",
    ),
    "headrace.schemas.untrusted.artifact_names": ("matches",),
    "headrace.schemas.events": ("GroupClosed",),
    "headrace.schemas.recipe.tables": ("Settings",),
    "headrace.services.agent.conversation": ("Conversation", "Generation"),
    "headrace.services.agent.episode": ("Episode",),
    "headrace.services.agent.stops": ("NoScore",),
    "headrace.services.base.types": ("Observation", "TaskFile", "TaskView"),
    "headrace.services.env.environment": (
        "Collecting", "Environment", "Judge", "Named", "Resumable",
    ),
    "headrace.services.env.sandbox.command_start": ("SandboxEnded",),
    "headrace.services.env.sandbox.sandbox": ("BadArgument", "Sandbox"),
    "headrace.services.env.sandbox.tools": ("Tool",),
    "headrace.services.inference.engine": (
        "AdapterWeights", "Capacity", "Engine", "EngineOutput", "EnginePrompt", "EngineSetup",
        "Weights", "check_prompt",
    ),
    "headrace.services.operate.try_episode.play_episode": ("play_episode",),
    "headrace.services.tasks.curation.curator": ("Curator",),
    "headrace.services.tasks.curation.item_statistics": ("ItemRecord",),
    "headrace.services.tasks.task_maker": ("Item",),
    "headrace.stream_jobs.advantages": ("TurnAdvantage",),
    "headrace.stream_jobs.filters": ("Group",),
    "headrace.stream_jobs.selection": ("Candidates",),
    "headrace.trainer.checkpoint": ("Checkpoint",),
    "headrace.trainer.contract.packed_plan": ("PackedMicroBatch", "plan"),
    "headrace.trainer.contract.training_batch": ("SampleOrigin", "TrainingBatch"),
    "headrace.trainer.losses.loss": ("Loss", "MicroBatch"),
    "headrace.trainer_client": ("TrainerClient",),
    "headrace.trajectories": ("PathArrays", "Trajectory", "TurnArrays"),
}  # fmt: skip
"""Module to the names that it gives: the imports above, as they are made at run time."""
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AdapterWeights",
    "AsyncClient",
    "BadArgument",
    "BlobError",
    "Candidates",
    "Capacity",
    "Checkpoint",
    "Client",
    "Collecting",
    "Conversation",
    "Curator",
    "DependencyError",
    "Engine",
    "EngineOutput",
    "EnginePrompt",
    "EngineSetup",
    "Environment",
    "EnvironmentFailed",
    "Episode",
    "Fenced",
    "Generation",
    "Group",
    "GroupClosed",
    "HeadraceError",
    "InfrastructureError",
    "Item",
    "ItemRecord",
    "Judge",
    "Loss",
    "MicroBatch",
    "Named",
    "NoScore",
    "Observation",
    "PackedMicroBatch",
    "PathArrays",
    "RecordsLost",
    "Resumable",
    "SampleOrigin",
    "Sandbox",
    "SandboxEnded",
    "Settings",
    "SubmittedTask",
    "TaskFile",
    "TaskView",
    "Tool",
    "TrainerClient",
    "TrainingBatch",
    "Trajectory",
    "TurnAdvantage",
    "TurnArrays",
    "UsageError",
    "Weights",
    "check_prompt",
    "matches",
    "plan",
    "play_episode",
]


def __getattr__(name: str) -> Any:
    """Imports a name of the façade. Raises AttributeError for any other."""
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"headrace has no {name!r}; it has: {', '.join(__all__)}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The names of the façade."""
    return sorted(__all__)
