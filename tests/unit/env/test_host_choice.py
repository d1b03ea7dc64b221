"""Episodes go to hosts that answer, have the image and have room."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from headrace.services.env.sandbox.hosts.host_choice import HostLoad, choose_host

LOADS = st.lists(
    st.builds(HostLoad, st.booleans(), st.integers(0, 12), st.integers(1, 8), st.booleans()),
    min_size=1,
    max_size=6,
)


@given(LOADS)
def test_a_better_host_is_never_passed_over(hosts: list[HostLoad]) -> None:
    chosen = hosts[choose_host(hosts)]
    for host in hosts:
        if chosen.up != host.up:
            assert chosen.up
            continue
        free, other_free = (one.episodes < one.slots for one in (chosen, host))
        assert free or not other_free
        if free and other_free and host.has_image:
            assert chosen.has_image


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5))
def test_all_slots_are_used_before_any_host_has_more(slots: list[int]) -> None:
    hosts = [HostLoad(True, 0, most, index == 0) for index, most in enumerate(slots)]
    for _ in range(sum(slots)):
        index = choose_host(hosts)
        hosts[index] = replace(hosts[index], episodes=hosts[index].episodes + 1)
    assert [host.episodes for host in hosts] == slots
