"""The adapter of a policy in the recipe."""

from __future__ import annotations

from pydantic import Field

from headrace.schemas.recipe.tables import Positive, Settings


class Lora(Settings):
    """An adapter that learns instead of the model's weights (Hu et al., arXiv:2106.09685).

    It has no dropout, because the trainer's logprobs would then differ from the engine's."""

    rank: Positive = 16
    """Rank of the two matrices whose product is added to a layer's weights."""
    alpha: float = Field(default=32.0, gt=0)
    """The product is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ()
    """The linear layers that have an adapter, by their name or its last parts, for example `q_proj`
    or `mlp.down_proj`. Empty: all except the output head."""


def check_processes(lora: Lora | None, processes: int, device: str) -> None:
    """Raises ValueError if several processes would train an adapter, or on the same GPU."""
    if processes > 1 and ":" in device:
        raise ValueError(
            f"training.device: {device!r} is one GPU, and each of {processes} processes needs its "
            "own. Set it to `auto`, `cuda` or `cpu`"
        )
    if lora is not None and processes > 1:
        raise ValueError(
            "training.processes: an adapter is trained in one process, because its frozen base is "
            "not sharded. Set it to 1, or remove `lora`"
        )


def check_offload(lora: Lora | None, device: str) -> None:
    """Raises ValueError if keeping the optimizer in the host's memory saves nothing."""
    if device == "cpu":
        raise ValueError(
            "training.offload: with `device` at `cpu` all of the training is in the host's memory "
            "already. Remove `offload`, or set `device` to `auto` or `cuda`"
        )
    if lora is not None:
        raise ValueError(
            "training.offload: the optimizer of an adapter is small, and the frozen base stays on "
            "the device. Remove `offload`, or remove `lora`"
        )
