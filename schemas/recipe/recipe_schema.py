"""The JSON schema of recipes, for editors. It has the meanings of the keys from the docstrings."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from headrace.schemas.attribute_docs import attribute_docs
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.tables import FALSE_IS_NONE, Settings


def recipe_schema() -> dict[str, Any]:
    """Returns the JSON schema of a recipe's TOML file. It doesn't know the options of plug-ins."""
    return Recipe.model_json_schema(schema_generator=_Generator)


class _Generator(GenerateJsonSchema):
    """Adds meanings, and describes what TOML can hold: it has no null."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        tree = super().model_schema(schema)
        table: type[Settings] = schema["cls"]
        docs = attribute_docs(table)
        for name, key in tree["properties"].items():
            if key.get("default", ...) is None:
                del key["default"]
            if name in docs:  # else it is a table, which has a description of its own
                key["description"] = docs[name]
        return tree

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def function_before_schema(
        self, schema: core_schema.BeforeValidatorFunctionSchema
    ) -> JsonSchemaValue:
        tree = super().function_before_schema(schema)
        if schema["function"]["function"] is FALSE_IS_NONE.func:
            return {"anyOf": [tree, {"enum": [False]}]}
        return tree

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False  # A title repeats the key's name.
