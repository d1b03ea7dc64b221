"""References to secrets in a recipe, and literals that look like secrets."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from headrace.schemas.recipe.read_recipe import parse_recipe
from headrace.schemas.recipe.recipe import Recipe
from headrace.schemas.recipe.secret_references import literal_secrets
from headrace.schemas.recipe.tables import RecipeError


def read(options: str) -> Recipe:
    text = f"""
        name = "demo"
        [policies.default]
        model = "tiny-llama"
        engine = {{ use = "mine:Engine", options = {{ {options} }} }}
        [tasks]
        options = {{ {options} }}
        [agents.default]
        options = {{ {options} }}
        [environments.default]
        options = {{ {options} }}
    """
    return parse_recipe(tomllib.loads(text), "demo.toml")


def test_a_recipe_holds_only_the_reference() -> None:
    recipe = read('key = { env = "KEY" }, more = [{ file = "/run/secrets/key" }]')
    options: dict[str, Any] = {"key": {"env": "KEY"}, "more": [{"file": "/run/secrets/key"}]}
    assert recipe.agents["default"].options == options
    assert recipe.policies["default"].engine.options == options
    assert '"key":{"env":"KEY"}' in recipe.canonical()
    assert recipe.digest != read('key = { env = "OTHER" }').digest


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ('key = { env = "" }', "key: .* names no variable"),
        ('key = { file = "token" }', "key: .* must be an absolute path"),
        ('env = "KEY"', "is a reference to a secret, but options must be a table"),
        ('command = ["a", { env = "KEY" }]', r"command\.1: .* can't be part of a command line"),
        ('a = [{ command = { file = "/k" } }]', r"a\.0\.command: .* in the option `environment`"),
    ],
)
def test_a_reference_that_cannot_be_is_refused(options: str, match: str) -> None:
    for table in ("agents.default", "environments.default", "tasks", "policies.default.engine"):
        with pytest.raises(RecipeError, match=rf"{table}\.options: .*{match}"):
            read(options)


def test_literals_that_look_like_secrets_are_found() -> None:
    def found(options: str) -> list[str]:
        tree = read(options).model_dump(mode="json")
        return [key for key in literal_secrets(tree) if key.startswith("agents.")]

    inside = "agents.default.options."
    for key in ("token", "api_key", "apiKey", "SASL_PASSWORD", "client-secret", "credentials"):
        assert found(f'{key} = "any text"') == [f"{inside}{key}"]
    assert found('a = [{ HF_TOKEN = "12345678" }]') == [f"{inside}a.0.HF_TOKEN"]
    for value in (
        "sk-proj-abcdefghij0123456789", "hf_abcdefghijklmnopqrstu", "AKIAABCDEFGHIJKLMNOP",
        "ghp_abcdefghijklmnopqrstuvwxyz", "-----BEGIN RSA PRIVATE KEY-----",
        "https://user:word@host/",
    ):  # fmt: skip
        assert found(f'other = "{value}"') == [f"{inside}other"]
    for harmless in (
        'token = { env = "TOKEN" }', "max_tokens = 12345678", 'eos_token = "<|im_end|>"',
        'tokens = "123456789"', 'token = "short"', 'url = "https://host:80/a@b"', "secret = true",
        'dataset = "hf_ultrafeedback"', 'keyboard = "something"',
    ):  # fmt: skip
        assert found(harmless) == []
