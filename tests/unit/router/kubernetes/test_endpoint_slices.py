import json
from typing import Any

import msgspec
import pytest

from caravan_router.kubernetes.endpoint_slices import EndpointSlice, KnownPods
from caravan_testing.endpoint_api import pod


def slice_of(name: str, *pods: dict[str, Any]) -> EndpointSlice:
    text = json.dumps({"apiVersion": "discovery.k8s.io/v1", "metadata": {"name": name}, "endpoints": pods or None})
    return msgspec.json.decode(text, type=EndpointSlice)


def test_a_pod_is_there_from_when_it_is_ready_until_it_terminates() -> None:
    known = KnownPods(50051)
    seen = []
    for conditions in (
        {"ready": False},
        {"ready": True},
        {"ready": False},
        {"ready": False, "terminating": True},
        {"ready": False, "terminating": False},
    ):
        known.put(slice_of("a", pod("10.0.0.1", **conditions)))
        seen.append((sorted(known.addresses), sorted(known.terminating)))
    address = ["10.0.0.1:50051"]
    # It left for good: an address that comes back has to be ready first.
    assert seen == [([], []), (address, []), (address, []), ([], address), ([], [])]


def test_conditions_that_are_not_told_are_good() -> None:
    known = KnownPods(1)
    known.put(slice_of("a", {"addresses": ["10.0.0.1"]}, {"addresses": ["10.0.0.2"], "conditions": {"ready": None}}))
    assert known.addresses == {"10.0.0.1:1", "10.0.0.2:1"}


def test_slices_add_up() -> None:
    known = KnownPods(1)
    known.replace([slice_of("a", pod("10.0.0.1"), pod("10.0.0.2")), slice_of("b", pod("fd00::1"))])
    assert known.addresses == {"10.0.0.1:1", "10.0.0.2:1", "[fd00::1]:1"}
    known.put(slice_of("a", pod("10.0.0.2")))
    assert known.addresses == {"10.0.0.2:1", "[fd00::1]:1"}
    known.remove(slice_of("b"))
    known.remove(slice_of("unknown"))
    assert known.addresses == {"10.0.0.2:1"}
    known.put(slice_of("a"))
    assert known.addresses == frozenset()


def test_a_pod_in_two_slices_is_ending_if_one_says_so() -> None:
    known = KnownPods(1)
    known.put(slice_of("a", pod("10.0.0.1")))
    known.put(slice_of("b", pod("10.0.0.1", ready=False, terminating=True)))
    assert not known.addresses
    assert known.terminating == {"10.0.0.1:1"}


@pytest.mark.parametrize("addresses", [[], None])
def test_an_endpoint_without_an_address_is_left_out(addresses: list[str] | None) -> None:
    known = KnownPods(1)
    known.put(slice_of("a", {} if addresses is None else {"addresses": addresses}))
    assert known.addresses == frozenset()
