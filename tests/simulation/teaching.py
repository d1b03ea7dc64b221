"""A second policy, which scores what the first one samples. The same engines serve both."""

from __future__ import annotations

from headrace.schemas.recipe.recipe import Recipe

TEACHER = "teacher"
"""The name of the policy, of its process, and of the kind of scenario."""


def with_teacher(recipe: Recipe) -> Recipe:
    """Gives the policy of a recipe a teacher. No misbehaviour, and no excuse."""
    tree = recipe.model_dump(mode="json")
    student = tree["policies"]["default"]
    filters = [one for one in student["groups"]["filters"] if one != "zero_advantage"]
    student["groups"] = {**student["groups"], "filters": filters}
    student["training"] |= {"loss": "distill", "teacher": TEACHER}
    tree["policies"][TEACHER] = {
        "model": student["model"],
        "engine": student["engine"],
        "training": None,
    }
    return Recipe.model_validate(tree)
