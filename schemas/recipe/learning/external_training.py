"""Checks the settings of a policy that another team's trainer trains."""

from __future__ import annotations

from headrace.schemas.recipe.tables import Settings

KEPT = frozenset({"external", "teacher", "teacher_s", "max_skipped", "full_every"})
"""The keys of `training` that hold for every trainer. Only Headrace's own one reads the others."""


def check_external(training: Settings) -> None:
    """Raises ValueError if settings of Headrace's trainer are set although it does not train."""
    fields = type(training).model_fields
    changed = [
        name
        for name, field in fields.items()
        if name not in KEPT and getattr(training, name) != field.get_default()
    ]
    if changed:
        names = ", ".join(f"`{name}`" for name in changed)
        raise ValueError(
            f"{names}: only Headrace's own trainer reads this, but `external` says that another "
            "one trains the policy. Set it there, and remove it here"
        )
