"""Which key may act for which tenant."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from headrace.schemas.recipe.recipe import Scheduler
from headrace.schemas.untrusted.public_keys import key_text
from headrace.schemas.untrusted.trusted_keys import TrustedKeys

A, B, OPERATOR = (key_text(bytes([number]) * 32) for number in range(3))
TREE: dict[str, Any] = {
    "tenants": {"a": {"keys": [A], "weight": 2}, "b": {"keys": [B, A]}, "c": {"weight": 1}},
    "operators": [OPERATOR],
}


@given(
    st.fixed_dictionaries(
        {
            "tenants": st.dictionaries(
                st.sampled_from(["a", "b", "c"]),
                st.fixed_dictionaries({"keys": st.lists(st.sampled_from([A, B]), max_size=2)}),
            ),
            "operators": st.lists(st.just(OPERATOR), max_size=1),
            "require_keys": st.booleans(),
        }
    ),
    st.sampled_from(["a", "b", "c", "d"]),
    st.sampled_from(["", A, B, OPERATOR]),
)
def test_who_may_submit_for_a_tenant_may_cancel_its_tasks_and_nobody_else(
    tree: dict[str, Any], tenant: str, key: str
) -> None:
    keys = TrustedKeys.of_tree({"scheduler": tree})
    may = not keys.refusal(tenant, key)
    assert may == (keys.scope(tenant) in keys.scopes(key))
    named = tree["tenants"].get(tenant, {}).get("keys", [])
    is_open = not named and not tree["require_keys"]
    assert may == (is_open or key in named or key in tree["operators"])
    assert keys.is_open(tenant) == is_open


def test_the_recorded_recipe_gives_the_same_keys_as_the_recipe() -> None:
    scheduler = Scheduler.model_validate(TREE)
    keys = TrustedKeys.of_tree({"scheduler": scheduler.model_dump(mode="json")})
    assert keys == scheduler.trusted
    assert keys.tenants == {"a": (A,), "b": (B, A)}
    assert keys.keys == {A, B, OPERATOR}
    assert [keys.holder(one) for one in (A, B, OPERATOR, "")] == ["a, b", "b", "operator", ""]


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"scheduler": None},
        {"scheduler": {"tenants": []}},
        {"scheduler": {"tenants": {"a": None}, "operators": "text"}},
        {"scheduler": {"tenants": {"a": {"keys": 5}}, "require_keys": "yes"}},
    ],
)
def test_a_recorded_recipe_may_have_no_keys(tree: dict[str, Any]) -> None:
    assert TrustedKeys.of_tree(tree) == TrustedKeys()


def test_keys_can_be_required_only_if_there_are_some() -> None:
    with pytest.raises(ValidationError, match="nobody could submit"):
        Scheduler(require_keys=True)
    assert Scheduler.model_validate({**TREE, "require_keys": True}).trusted.required
    with pytest.raises(ValidationError, match="is not a public key"):
        Scheduler.model_validate({"operators": ["ed25519:short"]})


def test_a_cancellation_that_names_a_tenant_counts_for_no_other() -> None:
    keys = Scheduler.model_validate(TREE).trusted
    assert keys.scopes(A) == ["", "a", "b"]
    assert [keys.scopes(A, tenant) for tenant in ("a", "b", "c")] == [["a"], ["b"], [""]]
    assert [keys.scopes(B, tenant) for tenant in ("a", "c")] == [[], [""]]
