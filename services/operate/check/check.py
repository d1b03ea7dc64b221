"""Tries every part that a recipe names, once: in this process, without Kafka and without a model.

Each part is announced before it is tried, so that whoever watches knows which one hangs. What takes
seconds comes last: engines and losses import torch.
"""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import (
    DependencyError,
    EnvironmentFailed,
    HeadraceError,
    InfrastructureError,
    UsageError,
)
from headrace.schemas.events import EnvironmentUse, EpisodeEnded, PolicyUse, Ref, TaskEnded
from headrace.schemas.packed import pack_f32
from headrace.schemas.recipe.policy import Policy, Training
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.tables import use_and_options
from headrace.services.agent.agents import load_agents
from headrace.services.agent.records import AgentSetup
from headrace.services.base.clock import now
from headrace.services.base.types import Observation, TaskView
from headrace.services.env.answers import check_observation
from headrace.services.env.environment import Claim, Environment
from headrace.services.env.instances import Instances
from headrace.services.env.sandbox.pool import DockerSetup
from headrace.services.env.service import load_environments
from headrace.services.env.setup import EnvironmentSetup, Setup
from headrace.services.inference.service import prepare
from headrace.services.inference.tokenizer import Tokenizer
from headrace.services.models.weights import model_folder
from headrace.services.operate.check.checking import TRYING
from headrace.services.operate.check.host_contact import drop
from headrace.services.operate.serve.loop_watch import LoopWatch
from headrace.services.processes.child_process import NEVER_ANSWERED
from headrace.services.tasks.curation.check_curator import check_contract
from headrace.services.tasks.curation.curators import load_curator
from headrace.services.tasks.data_sets import items_by_epoch, items_of
from headrace.services.tasks.evaluation_source import data_set_of
from headrace.services.tasks.source import SOURCE
from headrace.services.tasks.task_maker import Item, TaskMaker, make_alone
from headrace.services.tasks.warm_start import demonstrations

CHATTING = ("chat", "client", "command")
"""The built-in agents whose requests are messages."""
CLIPS_LATER_UPDATES = ("grpo", "dr_grpo", "icepop")
"""The built-in losses that clip how far a batch's later updates move from its first one."""
DEADLINE_S = 600
"""The deadline that environments get, in seconds from now."""
_ROOT = Path(__file__).resolve().parents[3]
OURS = [_ROOT / "services", _ROOT / "stream_jobs", _ROOT / "trainer"]
"""The folders of our code that calls a user's."""
REWARDS = (0.0, 1.0, 0.0, 0.5)
"""The rewards of the group that advantages and filters are tried with."""


async def try_recipe(recipe: Recipe, say: Callable[[str], None]) -> None:
    """Tries the parts. `say` gets the name of each before it is tried.

    Raises UsageError for the first part that can't be used.
    """
    trial = _Trial(recipe, say)
    trial.policies()
    trial.agents()
    setups = trial.environment_setups()
    item = trial.data_sets()
    await trial.environments(setups, item)
    trial.engines()
    trial.training()


@dataclass
class _Trial:
    recipe: Recipe
    say: Callable[[str], None]
    reasons: set[str] = field(default_factory=set)
    """Why parts could not be tried."""

    def policies(self) -> None:
        for name, policy in self.recipe.policies.items():
            with self._trying(f"policies.{name}.model"):
                model_folder(policy.model)
        with self._trying("policies.*.sampling"):
            TaskMaker(self.recipe, SOURCE)

    def engines(self) -> None:
        with self._trying("policies.*.engine"):
            prepare(self.recipe)

    def data_sets(self) -> Item | None:
        """Returns the first item of the tasks' data set; None if it is empty."""
        tasks, found = self.recipe.tasks, None
        with self._trying(f"tasks.use {tasks.use!r}", "tasks.use"):
            items = items_by_epoch(tasks.use, tasks.options, tasks.epochs)
            found = next(items, None)
            if found is None:
                self.say(f"warning: the data set {tasks.use!r} has no item: a run ends at once")
            elif not isinstance(found[2], Item):
                kind = type(found[2]).__name__
                raise UsageError(f"it yielded a {kind}, not an Item: `from headrace import Item`")
            else:
                make_alone(self.recipe, SOURCE, found[2])
        for choice in tasks.curators:
            with self._trying(f"tasks.curators {use_and_options(choice)[0]!r}"):
                check_contract(load_curator(choice))
        if (warm := self.recipe.warm_start) is not None:
            with self._trying("warm_start.use"):
                next(demonstrations(self.recipe, warm), None)
        if self.recipe.evaluation is not None:
            with self._trying("evaluation.use"):
                next(items_of(*data_set_of(self.recipe, self.recipe.evaluation)), None)
        # An item may bring files, which are not stored here, or choose another environment.
        return found[2] if found and not {"artifacts", "environment"} & set(found[2].task) else None

    def agents(self) -> None:
        setups: Mapping[str, AgentSetup] = {}
        with self._trying("agents"):
            setups = load_agents(self.recipe)
        for key, setup in setups.items():
            with self._trying(f"agents.{key}"):
                _require_async(setup.agent, f"agents.{key}.use", "async def NAME(episode)")
                if self.recipe.agents[key].use in CHATTING:
                    self._note_templates(f"agents.{key}")

    def environment_setups(self) -> Mapping[str, Setup]:
        with self._trying("environments"):
            return load_environments(self.recipe, "check", Instances(drop, "check"))
        return {}  # their code can't be imported here

    async def environments(self, setups: Mapping[str, Setup], item: Item | None) -> None:
        for key, setup in setups.items():
            if isinstance(setup, DockerSetup):
                continue  # its worker checks the engine and the images before it takes episodes
            use = EnvironmentUse(use=key, mode="ephemeral")
            environment: Environment | None = None
            with self._trying(f"environments.{key}"):
                if isinstance(setup, EnvironmentSetup):
                    _check_options(setup, f"environments.{key}.options")
                environment = await setup.take(use, Claim(0, 0, 0, 0, 0, now() + DEADLINE_S))
                _check_methods(environment)
            if environment is None:
                continue
            try:
                if key == self.recipe.tasks.environment and item is not None:
                    with closing(LoopWatch()):
                        await self._play(key, setup, environment, item)
            finally:
                await setup.give_back(use, environment, fit=False)
                await setup.close_pool()

    async def _play(self, key: str, setup: Setup, environment: Environment, item: Item) -> None:
        task = TaskView(0, 0, item.payload, setup.options, seed=0)
        action = next((one for policy in self._acting() for one in policy.sampling.allowed), "")
        kind = type(environment).__name__
        observation: Observation | None = None
        with self._trying(f"environments.{key}: {kind}.reset"):
            observation = await _observed(environment.reset(task), f"{kind}.reset")
        if observation is not None and not observation.done:
            with self._trying(f"environments.{key}: {kind}.step"):
                self._note_reward(key, await _observed(environment.step(action), f"{kind}.step"))

    def _note_templates(self, agent: str) -> None:
        """Notes the models that can't answer an agent. An agent may never ask some of them."""
        for name in dict.fromkeys(self.recipe.tasks.roles.values()):
            folder = model_folder(self.recipe.policies[name].model)
            if not Tokenizer(folder).has_template:
                self.say(
                    f"{agent} sends messages, but the model of policies.{name} has no chat "
                    f"template, and can't answer them: add chat_template.jinja to {folder}"
                )

    def _note_reward(self, environment: str, observation: Observation) -> None:
        """Notes that an episode has no reward before its end, which a limit may prevent.

        One step shows it: it gave no reward, or it was the end.
        """
        agent = self.recipe.tasks.agent
        late = observation.reward is None or observation.done
        if late and self.recipe.agents[agent].unfinished_reward is None:
            self.say(
                f"environments.{environment} seems to give its reward at the end only. An episode "
                "that a limit of turns, tokens or context cuts has no reward then, and is not "
                f"trained on: set agents.{agent}.unfinished_reward, unless the agent itself sets "
                "the reward in time"
            )

    def _acting(self) -> list[Policy]:
        return [self.recipe.policies[name] for name in self.recipe.tasks.roles.values()]

    def training(self) -> None:
        # It imports numpy, and the losses import torch.
        from headrace.stream_jobs.groups import GroupAssembler

        with self._trying("policies.*.groups"):
            GroupAssembler(self.recipe).on_task(_ended(self.recipe), recorded_at_ms=0)
        for name, policy in self.recipe.policies.items():
            if policy.training is not None and policy.training.external:
                self._note_flight(name, policy)
                self._note_selection(name, policy)
            elif policy.training is not None:
                loss, options = use_and_options(policy.training.loss)
                with self._trying(f"policies.{name}.training.loss {loss!r}"):
                    from headrace.trainer.losses.load_loss import try_loss

                    try_loss(policy.training.loss)
                self._note_clip(name, policy.training, loss, options)
                self._note_flight(name, policy)
                self._note_selection(name, policy)

    def _note_selection(self, name: str, policy: Policy) -> None:
        """Notes that a selection keeps all samples."""
        use, options = use_and_options(policy.groups.select or "")
        if use == "best_of" and options["samples"] >= self.recipe.tasks.samples:
            self.say(
                f"policies.{name}.groups.select: best_of keeps {options['samples']} samples, and a "
                f"task has {self.recipe.tasks.samples}, so it keeps all. Raise tasks.samples"
            )

    def _note_flight(self, name: str, policy: Policy) -> None:
        """Notes that so many episodes run at once that all samples get old."""
        in_flight = self.recipe.live_episodes / (
            policy.batches.fresh_groups * self.recipe.tasks.samples
        )
        if 0 < policy.batches.max_staleness < 8 * in_flight:
            self.say(
                f"scheduler.live_episodes: {self.recipe.live_episodes} episodes are "
                f"{in_flight:.3g} batches of policies.{name}, so samples get at least so many "
                f"versions old. Lower it unless the engines would be idle, or raise "
                f"policies.{name}.batches.max_staleness from {policy.batches.max_staleness} to "
                f"{math.ceil(8 * in_flight)}, so that no batch waits for long episodes"
            )

    def _note_clip(
        self, policy: str, training: Training, loss: str, options: Mapping[str, Any]
    ) -> None:
        bounds = [f"`{name}`" for name in ("clip_low", "clip_high") if name in options]
        if loss in CLIPS_LATER_UPDATES and bounds and training.minibatches * training.epochs == 1:
            self.say(
                f"policies.{policy}.training.loss: {' and '.join(bounds)} of {loss!r} has no "
                "effect, because a batch makes one update. Raise `minibatches` or `epochs`, or "
                "use a loss that clips against the engine, such as 'gspo'"
            )

    @contextmanager
    def _trying(self, part: str, announced: str | None = None) -> Iterator[None]:
        """Announces a part, and makes every error of it a UsageError that names the part.

        A part that is not there yet, for example a server, is announced and left out.
        """
        self.say(f"{TRYING}{announced or part}")
        try:
            yield
        except (InfrastructureError, DependencyError) as error:
            if isinstance(error, InfrastructureError) and error.code == NEVER_ANSWERED:
                raise UsageError(f"{part}: {error.message}") from error
            reason = str(error)
            again = reason in self.reasons
            self.reasons.add(reason)
            self.say(f"{part} can't be tried now{', either' if again else f': {reason}'}")
        except EnvironmentFailed as error:
            method = part.rpartition(": ")[2]
            raise UsageError(f"{part} {error.message.removeprefix(method).lstrip(': ')}") from error
        except HeadraceError as error:
            raise UsageError(f"{part}: {error}") from error
        except Exception as error:  # a part is a user's code, and may raise anything
            raise UsageError(f"{part}: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """Returns what a user's code raised, and its last line: `TypeError: … (FILE:LINE, in NAME)`.

    The line is left out if it is our own, for example the call of a class with a wrong option.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if frames and any(map(Path(frames[-1].filename).resolve().is_relative_to, OURS)):
        frames.clear()
    where = f" ({frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _require_async(function: Any, what: str, form: str) -> None:
    call = function if inspect.isroutine(function) else getattr(function, "__call__", None)  # noqa: B004
    if not inspect.iscoroutinefunction(call):
        raise UsageError(f"{what} is not an async function: write it as `{form}`")


def _check_options(setup: EnvironmentSetup, what: str) -> None:
    try:
        inspect.signature(setup.make).bind(**setup.options)
    except TypeError as error:
        name = getattr(setup.make, "__name__", "the environment")
        raise UsageError(f"{what} don't fit {name}: {error}") from error
    except ValueError:  # a class in C without a signature: making one tells
        return


def _check_methods(environment: Environment) -> None:
    kind = type(environment).__name__
    for name, form in (("reset", "(self, task)"), ("step", "(self, action)"), ("aclose", "(self)")):
        method = getattr(environment, name, None)
        if method is None:
            raise UsageError(f"{kind} has no method {name}: add `async def {name}{form}`")
        _require_async(method, f"{kind}.{name}", f"async def {name}{form}")
    if not isinstance(getattr(environment, "replayable", None), bool):
        raise UsageError(
            f"{kind} has no attribute `replayable`: set it to True if the same task and actions "
            "always give the same observations, and else to False"
        )


async def _observed(work: Awaitable[Observation], what: str) -> Observation:
    observation = await work
    check_observation(observation, what)
    return observation


def _ended(recipe: Recipe) -> TaskEnded:
    """Returns a task whose episodes have REWARDS, of all policies."""
    uses = tuple(
        PolicyUse(
            policy=name,
            tokens=1,
            longest=2,
            oldest_version=0,
            turn_rewards=pack_f32([math.nan, 0.5]),
        )
        for name in recipe.policies
    )
    outcomes = tuple(
        EpisodeEnded(
            task=0, sample=sample, item_id="check", ending="finished", reward=reward, policies=uses,
            trajectory=Ref(topic="check", partition=0, offset=sample, digest=bytes(16)),
        )
        for sample, reward in enumerate(REWARDS)
    )  # fmt: skip
    return TaskEnded(
        task=0, source=SOURCE, task_id="check", item_id="check", closed_by="all", outcomes=outcomes
    )
