"""`headrace recipe`: lists and prints recipes."""

from __future__ import annotations

import json

import click

from headrace.services.operate.options import json_option, print_json, print_table, set_option


@click.command()
@click.argument("name", required=False)
@set_option
@json_option
@click.option("--schema", is_flag=True, help="Print the JSON schema of recipes, for editors.")
def recipe(name: str | None, settings: tuple[str, ...], as_json: bool, schema: bool) -> None:
    """List the shipped recipes, or print one of them.

    NAME is a shipped recipe or a .toml file. The printed recipe has every key: those that the file
    or --set sets, and all others as comments with their defaults. So it is a good start for your
    own recipe.

    \b
    Examples:
      headrace recipe
      headrace recipe quickstart > my.toml
      headrace recipe my.toml --set stop.versions=10 --json
      headrace recipe --schema > recipe.schema.json
    """
    from headrace.services.namespace.cluster_config import RECIPES, read_recipe
    from headrace.services.operate.recipe.toml import recipe_toml

    if schema:
        from headrace.schemas.recipe.recipe_schema import recipe_schema

        if name is not None or settings:
            raise click.UsageError("--schema describes all recipes: give no NAME and no --set")
        print_json(recipe_schema())
        return
    if name is not None:
        resolved = read_recipe(name, settings)
        if as_json:
            print_json(json.loads(resolved.canonical()))
        else:
            click.echo(recipe_toml(resolved), nl=False)
        return
    if settings:
        raise click.UsageError("--set needs a recipe to change: give its NAME too")
    found = [read_recipe(str(path)) for path in sorted(RECIPES.glob("*.toml"))]
    if as_json:
        print_json([{"name": one.name, "description": one.description} for one in found])
    else:
        print_table(("recipe", "description"), [[one.name, one.description] for one in found])
