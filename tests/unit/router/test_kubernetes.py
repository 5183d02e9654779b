"""The shards behind a Service: EndpointSlices, and an API server that ends, fails and repeats itself."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from caravan_router import kubernetes
from caravan_router.config import RouterConfig
from caravan_router.engine.discovery import Discovery, KubernetesService, parse_source
from caravan_router.kubernetes import EndpointSlice, KnownPods, WatchedService
from caravan_testing.endpoint_api import NAMESPACE, SERVICE, EndpointApi, endpoint_api, pod
from caravan_testing.waiting import eventually


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


A, B, C = (f"10.0.0.{number}:50051" for number in (1, 2, 3))


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(kubernetes, "_SURE_S", 0.05)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[EndpointApi]:
    async with endpoint_api(tmp_path) as served:
        yield served


class Told:
    """Every set of addresses that a router was told, the last one last."""

    def __init__(self) -> None:
        self.sets: list[frozenset[str]] = []

    async def until(self, *addresses: str) -> None:
        await eventually(lambda: self.sets[-1:] == [frozenset(addresses)], f"{addresses}, told: {self.sets}")


@contextlib.asynccontextmanager
async def watching(api: EndpointApi) -> AsyncIterator[Told]:
    """Run a router's discovery with the Service as its only source."""
    told = Told()
    source = WatchedService(KubernetesService(NAMESPACE, SERVICE, 50051), api.account)
    running = asyncio.create_task(Discovery([source], 1000.0, told.sets.append).run())
    try:
        yield told
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_pods_come_and_go_at_once(api: EndpointApi) -> None:
    api.put("x", pod("10.0.0.1"))
    async with watching(api) as told:
        await told.until(A)
        await eventually(lambda: len(api.watches) == 1)
        api.put("x", pod("10.0.0.1"), pod("10.0.0.2", ready=False))
        api.put("y", pod("10.0.0.3"))
        await told.until(A, C)
        api.put("x", pod("10.0.0.1"), pod("10.0.0.2"))
        await told.until(A, B, C)
        api.put("x", pod("10.0.0.1", ready=False, terminating=True), pod("10.0.0.2"))
        await told.until(B, C)
        api.delete("y")
        await told.until(B)
    # Told once each, and listed once.
    assert told.sets == [
        frozenset(),
        frozenset({A}),
        frozenset({A, C}),
        frozenset({A, B, C}),
        frozenset({B, C}),
        frozenset({B}),
    ]
    assert api.lists == 1


async def test_a_pod_that_moves_from_slice_to_slice_stays(api: EndpointApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "_SURE_S", 1000.0)
    api.put("x", pod("10.0.0.1"), pod("10.0.0.2"))
    async with watching(api) as told:
        await told.until(A, B)
        await eventually(lambda: len(api.watches) == 1)
        api.put("x", pod("10.0.0.1"))
        api.put("y", pod("10.0.0.2"))
        api.put("z", pod("10.0.0.3"))
        await told.until(A, B, C)
    assert told.sets == [frozenset(), frozenset({A, B}), frozenset({A, B, C})]


async def test_a_list_comes_in_pages(api: EndpointApi) -> None:
    api.page = 2
    for number in range(1, 6):
        api.put(f"slice-{number}", pod(f"10.0.0.{number}"))
    async with watching(api) as told:
        await told.until(*(f"10.0.0.{number}:50051" for number in range(1, 6)))
    assert api.lists == 3


async def test_a_watch_that_ends_goes_on_where_it_was(api: EndpointApi) -> None:
    api.put("x", pod("10.0.0.1"))
    async with watching(api) as told:
        await told.until(A)
        await eventually(lambda: len(api.watches) == 1)
        api.bookmark()
        last = api.version
        api.end_watches()
        await eventually(lambda: len(api.watched_from) == 2 and len(api.watches) == 1)
        assert api.watched_from[1] == last
        api.put("x", pod("10.0.0.2"))
        await told.until(B)
    assert api.lists == 1


@pytest.mark.parametrize("how", ["in the watch", "by status"])
async def test_what_the_server_has_forgotten_is_listed_again(api: EndpointApi, how: str) -> None:
    api.put("x", pod("10.0.0.1"))
    async with watching(api) as told:
        await told.until(A)
        await eventually(lambda: len(api.watches) == 1)
        api.oldest = api.version + 1
        if how == "by status":
            api.end_watches()
        else:
            api.fail_watches(410)
        api.put("y", pod("10.0.0.2"))
        await told.until(A, B)
        assert api.lists > 1


async def test_the_last_pods_stay_while_the_server_fails_which_is_logged_once(
    api: EndpointApi, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, kubernetes.__name__)
    api.put("x", pod("10.0.0.1"))
    async with watching(api) as told:
        await told.until(A)
        await eventually(lambda: len(api.watches) == 1)
        api.status = 403
        api.end_watches()
        await eventually(lambda: len(caplog.records) >= 3, "it is tried again")
        assert told.sets[-1] == {A}
        api.put("x", pod("10.0.0.2"))
        api.status = 200
        await told.until(B)
    first, *others = caplog.records
    assert first.levelno == logging.WARNING
    assert {record.levelno for record in others} == {logging.DEBUG}
    assert first.__dict__["shards"] == 1
    assert first.__dict__["source"] == f"k8s:{NAMESPACE}/{SERVICE}:50051"
    assert f"needs a Role that lets it list and watch endpointslices in the namespace {NAMESPACE}" in str(
        first.__dict__["reason"]
    )


async def test_a_new_token_is_used_as_soon_as_it_is_there(api: EndpointApi) -> None:
    api.put("x", pod("10.0.0.1"))
    async with watching(api) as told:
        await told.until(A)
        await eventually(lambda: len(api.watches) == 1)
        await api.rotate_token("second")
        api.end_watches()
        await eventually(lambda: len(api.watches) == 1, "the watch goes on")
        api.put("x", pod("10.0.0.2"))
        await told.until(B)


async def test_a_token_that_is_gone_is_waited_for(api: EndpointApi) -> None:
    api.put("x", pod("10.0.0.1"))
    await api.delete_token()
    async with watching(api) as told:
        await asyncio.sleep(0.05)
        assert told.sets == [frozenset()]
        await api.rotate_token("later")
        await told.until(A)


async def test_an_answer_that_cannot_be_read_is_asked_for_again(api: EndpointApi) -> None:
    api.body = "<html>"
    api.put("x", pod("10.0.0.1"))
    async with watching(api) as told:
        await eventually(lambda: api.lists >= 2, "it is tried again")
        assert told.sets == [frozenset()]
        api.body = ""
        await told.until(A)


def test_the_flag_names_namespace_service_and_port() -> None:
    source = KubernetesService("ml", "caravan-demo-cpu", 50051)
    assert parse_source("k8s:ml/caravan-demo-cpu:50051") == source
    assert str(source) == "k8s:ml/caravan-demo-cpu:50051"
    assert RouterConfig(shard=("k8s:ml/caravan-demo-cpu:50051",)).sources == (source,)


@pytest.mark.parametrize("rest", ["", "caravan:50051", "ml/caravan", "ml/caravan:http", "ML/caravan:1", "ml/a/b:1"])
def test_a_service_that_cannot_be_one_is_refused(rest: str) -> None:
    with pytest.raises(ValueError, match=f"must be k8s:namespace/service:port. Given: 'k8s:{rest}'"):
        RouterConfig(shard=(f"k8s:{rest}",))
