"""Starts share what they have in common, and stay equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.schemas.codec import Codec
from headrace.schemas.events import EpisodeStarted
from headrace.services.agent.memory.shared_starts import MOST_SHARED, SharedStarts
from tests.unit.schemas.test_codec import models


@pytest.mark.slow
@given(events=st.lists(models(EpisodeStarted), max_size=3))
def test_a_start_stays_equal_and_is_encoded_as_before(events: list[EpisodeStarted]) -> None:
    codec, shared = Codec(), SharedStarts()
    codec.register(EpisodeStarted, 1)
    for event in events:
        value = codec.encode(event)
        decoded = codec.decode(EpisodeStarted, value)
        for sibling in (None, decoded.submitted, events[0].submitted):
            same = shared.of(decoded, sibling)
            assert same == decoded
            assert codec.encode(same) == value
            assert same.model_dump() == decoded.model_dump()


def test_what_is_shared_is_bounded() -> None:
    shared = SharedStarts()
    for number in range(3 * MOST_SHARED):
        shared._share(number, number)
    assert len(shared._shared) <= MOST_SHARED
