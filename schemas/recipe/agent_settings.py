"""The agents and the environments of a recipe."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from headrace.schemas.recipe.tables import NotNegative, PlugIn, Positive, PositiveSeconds
from headrace.schemas.untrusted.artifact_names import check_patterns

EXTERNAL = "external"
"""`use` of an environment that another team's worker serves, through the topics alone."""


class Agent(PlugIn):
    """An agent: a coroutine that takes an Episode. `use` names a built-in or an import path."""

    use: str = "multi_turn"
    """A built-in (`single_turn`, `multi_turn`, `chat`, `command`, `client`), or an import path."""
    unfinished_reward: float | None = None
    """The highest reward of an episode that ends at a limit of turns, tokens or context, and its
    reward if it has none by then. Absent: the reward that it has by then. If it has none, it is not
    trained on. So set this key if the environment gives its reward only at the end."""
    overlong: Literal["penalise", "mask"] = "penalise"
    """How an episode counts that a limit of turns, tokens or context cut.

    `penalise`: it is trained on with its reward. `mask`: its reward counts in its group, but
    nothing is learned from its tokens. `mask` also holds for an episode in which a limit of tokens
    cut the last answer of a policy in training. Both hold for all policies of the episode."""
    overlong_buffer: NotNegative = 0
    """Number of tokens, below the task's `max_tokens`, in which a penalty for length rises from 0
    to `overlong_penalty`. Only tokens that are trained on count. 0: length itself is not
    penalised."""
    overlong_penalty: float = Field(default=1.0, ge=0)
    """The largest penalty of `overlong_buffer`. It is subtracted from the reward of a training
    episode. An episode that no longer fits into the model's context has the whole penalty."""
    timeouts: Literal["exclude", "unfinished"] = "exclude"
    """How an episode counts that its deadline ends, or that ends because a step exceeded
    `environments.NAME.step_s`.

    `exclude`: it has no reward and is not trained on. `unfinished`: it counts as if it had reached
    a limit of turns; a step that exceeds `step_s` then ends the episode without another attempt. A
    deadline excludes an episode in any case if the policy did not have the whole time, because an
    attempt failed, a worker died, or the run was paused."""
    exceptions: Literal["exclude", "unfinished"] = "exclude"
    """How an episode counts in which the code of the agent or of the environment raised an
    exception.

    `exclude`: it gets a new attempt, up to `tasks.attempts`, and if all fail it is not trained on.
    `unfinished`: it ends at once and counts as if it had reached a limit of turns, if the policy
    has had a turn. Choose this if your code raises because an answer is malformed: otherwise the
    policy gets a second try and no penalty. An exception of a judge never counts."""


class EnvironmentSettings(PlugIn):
    """An environment: a class that implements the Environment protocol."""

    use: str = "null"
    """A built-in, an import path, or `external` if a worker of another team answers the actions."""
    slots: Positive = 1024
    """Maximum number of episodes that one worker serves at the same time."""
    score_s: PositiveSeconds | None = None
    """Maximum seconds for an answer to `score`. Absent: until the episode's deadline."""
    step_s: PositiveSeconds | None = None
    """Maximum seconds for a `reset` or a `step`. If one takes longer, the worker cancels it, and
    the episode gets a new attempt, up to `tasks.attempts`. Absent: until the episode's deadline."""
    collect: tuple[str, ...] = ()
    """Which files of the environment are kept as artifacts at the end of each attempt: patterns of
    relative paths, such as `out/*` or `**/*.md`. A task may name others."""

    @model_validator(mode="after")
    def _collect_is_possible(self) -> EnvironmentSettings:
        check_patterns(self.collect)
        return self

    @model_validator(mode="after")
    def _step_s_is_kept(self) -> EnvironmentSettings:
        if self.external and self.step_s is not None:
            raise ValueError(
                "step_s: the workers of an external environment are not ours, so they can't be "
                "told. Remove it, and let them bound their own steps"
            )
        return self

    @property
    def external(self) -> bool:
        """Whether a worker of another team answers its actions."""
        return self.use == EXTERNAL
