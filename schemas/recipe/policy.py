"""A policy in the recipe: its model, its inference engine, and how it learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from headrace.schemas.recipe.batch_settings import Batches
from headrace.schemas.recipe.learning.critic_settings import CriticSettings, check_critic
from headrace.schemas.recipe.learning.external_training import check_external
from headrace.schemas.recipe.learning.lora_settings import Lora as Lora
from headrace.schemas.recipe.learning.lora_settings import check_offload, check_processes
from headrace.schemas.recipe.limit_settings import CallLimits
from headrace.schemas.recipe.resources.engine_settings import OPENAI, EngineSettings
from headrace.schemas.recipe.tables import (
    FALSE_IS_NONE,
    Choice,
    NotNegative,
    Positive,
    PositiveSeconds,
    Settings,
    use_and_options,
)
from headrace.schemas.untrusted.public_keys import PublicKeys

REWARD_LOSSES = ("grpo", "dr_grpo", "gspo", "cispo", "icepop", "m2po", "dpo", "reinforce")
"""The built-in losses that learn from rewards alone."""
DPO = "dpo"
"""The built-in loss that compares with version 0, whatever the `kl_coefficient`."""
DISTILL = "distill"
"""The built-in loss that learns from a teacher."""


RENDERED = frozenset({
    "messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token",
    "unk_token",
})  # fmt: skip
"""The names that a chat template gets in any case."""


class SamplingSettings(Settings):
    """How a policy's tokens are sampled."""

    temperature: float = Field(default=1.0, ge=0)
    """The logits are divided by it. 0 takes the most likely token, which can't be trained on."""
    max_tokens: Positive = 256
    """Maximum number of tokens of one generation."""
    allowed: tuple[str, ...] = ()
    """The only tokens that may be sampled, as the tokenizer spells them. Empty allows all."""
    stop: tuple[str, ...] = ()
    """Texts that end a generation, in addition to the model's own end tokens."""
    json_schema: dict[str, Any] = {}
    """A JSON schema that every generation must follow. Empty means no constraint."""


class Groups(Settings):
    """How the outcomes of a task become advantages."""

    advantage: Choice = "grpo"
    """The advantage estimator: `grpo`, `dr_grpo`, `rloo`, `turn_returns`, or an import path. With
    options it is a table, `{ use = "turn_returns", discount = 1.0 }`. `rewards` leaves it to
    `training.critic`."""
    filters: tuple[Choice, ...] = ()
    """Filters that drop groups, in this order: `zero_advantage`, `mean_reward`, or import paths.
    One with options is a table, as for `advantage`."""
    select: Choice | None = None
    """Which samples of a group are trained on: `best_of`, or an import path, as a table with its
    options: `{ use = "best_of", samples = 8 }`. It chooses before the advantages are computed and
    before the filters. Absent: all."""


class Training(Settings):
    """The trainer of a policy."""

    external: bool = False
    """Whether another team's trainer trains the policy, through `TrainerClient` or the topics. Then
    `headrace run` starts no trainer for it. Of the other keys here, only `teacher`, `teacher_s`,
    `max_skipped` and `full_every` may be set."""
    loss: Choice = "grpo"
    """The loss: `grpo`, `dr_grpo`, `gspo`, `cispo`, `icepop`, `m2po`, `dpo`, `reinforce`,
    `distill`, or an import path. With options it is a table, such as
    `{ use = "grpo", clip_high = 0.28 }`."""
    teacher: str | None = None
    """Key of `policies`: a policy with `training = false` and the same tokenizer. When a training
    episode has ended, it is asked for its logprobs of the tokens that this policy sampled. They are
    recorded with the trajectory, and the loss `distill` learns from them. Absent: no teacher."""
    teacher_s: PositiveSeconds = 600.0
    """Maximum seconds that an ended episode waits for its teacher. After them, the episode has no
    reward and is not trained on."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of AdamW after the warmup."""
    demonstration_learning_rate: float | None = Field(default=None, gt=0)
    """Learning rate of updates that contain only demonstrations. Cross-entropy often needs a higher
    rate than learning from rewards tolerates. Absent: `learning_rate`."""
    betas: tuple[float, float] = (0.9, 0.95)
    """The betas of AdamW."""
    weight_decay: float = Field(default=0.0, ge=0)
    """The weight decay of AdamW."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger norm are scaled down to this norm."""
    warmup_updates: NotNegative = 0
    """Number of first updates during which the learning rate rises linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The learning rate after the warmup: constant, or falling to `final_learning_rate` in a line
    or in half a cosine."""
    total_updates: Positive | None = None
    """Number of updates, warmup included, after which a falling learning rate has reached its end.
    A run makes `minibatches` * `epochs` updates per version. A schedule that falls needs it."""
    final_learning_rate: float = Field(default=0.0, ge=0)
    """The learning rate at the end of a falling schedule, and after it. If it is 0, `headrace run`
    ends the run once the schedule of every policy in training has reached it."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Coefficient of the policy's entropy per token in nats, which training maximizes as well."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Coefficient of the KL divergence per token in nats from version 0, which training minimizes
    as well: the estimator k3, as in GRPO's paper. Its value estimates KL(new || version 0), but its
    gradient is on average that of KL(version 0 || new). Tokens with a difference of logprobs above
    5 pull no harder than those with 5. More than 0 costs a forward pass and, without an adapter,
    memory for a second copy of the weights on the device."""
    minibatches: Positive = 1
    """Number of minibatches that a batch is split into. Each makes one optimizer update."""
    epochs: Positive = 1
    """Number of times that a batch is trained on. Each epoch has the same minibatches in the same
    sequence."""
    max_tokens: Positive = 16_384
    """Maximum number of tokens of one micro-batch, unless one sequence is longer. A beginning that
    several of its sequences have counts once. For a model that can't be packed, padding counts."""
    max_skipped: Positive = 5
    """If so many batches in a row can't be trained on, for example because the loss is not finite,
    the run stops and says why."""
    checkpoint_every: Positive = 10
    """Number of versions from one checkpoint to the next."""
    keep_checkpoints: Positive = 2
    """Number of checkpoints that are kept."""
    full_every: Positive = 20
    """Number of versions from one publication of the whole weights to the next. Between them, only
    the difference is published if it is smaller. 1 always publishes the whole weights."""
    record_logprobs: bool = True
    """Whether the trainer stores the logprobs that it computes for the tokens of each batch, before
    the batch's first update. They take 4 bytes for each token, in a blob that the version names."""
    activation_checkpointing: bool = False
    """Whether the trainer keeps only what goes into each layer of the model, and computes the rest
    again in the backward pass. That takes far less memory for each token of a micro-batch, about a
    third more time, and gives the same gradients."""
    offload: bool = False
    """Whether the optimizer's state, the float32 weights that it changes and their gradients are in
    the host's memory. The GPU then holds the weights in the policy's dtype, or with several
    processes what they put together of them, the activations and what an update needs besides
    them. An update takes longer: AdamW runs on the CPU, on `threads` threads. It needs a GPU, and
    no `lora`."""
    threads: Positive = 1
    """Number of CPU threads."""
    device: str = "auto"
    """The device that trains, as torch names it. `auto` takes a GPU if there is one."""
    processes: Positive = 1
    """Number of processes that train the model together. Each holds a shard of weights, gradients
    and optimizer, and has a GPU of its own if `device` is not `cpu`. A program such as `torchrun`
    that starts the trainers on several machines decides the number instead."""
    rank_timeout_s: PositiveSeconds = 600.0
    """Seconds after which one of several processes that does not answer the others counts as lost.
    All of them then continue from the newest checkpoint."""
    critic: CriticSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_earlier_keys(cls, tree: Any) -> Any:
        """Reads a recipe of an earlier release, for example one that a run recorded.

        `updates` is now `minibatches`, and three keys are now options of the loss `grpo`.
        """
        if not isinstance(tree, Mapping):
            return tree
        tree = dict(tree)
        if "updates" in tree and "minibatches" in tree:
            raise ValueError("`updates` is called `minibatches` now: set only one of them")
        if "updates" in tree:
            tree["minibatches"] = tree.pop("updates")
        moved = {key: tree.pop(key) for key in _OPTIONS_OF_GRPO if key in tree}
        changed = {key: value for key, value in moved.items() if value != _OPTIONS_OF_GRPO[key]}
        loss = tree.get("loss", "grpo")
        if changed and loss != "grpo":
            names = ", ".join(f"`{key}`" for key in changed)
            raise ValueError(
                f"{names} can't be set here, because each loss has its own options: write "
                f'loss = {{ use = "NAME", OPTION = … }}'
            )
        if changed:
            tree["loss"] = {"use": "grpo", **changed}
        return tree

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> Training:
        if self.external:
            check_external(self)
        if self.schedule != "constant":
            if self.total_updates is None:
                raise ValueError(f'schedule = "{self.schedule}" needs `total_updates`')
            if self.total_updates <= self.warmup_updates:
                raise ValueError("`total_updates` must be more than `warmup_updates`")
        elif self.total_updates is not None or self.final_learning_rate:
            raise ValueError(
                "`total_updates` and `final_learning_rate` have no effect if the schedule is "
                "constant: remove them, or set `schedule`"
            )
        return self

    @property
    def has_reference(self) -> bool:
        """Whether the trainer keeps version 0 to compare with. Losses of your own may ask for it,
        too."""
        return self.kl_coefficient > 0 or use_and_options(self.loss)[0] == DPO


_OPTIONS_OF_GRPO = {"clip_low": 0.2, "clip_high": 0.2, "importance_cap": 2.0}
"""Keys of `Training` in earlier releases, with their defaults. Recorded recipes have all three."""


class Policy(Settings):
    """A model that learns."""

    model: str
    """A folder with `config.json` and `tokenizer.json`: the name of a folder in `infra/models`, a
    path, a model of the Hugging Face Hub as `owner/name@revision`, or a version of another run as
    `run:NAMESPACE/POLICY@VERSION` (without `@VERSION` the newest).

    If the folder has weights, they are version 0. Otherwise version 0 is random, from `seed`."""
    seed: int = 0
    """Seed of random weights: those of a model without weights, and those of a new adapter."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights."""
    chat_template_kwargs: dict[str, Any] = {}
    """Values that the model's chat template gets by name, for example `enable_thinking = false` for
    Qwen3. A template ignores names that it does not know."""
    lora: Lora | None = None
    """If it is set, only an adapter learns, and policies with the same model, seed and dtype share
    their base. Absent: all weights learn."""
    engine: EngineSettings = EngineSettings()
    limits: CallLimits = CallLimits()
    sampling: SamplingSettings = SamplingSettings()
    groups: Groups = Groups()
    batches: Batches = Batches()
    signers: PublicKeys = ()
    """Public keys, as `headrace keys show` prints them. If there are any, only versions that one of
    them has signed are served and trained from. Empty: versions are not signed."""
    training: Annotated[Training | None, FALSE_IS_NONE] = Training()
    """Absent (`training = false` in TOML): the policy keeps version 0."""

    @model_validator(mode="after")
    def _replays_are_weighed(self) -> Policy:
        replay = self.batches.replay
        loss = use_and_options(self.training.loss)[0] if self.training is not None else ""
        if replay is not None and replay.weight != 1 and loss in (DISTILL, DPO):
            what = "from a teacher" if loss == DISTILL else "from pairs"
            raise ValueError(
                f"batches.replay.weight: the loss `{loss}` does not weigh what it learns {what}. "
                "Set it to 1"
            )
        return self

    @model_validator(mode="after")
    def _engine_gets_versions(self) -> Policy:
        engine = self.engine
        if engine.use == OPENAI and self.training is not None:
            if self.lora is not None:
                raise ValueError("the engine `openai` takes whole weights: remove `lora`")
            if not engine.options.get("weights_url"):
                raise ValueError(
                    "the engine `openai` serves one fixed version. Set `training = false`, or "
                    "engine.options.weights_url, the address that gets each new version"
                )
        return self

    @model_validator(mode="after")
    def _training_fits(self) -> Policy:
        if self.training is not None:
            check_processes(self.lora, self.training.processes, self.training.device)
            if self.training.offload:
                check_offload(self.lora, self.training.device)
            check_critic(self.training.critic, self.groups.advantage, self.groups.filters)
        return self

    @field_validator("chat_template_kwargs")
    @classmethod
    def _names_are_free(cls, values: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted(RENDERED & values.keys()):
            raise ValueError(f"Headrace itself gives the chat template `{taken[0]}`: remove it")
        return values
